"""NCCL through cupy: one thread that calls it, bounded waits, communicators of our own.

Facts about NCCL that shape this file (its user guide, "Thread Safety", "Group Calls" and "Fault
Tolerance"; cupy 14.2): init, split, the first use of a connection, destroy and abort wait for other
ranks without a limit; a group that has failed must still be ended; and when a communicator object
is collected cupy destroys the communicator, which may wait for ever.

Tested with a strict stand-in for NCCL (tests/fakes/fake_nccl.py), and where there is a GPU by
tests/processes/test_nccl.py; two processes that shared a GPU have trained over it.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import warnings
from collections.abc import Callable
from concurrent import futures
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import cuda

from collectives.errors import TransportError
from collectives.transport.base import Messages, Transport
from collectives.transport.nccl.backend import Backend, translate_errors
from collectives.transport.nccl.calling_thread import CallingThread
from collectives.transport.process_groups import run_beside

# The dtypes that NCCL can sum, and gloo too: no other integers, no bools, no 8-bit floats.
DTYPES = {
    getattr(torch, name): f"NCCL_{name.upper()}"
    for name in ["float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64"]
}
# The first version whose unique ids are bytes.
_CUPY_VERSION = [14, 2]
# Both are short, since they may be waited for in vain when ranks are gone. An abort is to end
# within the 5 s after the timeout in which every rank is to raise its error.
_CLOSE_SECONDS = 5.0
_ABORT_SECONDS = 3.0
_ABORTED = "its NCCL communicator was aborted"


def load_nccl() -> Any:
    """Return the module `cupy.cuda.nccl`.

    RuntimeError if torch sees no GPU. ImportError, which says what to install, if cupy or NCCL's
    library is missing, too old or for another CUDA than torch's.
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
            f'NCCL is called through cupy ({error}): pip install "cupy-cuda{major}x>=14.2"'
        ) from None
    if [int(part) for part in cupy.__version__.split(".")[:2]] < _CUPY_VERSION:
        raise ImportError(
            f'cupy {cupy.__version__} is too old: pip install "cupy-cuda{major}x>=14.2"'
        )
    cupys = runtime.runtimeGetVersion() // 1000
    if cupys != major:
        raise ImportError(
            f"cupy is built for CUDA {cupys} and torch for CUDA {torch.version.cuda}: "
            f'pip uninstall cupy-cuda{cupys}x, then pip install "cupy-cuda{major}x>=14.2"'
        )
    if not nccl.available:
        raise ImportError(f"cupy found no NCCL library: pip install nvidia-nccl-cu{major}")
    return nccl


class CupyBackend(Backend):
    """A rank's communicator on one device, and those split from it for parts of the ranks.

    Making one raises as `load_nccl` does, and ValueError for another device than CUDA's.

    Args:
        store: The store through which the other ranks get rank 0's NCCL id.
        device: This rank's GPU, the current one unless given.
        thread: The thread that calls NCCL, shared with others on this device; else a new one.
    """

    device: torch.device
    shared = False
    sums = True

    def __init__(
        self,
        store: dist.Store,
        device: torch.device | None = None,
        *,
        thread: CallingThread | None = None,
    ) -> None:
        self._nccl = load_nccl()
        self.device = device or torch.device("cuda", cuda.current_device())
        if self.device.type != "cuda" or self.device.index is None:
            raise ValueError(f'device must be a CUDA device such as "cuda:0", got {self.device}')
        self._store = store
        self._thread = thread or CallingThread(self.device, f"nccl-{self.device}")
        self.turn = self._thread.turn
        self._process = os.getpid()
        self._made: list[Any] = []
        self._parts: dict[tuple[int, ...], Any] = {}
        # Held while communicators are added, checked, or taken to be destroyed. Reentrant, because
        # Python may collect the transport at any allocation, and its closing takes the lock, too.
        self._lock = threading.RLock()
        self._ended = False

    def open(self, host: Transport, device: torch.device, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        self._rank = host.rank
        self._others = [rank for rank in range(host.size) if rank != host.rank]
        # The count tells apart communicators of one store. Each rank has its own counter: all make
        # their communicators in one order, so the counters agree.
        count = self._store.add(f"adasum/nccl/made-by-{host.rank}", 1)
        self._store = dist.PrefixStore(f"adasum/nccl/{count}", self._store)
        if host.rank == 0:
            self._store.set("all", self._thread.call(self._nccl.get_unique_id, timeout))
        try:
            self._store.wait(["all"], timedelta(seconds=timeout))
        except RuntimeError:
            raise futures.TimeoutError(0) from None
        unique_id = self._store.get("all")

        def join() -> Any:
            return self._nccl.NcclCommunicator(host.size, unique_id, host.rank)

        self._whole = self._make(join, max(deadline - time.monotonic(), 0.1))

    def stream(self, device: torch.device) -> cuda.Stream:
        return self._thread.stream

    def exchange(self, sends: Messages, recvs: Messages, stream: Any, timeout: float) -> None:
        whole, kind = self._whole, self._nccl.NCCL_UINT8

        def post() -> None:
            for messages, call in ((sends, whole.send), (recvs, whole.recv)):
                for peer, tensor in messages:
                    nbytes = tensor.numel() * tensor.element_size()
                    call(tensor.data_ptr(), nbytes, kind, peer, stream.cuda_stream)

        self._group(post, timeout)

    def all_reduce(self, values: torch.Tensor, among: Any, stream: Any, timeout: float) -> None:
        """Sum over all ranks, or over one of the parts into which they are split.

        Every rank calls it with the part to which it belongs. The first call with these parts
        splits the communicator, on all ranks together, even if there is nothing to sum.
        """
        if among is None or len(among) == len(self._others) + 1:
            part = self._whole
        else:
            part = self._parts.get(among) or self._split(among, timeout)
        kind, add = getattr(self._nccl, DTYPES[values.dtype]), self._nccl.NCCL_SUM

        def post() -> None:
            address = values.data_ptr()
            part.allReduce(address, address, values.numel(), kind, add, stream.cuda_stream)

        if values.numel():
            self._group(post, timeout)

    def check(self) -> None:
        # NCCL allows this during other calls, and answers at once. The lock keeps other threads
        # from freeing a communicator meanwhile.
        with self._lock:
            for communicator in () if self._ended else self._made:
                communicator.check_async_error()

    def abort(self) -> str:
        """Abort all communicators and what they have under way; return the outcome within 3 s.

        An abort may wait for other ranks of the host, of which some will never abort. And the
        calling thread may be inside the very call that is to be aborted. So each abort runs in a
        thread of its own.
        """
        deadline = time.monotonic() + _ABORT_SECONDS
        made = self._begin_end()
        threads = [run_beside(each.abort, "nccl-abort", 0.0)[0] for each in made or ()]
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        return _ABORTED

    def close(self) -> None:
        """Destroy all communicators, which waits for the host's other ranks, but at most 5 s.

        Does nothing in a forked child: CUDA cannot be used there, and the thread that held the lock
        may not exist there.
        """
        if os.getpid() != self._process or (made := self._begin_end()) is None:
            return

        def destroy() -> None:
            # The newest first, each of them even if another one fails.
            with ExitStack() as stack:
                for communicator in made:
                    stack.callback(communicator.destroy)

        with suppress(futures.TimeoutError), translate_errors("close"):
            self._thread.call(destroy, _CLOSE_SECONDS)

    def split(self, host: Transport, ranks: tuple[int, ...]) -> CupyBackend:
        """Return a back end on the same device.

        Both call NCCL from one thread and use one stream, so that their work runs one after the
        other. So all ranks have to start work of both in the same order.
        """
        store = dist.PrefixStore(f"ranks {ranks}", self._store)
        return CupyBackend(store, self.device, thread=self._thread)

    def _split(self, ranks: tuple[int, ...], timeout: float) -> Any:
        if self._rank not in ranks or list(ranks) != sorted({*ranks}):
            raise ValueError(f"ranks must be ascending and hold {self._rank}, got {ranks}")
        color, key = ranks[0], ranks.index(self._rank)
        part = self._make(lambda: self._whole.commSplit(color, key), timeout)
        self._parts[ranks] = part
        return part

    def _make(self, job: Callable[[], Any], timeout: float) -> Any:
        """Call a job that makes a communicator; it is then ended together with the others."""

        def run() -> Any:
            made = job()
            # Never collected: cupy would destroy it, and wait for ranks that are gone.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
            with self._lock:
                self._made.append(made)
                late = self._ended
            if late:
                # Made too late: the caller has timed out, and all has been ended meanwhile.
                made.abort()
            return made

        try:
            return self._thread.call(run, timeout)
        except futures.TimeoutError:
            raise futures.TimeoutError(*self._others) from None

    def _group(self, job: Callable[[], None], timeout: float) -> None:
        """Call a job between groupStart and groupEnd."""

        def run() -> None:
            if self._ended:
                # Ended while this job was queued.
                raise TransportError("the NCCL communicators were ended")
            self._nccl.groupStart()
            try:
                job()
            except BaseException:
                # groupEnd of a failed group reports the failure again: the first error is raised.
                with suppress(self._nccl.NcclError, KeyError):
                    self._nccl.groupEnd()
                raise
            self._nccl.groupEnd()

        self._thread.call(run, timeout)

    def _begin_end(self) -> list[Any] | None:
        """Return all communicators the first time, then None; `_make` aborts any made later."""
        with self._lock:
            every = None if self._ended else [*self._made]
            self._ended = True
        return every
