"""Asynchronous collectives: one communication thread a group, one order.

A `Work` is what a caller waits for; a `Worker` runs a group's calls in the order of submission.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from collectives.errors import TransportError


class Work:
    """A collective under way.

    `wait()` returns what the synchronous call would have returned, or raises what it would have
    raised. On CUDA it orders the current stream behind the collective instead of blocking the host.
    """

    def __init__(self) -> None:
        # Held until the collective has ended: an Event costs as much as a small sum.
        self._ending = threading.Lock()
        self._ending.acquire()
        self._ended = False
        self._result: Any = None
        self._error: BaseException | None = None
        # Behind the collective, one for each device that it is on.
        self._events: list[tuple[torch.device, torch.cuda.Event]] = []
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        # Where its job may be run by whoever waits for it first.
        self._worker: Worker | None = None

    def wait(self) -> Any:
        """Block until the collective has ended; every wait is bounded by the group's timeout."""
        if not self._ended:
            if self._worker is not None:
                self._worker.claim(self)
            with self._ending:
                pass
        if self._error is not None:
            raise self._error
        for device, event in self._events:
            torch.cuda.current_stream(device).wait_event(event)
        if self._events:
            # A result's memory may be of the communication stream, where nothing is behind what
            # the caller does with it.
            for tensor in _on_cuda(self._result):
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return self._result

    def is_completed(self) -> bool:
        """Whether `wait()` would return or raise without waiting."""
        return self._ended and all(event.query() for _, event in self._events)

    def has_ended(self) -> bool:
        """Whether the collective has ended on the host, well or not."""
        return self._ended

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback()` once when the collective has ended, well or not.

        In the communication thread, with the collective's CUDA stream current; at once in this
        thread where it has ended already. It must not wait for a collective of the same group. What
        it raises in the communication thread goes to threading.excepthook.
        """
        with self._lock:
            if not self._ended:
                self._callbacks.append(callback)
                return
        callback()

    def run(self, call: Callable[[], Any], streams: Sequence[torch.cuda.Stream] = ()) -> None:
        """Carry out the call and keep its result or its error for `wait()`.

        Args:
            call: The collective.
            streams: Those to be current, one a device; so is the device of the first.
        """
        with torch.no_grad():
            if not streams:
                self._keep(call)
                return
            with ExitStack() as current:

                def on_streams() -> Any:
                    for stream in reversed(streams):
                        current.enter_context(torch.cuda.stream(stream))
                    result = call()
                    for stream in streams:
                        event = torch.cuda.Event()
                        event.record(stream)
                        self._events.append((stream.device, event))
                    return result

                self._keep(on_streams)

    def _keep(self, call: Callable[[], Any]) -> None:
        """Keep what `call` returns or raises, then do what waits for it."""
        try:
            self._result = call()
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


def _report_error() -> None:
    """Hand the error being handled to threading.excepthook, as one that ends a thread."""
    said = (*sys.exc_info(), threading.current_thread())
    threading.excepthook(threading.ExceptHookArgs(said))


def _on_cuda(values: Any) -> list[torch.Tensor]:
    """Return the CUDA tensors among a call's tensors, or in its result."""
    several = values if isinstance(values, list | tuple) else (values,)
    return [each for each in several if isinstance(each, torch.Tensor) and each.is_cuda]


# The communication thread looks for jobs so often after one, before it sleeps until it is woken.
_LOOK_SECONDS, _LOOKS = 1e-3, 50


class _Job(NamedTuple):
    """A call in the queue: what it fills, and what runs it."""

    work: Work
    run: Callable[[], None]


class Worker:
    """Runs a group's collectives one after the other, in the order in which they were submitted.

    A synchronous call runs in the caller's thread when nothing is queued, which saves two thread
    switches; otherwise it takes its place in the queue.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        # One True for each job put in the queue; False ends the thread.
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._jobs: deque[_Job] = deque()
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
            if not torch.is_grad_enabled():
                return function()
            with torch.no_grad():
                return function()
        finally:
            self._running.release()

    def begin(self, first: Callable[[], None], rest: Callable[[], Any]) -> Work | None:
        """Run `first` in this thread, and queue `rest`, which the Work's wait() may run itself.

        None, and nothing done, where a call is queued or running.
        """
        work = Work()
        work._worker = self
        inference = torch.is_inference_mode_enabled()

        def run() -> None:
            with torch.inference_mode(inference):
                work.run(rest)

        job = _Job(work, run)
        with self._lock:
            self._check_open()
            if self._jobs or not self._running.acquire(blocking=False):
                return None
            try:
                self._start_thread()
            except BaseException:
                self._running.release()
                raise
            # Before `first`, so that no other call comes between.
            self._jobs.append(job)
        try:
            first()
        except BaseException:
            with self._lock:
                self._jobs.popleft()
            raise
        finally:
            self._running.release()
        if not self._standing_by:
            self._wake.put(True)
        return work

    def claim(self, work: Work) -> None:
        """Run the job of `work` in this thread, if it is the next one and nobody runs any."""
        if self._running.acquire(blocking=False):
            try:
                with self._lock:
                    mine = bool(self._jobs) and self._jobs[0].work is work
                    job = self._jobs.popleft() if mine else None
                if job is not None:
                    job.run()
            finally:
                self._running.release()

    def submit(self, function: Callable[[], Any], tensors: Sequence[torch.Tensor] = ()) -> Work:
        """Queue `function`; on CUDA it runs on streams of its own, behind the caller's work.

        Args:
            function: The call.
            tensors: What it works on.

        Raises:
            TransportError: After `close`.
            RuntimeError: The system has no thread left; nothing was queued.
        """
        work = Work()
        inference = torch.is_inference_mode_enabled()
        lanes: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Event]] = {}
        for tensor in _on_cuda(tensors):
            if tensor.device not in lanes:
                lanes[tensor.device] = self._lane(tensor.device)
            # The caller may let go of it before the stream is done with it.
            tensor.record_stream(lanes[tensor.device][0])
        streams = [stream for stream, _ in lanes.values()]

        def behind_the_caller() -> Any:
            for stream, before in lanes.values():
                stream.wait_event(before)
            return function()

        def run() -> None:
            # Inference mode is a thread's own, and nobody outside it may write to its tensors.
            with torch.inference_mode(inference):
                work.run(behind_the_caller, streams)

        with self._lock:
            self._check_open()
            self._start_thread()
            self._jobs.append(_Job(work, run))
            self._wake.put(True)
        return work

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("this group was shut down while it was called")

    def _start_thread(self) -> None:
        """Start the communication thread where there is none; the caller holds the lock."""
        if self._thread is None:
            thread = threading.Thread(
                target=self._loop, args=(torch.get_num_threads(),), name=self._name, daemon=True
            )
            thread.start()
            self._thread = thread

    def _lane(self, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Event]:
        """Return the stream for a device, and an event behind the caller's work so far."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        before = torch.cuda.Event()
        before.record(torch.cuda.current_stream(device))
        return self._streams[device], before

    def _loop(self, threads: int) -> None:
        # BLAS in a new thread would start as many of its own as there are processors, whatever the
        # caller set: ranks that share a host then wait for each other's.
        torch.set_num_threads(threads)
        while self._is_wanted():
            try:
                with self._running:
                    with self._lock:
                        # Whoever waited for it may have run it.
                        job = self._jobs.popleft() if self._jobs else None
                    if job is not None:
                        job.run()
            except BaseException:  # noqa: BLE001 - the calls behind this one must go on
                _report_error()

    def _is_wanted(self) -> bool:
        """Wait for a job; return False where the thread is to end.

        For a while after each one it looks for the next by itself, now and then, so that calls
        which follow each other closely, and are waited for at once, need not wake it.
        """
        self._standing_by = True
        for _ in range(_LOOKS):
            try:
                return self._wake.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                if self._jobs:
                    return True
        with self._lock:
            self._standing_by = False
            if self._jobs:
                return True
        return self._wake.get()

    def close(self, timeout: float) -> None:
        """Let what is queued finish, then end the thread; wait `timeout` seconds at most."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._closed = True
            for _ in self._jobs:
                self._wake.put(True)
            self._wake.put(False)
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)
