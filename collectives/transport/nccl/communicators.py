"""NCCL's communicators through cupy: one thread that calls them, bounded waits, translated errors.

Facts about NCCL that shape this file (its user guide, "Thread Safety", "Group Calls" and "Fault
Tolerance"; cupy 14.2): a communicator, and all communicators of one device, must not be used from
two threads at once, and a group is a thread's own; init, split, the first use of a connection,
destroy and abort wait for other ranks without a limit; a group that fails still needs its end;
`NcclError` raises KeyError for the codes 7 and 8; a communicator that is collected is destroyed,
which may wait for ever.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import cuda

from collectives.errors import TransportError
from collectives.transport.nccl import pending

T = TypeVar("T")
_Job = tuple["futures.Future[Any]", Callable[[], Any]]

# What NCCL adds, and gloo: no other integers, no bools, no 8-bit floats.
DTYPES = {
    getattr(torch, name): f"NCCL_{name.upper()}"
    for name in ["float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64"]
}
# The first whose unique ids are bytes.
_CUPY_VERSION = [14, 2]
_CLOSE_SECONDS = 5.0
_ABORT_SECONDS = 3.0
_ABORTED = "its NCCL communicator was aborted"
_STATUS = {
    7: "ncclInProgress: communicators must block, unset NCCL_COMM_BLOCKING",
    8: "ncclTimeout",
}


def load_nccl() -> Any:
    """Return the module `cupy.cuda.nccl`.

    Raises:
        RuntimeError: torch sees no GPU.
        ImportError: cupy or NCCL's library is missing, too old or of another CUDA than torch; says
            what to install.
    """
    major = 12 if (torch.version.cuda or "").startswith("12.") else 13
    if not cuda.is_available():
        raise RuntimeError(
            "NCCL needs a GPU that torch sees: install a CUDA build of torch and NVIDIA's driver, "
            "or use CPU tensors"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import cupy
            from cupy.cuda import nccl, runtime
    except ImportError as error:
        raise ImportError(
            f'NCCL is called through cupy ({error}): pip install "adasum[cuda{major}]"'
        ) from None
    if [int(part) for part in cupy.__version__.split(".")[:2]] < _CUPY_VERSION:
        raise ImportError(
            f'cupy {cupy.__version__} is too old: pip install "cupy-cuda{major}x>=14.2"'
        )
    cupys = runtime.runtimeGetVersion() // 1000
    if cupys != major:
        raise ImportError(
            f"cupy is built for CUDA {cupys} and torch for CUDA {torch.version.cuda}: "
            f'pip uninstall cupy-cuda{cupys}x, then pip install "adasum[cuda{major}]"'
        )
    if not nccl.available:
        raise ImportError(f"cupy found no NCCL library: pip install nvidia-nccl-cu{major}")
    return nccl


@contextmanager
def translate_errors(nccl: Any, step: str) -> Iterator[None]:
    """Raise NCCL's errors as TransportErrors with NCCL's text."""
    try:
        yield
    except nccl.NcclError as error:
        raise TransportError(f"NCCL failed in {step}: {error}") from error
    except KeyError as error:
        if not error.args or not isinstance(error.args[0], int):
            raise
        text = _STATUS.get(error.args[0], "unknown to cupy")
        raise TransportError(f"NCCL failed in {step}: status {error.args[0]}, {text}") from error


class CallingThread:
    """The thread that calls NCCL for one device, and the stream that all its work goes to.

    All communicators that share it (`shared_thread`) are so used one after the other, on the host
    and on the GPU, as NCCL demands of those of one device. It never keeps the process from ending.
    While it has nothing to call it looks at the steps under way. A call that does not return in
    time is left behind with its thread, and another thread goes on.

    Args:
        device: The GPU.
        name: The thread's name.

    Attributes:
        stream: The communication stream.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        self.stream = cuda.Stream(device)
        self._device = device
        self._name = name
        self._users = 0
        self._watched: list[pending.Pending] = []
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        # Held by one thread twice where what it does meanwhile collects a transport.
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None

    def join(self) -> None:
        """Keep the thread running until `leave`."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._start()

    def leave(self, steps: pending.Pending | None) -> None:
        """Need the thread no more, and look no more at these steps."""
        with self._lock:
            self._users -= 1
            if steps in self._watched:
                self._watched.remove(steps)
        self._jobs.put(None)

    def watch(self, steps: pending.Pending) -> None:
        """Look at these steps now and then."""
        with self._lock:
            self._watched.append(steps)

    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def call(self, job: Callable[[], T], timeout: float) -> T:
        """Return what `job` returns; futures.TimeoutError where it takes over `timeout` s."""
        if threading.current_thread() is self._thread:
            return job()
        future: futures.Future[T] = futures.Future()
        self._jobs.put((future, job))
        try:
            return future.result(timeout)
        except futures.TimeoutError:
            # Not begun: it never will be. Else others must not wait behind it.
            if not future.cancel():
                with self._lock:
                    self._start()
            raise

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        cuda.set_device(self._device)
        while self._users and threading.current_thread() is self._thread:
            try:
                item = self._jobs.get(timeout=pending.CHECK_SECONDS)
            except queue.Empty:
                for steps in [*self._watched]:
                    # CUDA's errors reach the host's thread, too.
                    with suppress(RuntimeError):
                        steps.watch()
                continue
            if item is None:
                continue
            future, job = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(job())
                except BaseException as error:  # noqa: BLE001 - raised by whoever waits
                    future.set_exception(error)
            # Neither the job nor what it holds may live on while the next one is waited for.
            del item, future, job


_shared: weakref.WeakValueDictionary[torch.device, CallingThread] = weakref.WeakValueDictionary()
_sharing = threading.Lock()


def shared_thread(device: torch.device) -> CallingThread:
    """Return what calls NCCL for all groups of this process that are on a device.

    Where one process is one rank: of two ranks in a process each waits for the other's calls.
    """
    with _sharing:
        thread = _shared.get(device)
        if thread is None:
            thread = _shared[device] = CallingThread(device, f"nccl-{device}")
    return thread


class Communicators:
    """A rank's communicator on one device and the parts split from it, used from one thread.

    Args:
        nccl: The module `cupy.cuda.nccl`.
        thread: What calls NCCL.
    """

    def __init__(self, nccl: Any, thread: CallingThread) -> None:
        self.nccl = nccl
        self.thread = thread
        self._steps: pending.Pending | None = None
        self._made: list[Any] = []
        # Held to add, to ask or to begin to end the communicators; by one thread twice where what
        # it does meanwhile collects the transport, which closes this.
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._ended = False
        thread.join()

    def watch(self, steps: pending.Pending) -> None:
        """Look at these steps now and then, from the thread that calls NCCL."""
        self._steps = steps
        self.thread.watch(steps)

    def call(self, job: Callable[[], T], timeout: float) -> T:
        """Return what `job` returns, called by the thread: `CallingThread.call`."""
        return self.thread.call(job, timeout)

    def make(self, job: Callable[[], Any], timeout: float) -> Any:
        """Call a job that makes a communicator, which is ended with the others."""

        def run() -> Any:
            made = job()
            with self._lock:
                self._made.append(made)
                late = self._ended
            if late:
                # It came too late: whoever wanted it waits no more.
                _keep_for_ever(made)
                made.abort()
            return made

        return self.call(run, timeout)

    def group(self, job: Callable[[], None], timeout: float) -> None:
        """Call a job between groupStart and groupEnd."""

        def run() -> None:
            if self._ended:
                # While this waited for its turn behind what has ended all.
                raise TransportError("the NCCL communicators were ended")
            self.nccl.groupStart()
            try:
                job()
            except BaseException:
                # NCCL answers the end of a failed group with the failure: the first one counts.
                with suppress(self.nccl.NcclError, KeyError):
                    self.nccl.groupEnd()
                raise
            self.nccl.groupEnd()

        self.call(run, timeout)

    def check(self) -> None:
        """Raise an asynchronous error of any of the communicators, unless they are being ended.

        The lock keeps others from beginning to free one meanwhile; NCCL answers at once.
        """
        with self._lock:
            for made in () if self._ended else self._made:
                made.check_async_error()

    def abort(self) -> str:
        """End all communicators and what they have under way; returns within 3 s how that went.

        An abort waits for other ranks of the host to abort too, and some never will; it may also
        find the thread inside a call that the abort is to end. So it runs beside both.
        """
        made = self._begin_end()
        if made is None:
            return _ABORTED
        deadline = time.monotonic() + _ABORT_SECONDS
        threads = []
        for communicator in made:
            _keep_for_ever(communicator)
            thread = threading.Thread(target=communicator.abort, name="nccl-abort", daemon=True)
            thread.start()
            threads.append(thread)
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        self.thread.leave(self._steps)
        return _ABORTED

    def _begin_end(self) -> list[Any] | None:
        """Return all communicators once, None afterwards; what comes later aborts itself."""
        with self._lock:
            every = None if self._ended else [*self._made]
            self._ended = True
        return every

    def close(self) -> None:
        """Destroy all communicators, which waits for the host's other ranks, 5 s at the longest.

        Calls nothing in a forked child: CUDA does not survive the fork.
        """
        if os.getpid() != self._process:
            # Not locked: the thread that held the lock may not be here.
            for communicator in self._made:
                _keep_for_ever(communicator)
            return
        made = self._begin_end()
        if made is None:
            return

        def run() -> None:
            # The newest first; each is destroyed also where another one fails.
            with ExitStack() as stack:
                for communicator in made:
                    stack.callback(communicator.destroy)

        try:
            with translate_errors(self.nccl, "close"):
                self.call(run, _CLOSE_SECONDS)
        except BaseException as error:
            for communicator in made:
                _keep_for_ever(communicator)
            if not isinstance(error, futures.TimeoutError):
                raise
        finally:
            self.thread.leave(self._steps)


def _keep_for_ever(communicator: Any) -> None:
    """Keep it from being collected: cupy would destroy it, and wait for ranks that are gone."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(communicator))
