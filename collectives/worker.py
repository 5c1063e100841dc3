"""What runs a group's collectives: one communication thread, one order.

An exception may come at any line: of a signal's handler, for want of memory, or raised into a
thread. So nothing here is done between taking a lock and a `try`: who runs a call is an entry of a
dict that names it from the instant at which it is made (`Worker._claim`), and what puts an end to a
state is the first thing that a handler or `finally` does. CPython runs signal handlers where a
function begins, after a call of one in C, and where a loop goes back; never between two stores.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from collectives.errors import TransportError
from collectives.inference_mode import inference_mode
from collectives.work import CHECK_SECONDS, Work, on_cuda, report_error

# The communication thread looks for jobs so often after one, before it sleeps until it is woken.
_POLL_SECONDS, _MAX_POLLS = 5e-3, 10
_FOR_EVER = -1.0
# Calls that may be queued. Who makes another one waits for the oldest.
MAX_QUEUED = 8192
# How much longer than a step's timeout nothing may come of the queue while it is closed: the step
# raises its own error before.
_CLOSE_SECONDS = 2.0


class Worker:
    """Runs a group's collectives one after the other, in the order in which they were submitted.

    A synchronous call runs in the caller's thread when nothing is queued, which saves two thread
    switches; otherwise it takes its turn in the queue.

    Args:
        name: The communication thread's.
        check_streams: Raises what ended collectives after they were put on a stream, if anything.

    Attributes:
        failure: The first error by which a call may have been left half made. What runs calls has
            to look at it; the worker runs them all the same.
        unraised: The text of an asynchronous call's mismatch that no wait has raised yet.
    """

    def __init__(self, name: str, check_streams: Callable[[], None] = lambda: None) -> None:
        self._name = name
        self.check_streams = check_streams
        self.failure: BaseException | None = None
        self.unraised = ""
        # Each collective that has not ended, with what runs it. The first may be running.
        self._jobs: deque[tuple[Work[Any], Callable[[], None]]] = deque()
        # An Event would be left locked by an exception while it is set.
        self._wake = threading.Lock()
        self._wake.acquire()
        self._thread: threading.Thread | None = None
        # The threads that have ended. Thread.is_alive, interrupted, takes one that runs for such.
        self._over: set[threading.Thread] = set()
        # Whether the thread looks for jobs by itself. To wake it costs as much as a small sum.
        self._standing_by = False
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        # Who runs a call, or takes one from the queue: under 0 its thread, in a tuple of its own.
        # setdefault is atomic, and whoever is interrupted behind it still finds whose it is.
        self._claim: dict[int, tuple[int]] = {}
        self._closed = False
        self._process = os.getpid()

    def call(self, function: Callable[[], Any], tensors: Sequence[torch.Tensor] = ()) -> Any:
        """Run `function` in its turn and return its result. Arguments as for `submit`.

        Raises:
            TransportError: This thread is inside a call of the group, or as `submit`.
        """
        me, grad = (threading.get_ident(),), torch.is_grad_enabled()
        try:
            if not self._jobs and self._claim.setdefault(0, me) is me:
                with torch.no_grad():
                    return function()
        finally:
            if 0 in self._claim and self._claim[0] is me:
                del self._claim[0]
                self._leave(grad)
        self._refuse_nested()
        work = self.submit(function, tensors)
        try:
            return work.wait()
        except BaseException as error:
            if not work._ended and self.failure is None:
                self.failure = error
            raise

    def try_call(self, function: Callable[[], None]) -> bool:
        """Run `function` in this thread where no call runs; return whether it did."""
        me, grad = (threading.get_ident(),), torch.is_grad_enabled()
        try:
            if self._claim.setdefault(0, me) is not me:
                return False
            function()
            return True
        finally:
            if 0 in self._claim and self._claim[0] is me:
                del self._claim[0]
                self._leave(grad)

    def begin(self, first: Callable[[], None], rest: Callable[[], Any]) -> Work[Any] | None:
        """Run `first` in this thread, and queue `rest`, which the Work's wait() may run itself.

        None, and nothing done, where a call is queued or running.
        """
        self._start_thread()
        work, run = self._job(rest)
        work._claimable = True
        me, begun = (threading.get_ident(),), False
        try:
            try:
                if self._jobs or self._claim.setdefault(0, me) is not me:
                    return None
                begun = True
                first()
                # Before what was submitted meanwhile.
                self._jobs.appendleft((work, run))
            finally:
                if 0 in self._claim and self._claim[0] is me:
                    del self._claim[0]
            if not self._standing_by:
                self._wake_thread()
        except BaseException as error:
            if begun and self.failure is None:
                self.failure = error
            raise
        return work

    def run_first(self, only: Work[Any] | None = None) -> bool:
        """Run the first job, of `only` where that is given; False where it is not to be had."""
        me, grad = (threading.get_ident(),), torch.is_grad_enabled()
        try:
            if not self._jobs or self._claim.setdefault(0, me) is not me or not self._jobs:
                return False
            work, run = self._jobs[0]
            if only not in (None, work):
                return False
            # It stays in the queue until it has ended: so none is lost.
            if not work._ended:
                run()
            self._jobs.popleft()
            return True
        finally:
            if 0 in self._claim and self._claim[0] is me:
                del self._claim[0]
                self._leave(grad)

    def _leave(self, grad: bool) -> None:
        """Go on after a call in this thread. grad: whether autograd recorded before it."""
        # no_grad() that is interrupted while it begins or ends leaves autograd off.
        if torch.is_grad_enabled() is not grad:
            torch.set_grad_enabled(grad)
        if self._jobs:
            self._wake_thread()

    def fail(self, error: BaseException) -> None:
        """Take note of what may have left a call half made."""
        if self.failure is None:
            self.failure = error

    def check_waiting(self, work: Work[Any]) -> None:
        """Raise TransportError where nobody will end `work` while this thread waits for it."""
        self._refuse_nested()
        if self.is_alive() or self._claim or work._ended:
            return
        error = TransportError("the communication thread ended before the collective")
        self.fail(error)
        raise error

    def _is_inside(self) -> bool:
        """Whether this thread is inside a call."""
        holder = self._claim.get(0)
        return holder is not None and holder[0] == threading.get_ident()

    def _refuse_nested(self) -> None:
        """Raise TransportError inside a call of this thread's, which has to end first."""
        if self._is_inside():
            raise TransportError(
                "this thread is inside a call of the same group, in a callback or a signal's "
                "handler, and would wait for itself: pass async_op=True and wait() elsewhere"
            )

    def submit(
        self,
        function: Callable[[], Any],
        tensors: Sequence[torch.Tensor] = (),
        *,
        now: bool = False,
    ) -> Work[Any]:
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
        self._wait_for_room()
        # The streams, one a device, with an event behind the caller's work so far.
        before: dict[torch.cuda.Stream, torch.cuda.Event] = {}
        for tensor in on_cuda(tensors):
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

        self._start_thread()
        job = self._job(behind_the_caller, [*before])
        try:
            self._jobs.append(job)
            if now:
                self.run_first(job[0])
            self._wake_thread()
            # A callback must not wait for what comes after the call that it is in.
            if now and not self._is_inside():
                job[0]._wait_for_host()
        except BaseException as error:
            # It is queued, and nobody gets its Work.
            if self.failure is None:
                self.failure = error
            raise
        return job[0]

    def _wait_for_room(self) -> None:
        """Wait until the oldest call has ended where MAX_QUEUED are queued.

        Not inside a call, as in a callback: that has to end first. Nor for its callbacks, which may
        want a lock that this thread holds.
        """
        if len(self._jobs) >= MAX_QUEUED and not self._is_inside():
            with suppress(IndexError):
                self._jobs[0][0]._wait_for_host()

    def is_forked(self) -> bool:
        """Whether this process was forked from the one whose calls these are."""
        return os.getpid() != self._process

    def is_alive(self) -> bool:
        """Whether the communication thread can still run what is queued."""
        return self._thread is not None and self._thread not in self._over

    def _job(
        self, call: Callable[[], Any], streams: Sequence[torch.cuda.Stream] = ()
    ) -> tuple[Work[Any], Callable[[], None]]:
        """Return a call's Work, and what runs it."""
        work: Work[Any] = Work()
        work._worker = self
        inference = torch.is_inference_mode_enabled()

        def run() -> None:
            # Inference mode is a thread's own, and nobody outside it may write to its tensors.
            with inference_mode(inference):
                work.run(call, streams)

        return work, run

    def _wake_thread(self) -> None:
        try:
            self._wake.release()
        except RuntimeError:
            # It has been woken already.
            return

    def _start_thread(self) -> None:
        """Start the communication thread where there is none.

        Where this is interrupted, or two threads do it at once, there may be a second, which does
        no harm: they take turns as all do that run calls.
        """
        if self._closed:
            raise TransportError("this group was shut down while it was called")
        if self._thread is None:
            thread = threading.Thread(
                target=self._live, args=(torch.get_num_threads(),), name=self._name, daemon=True
            )
            thread.start()
            self._thread = thread

    def _live(self, threads: int) -> None:
        """Be the communication thread; the jobs that it leaves end with an error."""
        try:
            self._loop(threads)
        finally:
            self._over.add(threading.current_thread())
            for work, _ in self._jobs.copy():
                work.fail(TransportError("the communication thread ended before the collective"))

    def _loop(self, threads: int) -> None:
        """Run the jobs, until the worker is closed and none is left."""
        # BLAS in a new thread would start as many of its own as there are processors, whatever the
        # caller set: ranks that share a host then wait for each other's.
        torch.set_num_threads(threads)
        polls = 0
        while self._jobs or not self._closed:
            try:
                polls = self._serve(polls)
            except BaseException as error:  # noqa: BLE001 - the calls behind this one must go on
                self.fail(error)
                report_error()
                # Where this comes again and again.
                time.sleep(_POLL_SECONDS)
                if self._jobs and not self._claim:
                    self._jobs[0][0].fail(error)
        # There may be a second thread.
        self._wake_thread()

    def _serve(self, polls: int) -> int:
        """Run a job, or sleep until there may be one. polls: how often it did so in vain, so far.

        For a while after each job the thread looks for the next by itself, now and then, so that
        calls which follow each other closely, and are waited for at once, need not wake it.
        """
        self._standing_by = polls < _MAX_POLLS
        # Who has not seen the line above has queued a job before this one.
        if self.run_first():
            return 0
        seconds = _POLL_SECONDS
        if not self._standing_by:
            # Where another thread runs the first job it may be interrupted before it wakes this.
            seconds = CHECK_SECONDS if self._jobs else _FOR_EVER
        return 0 if self._wake.acquire(timeout=seconds) else polls + 1

    def close(self, timeout: float, steps: Callable[[], int] = lambda: 0) -> list[Work[Any]]:
        """Take no more calls, let those queued finish while they progress, and end the thread.

        Inside a call, as in a callback, nothing is waited for.

        Args:
            timeout: Seconds that a step may take.
            steps: Counts the steps that have ended.

        Returns:
            The calls that were queued and were not carried out: they failed, or nothing came of
            them for longer than `timeout`.
        """
        # What has ended may be there still, its error raised by its wait().
        queued = [work for work, _ in self._jobs.copy() if not work.has_ended()]
        self._closed = True
        self._wake_thread()
        thread = self._thread
        if self.is_forked():
            return []
        if thread is not None and thread is not threading.current_thread():
            seen, since = (-1, -1), time.monotonic()
            while self.is_alive() and not self._is_inside():
                if (now := (len(self._jobs), steps())) != seen:
                    seen, since = now, time.monotonic()
                elif time.monotonic() - since > timeout + _CLOSE_SECONDS:
                    break
                thread.join(CHECK_SECONDS)
        return [work for work in queued if not work.was_carried_out()]
