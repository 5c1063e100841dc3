"""The worker that runs a group's collectives, one after the other, with a communication thread.

An exception may be raised at any line: by a signal handler, for lack of memory, or by another
thread. A lock that is taken before a `try` could then stay locked. So the right to run calls is no
lock but an entry of a dict that holds its owner from the moment it exists (`Worker._claim`), and
each `except` and `finally` restores the state first of all. CPython runs signal handlers at the
start of a function, after a call of a C function and when a loop jumps back, but never between two
stores.
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

# After a job the communication thread polls for the next one, so often and at these intervals (for
# 50 ms in all), before it sleeps until it is woken.
_POLL_SECONDS, _MAX_POLLS = 5e-3, 10
_FOR_EVER = -1.0
# How many calls may be queued, so that memory is bounded: whoever makes one more waits.
MAX_QUEUED = 8192
# `close` waits for progress this much longer than a step's timeout, so that a step that is late can
# raise its own error first.
_CLOSE_SECONDS = 2.0


class Worker:
    """Runs a group's collectives one after the other, in the order in which they were submitted.

    A synchronous call runs in the caller's thread if nothing is queued, which saves two thread
    switches; otherwise it is queued.

    Args:
        name: The communication thread's name.
        check_streams: Raises the error of a collective that failed on its stream, if any.

    Attributes:
        failure: The first error that may have left a call half done. The worker still runs calls
            after it: the functions that it runs have to check this attribute.
        unraised: The text of an asynchronous call's mismatch that no wait has raised yet.
    """

    def __init__(self, name: str, check_streams: Callable[[], None] = lambda: None) -> None:
        self._name = name
        self.check_streams = check_streams
        self.failure: BaseException | None = None
        self.unraised = ""
        # The collectives that have not ended, each with the function that runs it. The first one
        # may be running.
        self._jobs: deque[tuple[Work[Any], Callable[[], None]]] = deque()
        # Released to wake the thread. An exception inside Event.set could leave an Event locked.
        self._wake = threading.Lock()
        self._wake.acquire()
        self._thread: threading.Thread | None = None
        # The communication threads that have ended. Not by Thread.is_alive: after an interrupt
        # inside it, it may report a running thread as ended.
        self._over: set[threading.Thread] = set()
        # Whether the thread is polling and need not be woken, which costs as much as a small sum.
        self._standing_by = False
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        # The right to run a call or to take one from the queue: under 0 a tuple with the thread
        # that has it. The tuple is a new one for each attempt, so that `is` tells whose it is.
        # dict.setdefault is atomic, and an attempt that is interrupted right after it can still
        # find out whether it succeeded.
        self._claim: dict[int, tuple[int]] = {}
        self._closed = False
        self._process = os.getpid()

    def call(self, function: Callable[[], Any], tensors: Sequence[torch.Tensor] = ()) -> Any:
        """Run `function` when it is its turn and return its result. Arguments as for `submit`.

        TransportError where this thread is inside a call of the group; or see `submit`.
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
        """Run `function` in this thread unless a call is running; return whether it ran."""
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

        If a call is queued or running, do nothing and return None.
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
                # In front of jobs that were submitted since `first` began.
                self._jobs.appendleft((work, run))
            finally:
                if 0 in self._claim and self._claim[0] is me:
                    del self._claim[0]
            if not self._standing_by:
                self._wake_thread()
        except BaseException as error:
            # The other ranks may have seen the signal of a call that will not come.
            if begun and self.failure is None:
                self.failure = error
            raise
        return work

    def run_first(self, only: Work[Any] | None = None) -> bool:
        """Run the first job in the queue; only if it is that of `only`, if given.

        False if there is no such job, or another thread is running a call.
        """
        me, grad = (threading.get_ident(),), torch.is_grad_enabled()
        try:
            if not self._jobs or self._claim.setdefault(0, me) is not me or not self._jobs:
                return False
            work, run = self._jobs[0]
            if only not in (None, work):
                return False
            # It stays in the queue until it has ended, so that no interrupt can lose it.
            if not work._ended:
                run()
            self._jobs.popleft()
            return True
        finally:
            if 0 in self._claim and self._claim[0] is me:
                del self._claim[0]
                self._leave(grad)

    def _leave(self, grad: bool) -> None:
        """Clean up after a call in this thread. grad: whether autograd was on before it."""
        # An interrupt while no_grad() is entered or left could leave autograd off.
        if torch.is_grad_enabled() is not grad:
            torch.set_grad_enabled(grad)
        if self._jobs:
            self._wake_thread()

    def fail(self, error: BaseException) -> None:
        """Record an error that may have left a call half done."""
        if self.failure is None:
            self.failure = error

    def check_waiting(self, work: Work[Any]) -> None:
        """Raise TransportError if `work` cannot end while this thread waits for it."""
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

    def running_thread(self) -> int | None:
        """Return the thread that runs a call, if one does. Any thread may ask."""
        holder = self._claim.get(0)
        return None if holder is None else holder[0]

    def queued(self) -> list[tuple[str, str | None, int]]:
        """Return kind, name and time of the asynchronous calls that have not ended."""
        return [work.call for work, _ in self._jobs.copy() if work.call and not work.has_ended()]

    def _refuse_nested(self) -> None:
        """Raise TransportError if this thread is inside a call, for which it would then wait."""
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
        """Queue `function`. On CUDA it runs on the group's streams, after the caller's work so far.

        TransportError after `close`. RuntimeError where the system has no thread left; nothing was
        queued.

        Args:
            function: The call.
            tensors: The tensors on which it works.
            now: Whether to return only when it has ended on the host; on CUDA its work is on the
                streams by then. It runs in this thread if it is the next one.
        """
        self._wait_for_room()
        # The streams, one for each device, with an event after the caller's work so far.
        before: dict[torch.cuda.Stream, torch.cuda.Event] = {}
        for tensor in on_cuda(tensors):
            device = tensor.device
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            stream = self._streams[device]
            if stream not in before:
                before[stream] = torch.cuda.current_stream(device).record_event()
            # The caller may drop the tensor early: its memory must not be used again before the
            # stream has finished with it.
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
            # A callback must not wait: this job runs only after the call that the callback is in.
            if now and not self._is_inside():
                job[0]._wait_for_host()
        except BaseException as error:
            # The job is queued, but the caller does not get its Work.
            if self.failure is None:
                self.failure = error
            raise
        return job[0]

    def _wait_for_room(self) -> None:
        """If MAX_QUEUED calls are queued, wait until the oldest one has ended.

        Not inside a call, as in a callback: that call would have to end first. Callbacks are not
        waited for: they may need a lock that this thread holds.
        """
        # IndexError where another thread has emptied the queue since.
        if len(self._jobs) >= MAX_QUEUED and not self._is_inside():
            with suppress(IndexError):
                self._jobs[0][0]._wait_for_host()

    def is_forked(self) -> bool:
        """Whether this process was forked from the rank's process."""
        return os.getpid() != self._process

    def is_alive(self) -> bool:
        """Whether the communication thread can still run what is queued."""
        return self._thread is not None and self._thread not in self._over

    def _job(
        self, call: Callable[[], Any], streams: Sequence[torch.cuda.Stream] = ()
    ) -> tuple[Work[Any], Callable[[], None]]:
        """Return a call's Work, and the function that runs it."""
        work: Work[Any] = Work()
        work._worker = self
        inference = torch.is_inference_mode_enabled()

        def run() -> None:
            # As in the caller's thread: only inference mode may write to tensors that it made.
            with inference_mode(inference):
                work.run(call, streams)

        return work, run

    def _wake_thread(self) -> None:
        try:
            self._wake.release()
        except RuntimeError:
            # Released already: the thread is awake, or will be.
            return

    def _start_thread(self) -> None:
        """Start the communication thread if there is none.

        If this is interrupted, or two threads do it at once, there may be two. That does no harm:
        they take turns by `_claim`, as all threads that run calls do.
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
        """Run as the communication thread; jobs that it leaves behind end with an error."""
        try:
            self._loop(threads)
        finally:
            self._over.add(threading.current_thread())
            for work, _ in self._jobs.copy():
                work.fail(TransportError("the communication thread ended before the collective"))

    def _loop(self, threads: int) -> None:
        """Run jobs until the worker is closed and none is left."""
        # In a new thread BLAS would use as many threads as there are processors, whatever the
        # caller set, and ranks that share a host would wait for each other's.
        torch.set_num_threads(threads)
        polls = 0
        while self._jobs or not self._closed:
            try:
                polls = self._serve(polls)
            except BaseException as error:  # noqa: BLE001 - the calls behind this one must go on
                self.fail(error)
                report_error()
                # So that an error which repeats does not keep a processor busy.
                time.sleep(_POLL_SECONDS)
                if self._jobs and not self._claim:
                    self._jobs[0][0].fail(error)
        # There may be a second thread, which has to end, too.
        self._wake_thread()

    def _serve(self, polls: int) -> int:
        """Run a job, or sleep until there may be one; return the new `polls`.

        polls: how often in a row it has found no job. For a while after each job the thread polls,
        so that closely following calls, whose callers wait at once, need not wake it.
        """
        self._standing_by = polls < _MAX_POLLS
        # In this order: a caller that still saw `_standing_by` has queued its job before, and it is
        # found here; a later one wakes the thread.
        if self.run_first():
            return 0
        seconds = _POLL_SECONDS
        if not self._standing_by:
            # With jobs in the queue another thread is running the first. If that is interrupted it
            # may not wake this one.
            seconds = CHECK_SECONDS if self._jobs else _FOR_EVER
        return 0 if self._wake.acquire(timeout=seconds) else polls + 1

    def close(self, timeout: float, steps: Callable[[], int] = lambda: 0) -> list[Work[Any]]:
        """Refuse new calls, let queued ones finish as long as they progress, and end the thread.

        Inside a call, as in a callback, it waits for nothing. Return the queued calls that were not
        carried out: they failed, or did not progress for longer than `timeout`, of a step.

        steps: Returns how many steps have ended so far.
        """
        # What has ended may be there still, its error raised by its wait().
        queued = [work for work, _ in self._jobs.copy() if not work.has_ended()]
        self._closed = True
        self._wake_thread()
        thread = self._thread
        if self.is_forked():
            return []
        if thread is not None and thread is not threading.current_thread():
            # There is progress while these numbers change: a call or one of its steps has ended.
            seen, since = (-1, -1), time.monotonic()
            while self.is_alive() and not self._is_inside():
                if (now := (len(self._jobs), steps())) != seen:
                    seen, since = now, time.monotonic()
                elif time.monotonic() - since > timeout + _CLOSE_SECONDS:
                    break
                thread.join(CHECK_SECONDS)
        return [work for work in queued if not work.was_carried_out()]
