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
from itertools import islice
from typing import Any

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
        # The worker that knows what is left to do, where whoever waits has to do it.
        self._left_to: Worker | None = None

    def wait(self) -> Any:
        """Block until the collective has ended; every wait is bounded by the group's timeout."""
        if self._left_to is not None:
            self._left_to.finish(self)
        if not self._ended:
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
        self._progress()
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
        self._progress()
        with self._lock:
            if not self._ended:
                self._callbacks.append(callback)
                return
        callback()

    def _progress(self) -> None:
        """Let the communication thread do what is left: nobody may wait for it in this one."""
        if self._left_to is not None and not self._ended:
            self._left_to.submit(lambda: None)
            self._left_to = None

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
            except Exception:  # noqa: BLE001 - the calls behind this one must go on
                said = (*sys.exc_info(), threading.current_thread())
                threading.excepthook(threading.ExceptHookArgs(said))


def _on_cuda(values: Any) -> list[torch.Tensor]:
    """Return the CUDA tensors among a call's tensors, or in its result."""
    several = values if isinstance(values, list | tuple) else (values,)
    return [each for each in several if isinstance(each, torch.Tensor) and each.is_cuda]


class Worker:
    """Runs a group's collectives one after the other, in the order in which they were submitted.

    A synchronous call runs in the caller's thread when nothing is queued, which saves two thread
    switches; otherwise it takes its place in the queue.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._lock = threading.Lock()
        self._pending = 0
        self._notes: deque[Any] = deque()
        # Held by whoever runs a call. Before that it runs what is left of the one before.
        self._running = threading.Lock()
        self._left: tuple[Work, Callable[[], None]] | None = None
        self._closed = False

    def call(
        self, function: Callable[[], Any], tensors: Sequence[torch.Tensor] = (), note: Any = None
    ) -> Any:
        """Run `function` in its turn and return its result. Arguments as for `submit`."""
        with self._lock:
            inline = self._pending == 0 and self._running.acquire(blocking=False)
        if not inline:
            return self.submit(function, tensors, note).wait()
        try:
            self._finish_left()
            if not torch.is_grad_enabled():
                return function()
            with torch.no_grad():
                return function()
        finally:
            self._running.release()

    def begin(self, first: Callable[[], None], rest: Callable[[], Any]) -> Work | None:
        """Run `first` in this thread and leave `rest` to the Work's wait() or the next call.

        None, and nothing done, where something is queued, running or left.
        """
        with self._lock:
            if self._closed:
                raise TransportError("this group was shut down while it was called")
            if self._pending or not self._running.acquire(blocking=False):
                return None
        try:
            if self._left is not None:
                return None
            first()
            work = Work()
            work._left_to = self
            inference = torch.is_inference_mode_enabled()

            def run() -> None:
                if torch.is_inference_mode_enabled() == inference:
                    work.run(rest)
                    return
                with torch.inference_mode(inference):
                    work.run(rest)

            self._left = work, run
            return work
        finally:
            self._running.release()

    def finish(self, work: Work) -> None:
        """Run in this thread what is left of `work`, unless another thread does."""
        # Whoever runs a call now has run what was left, or does so before.
        if self._left is not None and self._running.acquire(blocking=False):
            try:
                if self._left is not None and self._left[0] is work:
                    self._finish_left()
            finally:
                self._running.release()

    def _finish_left(self) -> None:
        left, self._left = self._left, None
        if left is not None:
            left[1]()

    def upcoming(self, max_notes: int) -> list[Any]:
        """Return the notes of what is queued behind the running function, in order."""
        with self._lock:
            return list(islice(self._notes, max_notes))

    def submit(
        self, function: Callable[[], Any], tensors: Sequence[torch.Tensor] = (), note: Any = None
    ) -> Work:
        """Queue `function`; on CUDA it runs on streams of its own, behind the caller's work.

        Args:
            function: The call.
            tensors: What it works on.
            note: What `upcoming` returns for it while it waits.

        Raises:
            TransportError: After `close`.
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

        def job() -> None:
            # Inference mode is a thread's own, and nobody outside it may write to its tensors.
            with self._running, torch.inference_mode(inference):
                self._finish_left()
                with self._lock:
                    self._notes.popleft()
                work.run(behind_the_caller, streams)
            with self._lock:
                self._pending -= 1

        with self._lock:
            if self._closed:
                raise TransportError("this group was shut down while it was called")
            self._pending += 1
            self._notes.append(note)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._loop, args=(torch.get_num_threads(),), name=self._name, daemon=True
                )
                self._thread.start()
            self._queue.put(job)
        return work

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
        while (job := self._queue.get()) is not None:
            job()

    def close(self, timeout: float) -> None:
        """Let what is queued finish, then end the thread; wait `timeout` seconds at most."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._closed = True
            self._queue.put(None)
        if self._left is not None:
            self.finish(self._left[0])
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)
