"""Asynchronous collectives: one communication thread a group, one order.

A `Work` is what a caller waits for; a `Worker` runs a group's calls in the order of submission.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, TypeVar

import torch

from collectives.errors import CollectiveError, TransportError
from collectives.trace import recording, span

# How often whoever waits looks whether there still is a thread that could end the wait.
_CHECK_SECONDS = 1.0
# The communication thread looks for jobs so often after one, before it sleeps until it is woken.
_POLL_SECONDS, _MAX_POLLS = 5e-3, 10

# What the synchronous call returns.
T_co = TypeVar("T_co", covariant=True)


class Work(Generic[T_co]):
    """A collective under way.

    `wait()` returns what the synchronous call would have returned, or raises what it would have
    raised. On CUDA it orders the current stream behind the collective instead of blocking the host;
    what ends a collective after that, such as a rank that never comes, is raised by later waits and
    by the group's next call.
    The communication thread may refer to the tensors a moment longer, until it runs the next call.
    """

    # What timelines call the collective.
    name = ""

    def __init__(self) -> None:
        # Held until the collective has ended: an Event costs as much as a small sum.
        self._ending = threading.Lock()
        self._ending.acquire()
        self._ended = False
        self._result: Any = None
        self._error: BaseException | None = None
        self._streams: Sequence[torch.cuda.Stream] = ()
        # Behind the collective, one for each device that it is on.
        self._events: list[tuple[torch.device, torch.cuda.Event]] = []
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        # What ends it, and whether whoever waits for it first may run its job.
        self._worker: Worker | None = None
        self._claimable = False

    def wait(self) -> T_co:
        """Block until the collective has ended; every wait is bounded by the group's timeout."""
        if not recording():
            return self._wait()
        with span(lambda: f"wait {self.name or 'for a call'}"):
            return self._wait()

    def _wait(self) -> Any:
        if self._claimable and self._worker is not None:
            self._worker.claim(self)
        self._wait_for_host()
        if self._error is not None:
            raise self._error
        for device, event in self._events:
            torch.cuda.current_stream(device).wait_event(event)
        if self._events:
            # A result's memory may be of the communication stream, where nothing is behind what
            # the caller does with it.
            for tensor in _on_cuda(self._result):
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
            if self._worker is not None:
                self._worker.check_streams()
        return self._result

    def _wait_for_host(self) -> None:
        while not self._ended:
            if self._ending.acquire(timeout=_CHECK_SECONDS):
                self._ending.release()
            elif self._worker is not None and not self._worker.is_alive():
                raise TransportError("the communication thread ended before the collective")

    def is_completed(self) -> bool:
        """Whether `wait()` would return or raise without waiting."""
        return self._ended and (
            all(event.query() for _, event in self._events) or self._streams_failed()
        )

    def _streams_failed(self) -> bool:
        """Whether wait() would raise what ended the collective on its stream."""
        try:
            if self._worker is not None:
                self._worker.check_streams()
        except CollectiveError:
            return True
        return False

    def has_ended(self) -> bool:
        """Whether the collective has ended on the host, well or not."""
        return self._ended

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback()` once when the collective has ended, well or not.

        In the communication thread, or at once in this one where the collective has ended already;
        its CUDA stream is current. It must not wait for a collective of the same group. What it
        raises in the communication thread goes to threading.excepthook.
        """
        with self._lock:
            if not self._ended:
                self._callbacks.append(callback)
                return
        with _current(self._streams):
            callback()

    def run(self, call: Callable[[], Any], streams: Sequence[torch.cuda.Stream] = ()) -> None:
        """Carry out the call and keep its result or its error for `wait()`.

        Args:
            call: The collective.
            streams: Those to be current, one a device; so is the device of the first.
        """
        self._streams = streams
        with torch.no_grad(), ExitStack() as current:
            try:
                current.enter_context(_current(streams))
                self._result = call()
                for stream in streams:
                    self._events.append((stream.device, stream.record_event()))
            except BaseException as error:  # noqa: BLE001 - wait() raises it
                self._error = error
            finally:
                with self._lock:
                    self._ended = True
                    self._ending.release()
                    callbacks, self._callbacks = self._callbacks, []
            for callback in callbacks:
                try:
                    callback()
                except BaseException:  # noqa: BLE001 - the calls behind this one must go on
                    _report_error()


@contextmanager
def _current(streams: Sequence[torch.cuda.Stream]) -> Iterator[None]:
    """Make these streams current, one a device, and the device of the first."""
    with ExitStack() as current:
        for stream in reversed(streams):
            current.enter_context(torch.cuda.stream(stream))
        yield


def _report_error() -> None:
    """Hand the error being handled to threading.excepthook, as one that ends a thread."""
    said = (*sys.exc_info(), threading.current_thread())
    threading.excepthook(threading.ExceptHookArgs(said))


def _on_cuda(values: Any) -> list[torch.Tensor]:
    """Return the CUDA tensors among a call's tensors, or in its result."""
    several = values if isinstance(values, list | tuple) else (values,)
    return [each for each in several if isinstance(each, torch.Tensor) and each.is_cuda]


class Worker:
    """Runs a group's collectives one after the other, in the order in which they were submitted.

    A synchronous call runs in the caller's thread when nothing is queued, which saves two thread
    switches; otherwise it takes its turn in the queue.

    Args:
        name: The communication thread's.
        check_streams: Raises what ended collectives after they were put on a stream, if anything.
    """

    def __init__(self, name: str, check_streams: Callable[[], None] = lambda: None) -> None:
        self._name = name
        self.check_streams = check_streams
        # Each collective in the queue, with what runs it.
        self._jobs: deque[tuple[Work, Callable[[], None]]] = deque()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        # Whether the thread looks for jobs by itself. To wake it costs as much as a small sum.
        self._standing_by = False
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._lock = threading.Lock()
        # Held by whoever runs a call, and takes it from the queue.
        self._running = threading.Lock()
        self._closed = False

    def call(self, function: Callable[[], Any], tensors: Sequence[torch.Tensor] = ()) -> Any:
        """Run `function` in its turn and return its result. Arguments as for `submit`."""
        with self._lock:
            inline = not self._jobs and self._running.acquire(blocking=False)
        if not inline:
            return self.submit(function, tensors).wait()
        try:
            with torch.no_grad():
                return function()
        finally:
            self._running.release()

    def try_call(self, function: Callable[[], None]) -> bool:
        """Run `function` in this thread where no call runs; return whether it did."""
        if not self._running.acquire(blocking=False):
            return False
        try:
            function()
        finally:
            self._running.release()
        return True

    def begin(self, first: Callable[[], None], rest: Callable[[], Any]) -> Work | None:
        """Run `first` in this thread, and queue `rest`, which the Work's wait() may run itself.

        None, and nothing done, where a call is queued or running.
        """
        with self._lock:
            self._start_thread()
            if self._jobs or not self._running.acquire(blocking=False):
                return None
            # Before `first`, so that no other call comes between.
            work = self._queue(rest)
        try:
            first()
        except BaseException:
            self._jobs.popleft()
            raise
        finally:
            self._running.release()
        work._claimable = True
        if not self._standing_by:
            self._wake.set()
        return work

    def claim(self, work: Work) -> None:
        """Run the job of `work` in this thread, if it is the next one and nobody runs any."""
        if self._running.acquire(blocking=False):
            try:
                self._run_next(work)
            finally:
                self._running.release()

    def submit(
        self,
        function: Callable[[], Any],
        tensors: Sequence[torch.Tensor] = (),
        *,
        now: bool = False,
    ) -> Work:
        """Queue `function`; on CUDA it runs on streams of its own, behind the caller's work.

        Args:
            function: The call.
            tensors: What it works on.
            now: Whether to return only when it has ended on the host, which on CUDA has put it on
                its streams by then; in this thread, if it is the next one.

        Raises:
            TransportError: After `close`.
            RuntimeError: The system has no thread left; nothing was queued.
        """
        # The streams, one a device, with an event behind the caller's work so far.
        before: dict[torch.cuda.Stream, torch.cuda.Event] = {}
        for tensor in _on_cuda(tensors):
            device = tensor.device
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            stream = self._streams[device]
            if stream not in before:
                before[stream] = torch.cuda.current_stream(device).record_event()
            # The caller may let go of it before the stream is done with it.
            tensor.record_stream(stream)

        def behind_the_caller() -> Any:
            for stream, event in before.items():
                stream.wait_event(event)
            return function()

        with self._lock:
            self._start_thread()
            work = self._queue(behind_the_caller, [*before])
        if now:
            self.claim(work)
        self._wake.set()
        # A callback in the communication thread must not wait for what that has to run.
        if now and threading.current_thread() is not self._thread:
            work._wait_for_host()
        return work

    def is_alive(self) -> bool:
        """Whether the communication thread can still run what is queued."""
        return self._thread is not None and self._thread.is_alive()

    def _queue(self, call: Callable[[], Any], streams: Sequence[torch.cuda.Stream] = ()) -> Work:
        """Put a call behind those in the queue."""
        work: Work[Any] = Work()
        work._worker = self
        inference = torch.is_inference_mode_enabled()

        def run() -> None:
            # Inference mode is a thread's own, and nobody outside it may write to its tensors.
            with torch.inference_mode(inference):
                work.run(call, streams)

        self._jobs.append((work, run))
        return work

    def _run_next(self, only: Work | None = None) -> None:
        """Run the first job, which has to be of `only` where that is given; holds `_running`."""
        # Whoever waited for it may have run it.
        if self._jobs and only in (None, self._jobs[0][0]):
            _, run = self._jobs.popleft()
            run()

    def _start_thread(self) -> None:
        """Start the communication thread where there is none; the caller holds the lock."""
        if self._closed:
            raise TransportError("this group was shut down while it was called")
        if self._thread is None:
            thread = threading.Thread(
                target=self._loop, args=(torch.get_num_threads(),), name=self._name, daemon=True
            )
            thread.start()
            self._thread = thread

    def _loop(self, threads: int) -> None:
        """Run the jobs, until the worker is closed and none is left.

        For a while after each one the thread looks for the next by itself, now and then, so that
        calls which follow each other closely, and are waited for at once, need not wake it.
        """
        # BLAS in a new thread would start as many of its own as there are processors, whatever the
        # caller set: ranks that share a host then wait for each other's.
        torch.set_num_threads(threads)
        polls = 0
        while self._jobs or not self._closed:
            self._standing_by = polls < _MAX_POLLS
            # Who has not seen the line above has queued a job before this one.
            if not self._jobs:
                polls += 1
                if self._wake.wait(_POLL_SECONDS if self._standing_by else None):
                    polls = 0
            self._wake.clear()
            while self._jobs:
                polls = 0
                try:
                    with self._running:
                        self._run_next()
                except BaseException:  # noqa: BLE001 - the calls behind this one must go on
                    _report_error()

    def close(self, timeout: float) -> None:
        """Let what is queued finish, then end the thread; wait `timeout` seconds at most."""
        with self._lock:
            self._closed = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)
