"""The queue of a group's calls, which run one after the other, and their handles.

If nothing is queued, synchronous calls run in their caller's thread. Others are queued for the
communication thread, or for a thread that waits for them.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from time import perf_counter_ns
from typing import Any, Generic, TypeVar

import torch

from collectives import validation
from collectives.call import Call
from collectives.errors import CollectiveError, CollectiveMismatchError, TransportError, describe
from collectives.modes import inference_mode, no_grad, untraced_methods
from collectives.recorder import ENDED, NOTHING, GroupRecord, recording, span
from collectives.transport.base import Transport

# The most queued calls, to bound memory: one more waits for the oldest.
MAX_QUEUED = 8192
# The time for which the communication thread leaves small calls to their caller, who may wait for
# them soon; and its number of looks for such calls without being woken: a wake-up costs as much as
# a small sum.
_LEFT_SECONDS, _MAX_LOOKS = 5e-3, 10
# The interval between a waiting thread's checks that its call can still end, or progresses.
CHECK_SECONDS = 1.0
# `close` waits this much longer than the timeout, so that a late step raises its own error.
_CLOSE_SECONDS = 2.0
# The return type of the synchronous call.
T_co = TypeVar("T_co", covariant=True)


@untraced_methods
class Work(Generic[T_co]):
    """A collective under way.

    `wait()` returns the synchronous call's result, or raises its error. On CUDA it makes the
    current stream wait for the collective and does not block the host. Later errors, such as a rank
    that never comes, are raised by later waits and by the group's next call.

    The group's communication thread, or a thread that waits for it, carries out the collective; an
    interrupt of that thread interrupts the call, which ends the group. The communication thread may
    keep a reference to the tensors until it runs the next call.

    Until `wait()` returns the tensors must keep their values, shapes and memory, as in torch's own
    collectives: resizing a storage before that may end the process.

    Examples:
        >>> def overlapped(group):
        ...     work = group.all_reduce(torch.ones(2), async_op=True)
        ...     return work.wait()
        >>> collectives.run_threads(2, overlapped)
        [tensor([2., 2.]), tensor([2., 2.])]
    """

    def __init__(
        self,
        queue: CallQueue,
        title: str,
        function: Callable[[], Any],
        streams: Sequence[torch.cuda.Stream] = (),
        due: float = 0.0,
    ) -> None:
        self.title = title
        self._queue = queue
        self._function: Callable[[], Any] | None = function
        self._streams = streams
        # The communication thread may run it from this time on, by time.monotonic().
        self.due = due
        self._inference = torch.is_inference_mode_enabled()
        self._ended = False
        self._result: Any = None
        self._error: BaseException | None = None
        # Recorded after the collective, one per device.
        self._events: list[torch.cuda.Event] = []
        self._callbacks: list[Callable[[], None]] = []

    def wait(self) -> T_co:
        """Block until the collective has ended; each of its steps is bounded by the timeout.

        Raises:
            TransportError: No thread can end it any more, as in a process that was forked from the
                rank; or this thread is inside one of the same group's calls.
        """
        result: T_co = self._queue.result(self)
        return result

    def is_completed(self) -> bool:
        """Whether `wait()` would return or raise without waiting.

        Raises:
            TransportError: It has not ended, and this process was forked from the rank.
        """
        self._queue.check_process("this call", self)
        if not self._ended or all(event.query() for event in self._events):
            return self._ended
        try:
            self._queue.check_streams()
        except CollectiveError:
            return True
        return False

    def error(self) -> BaseException | None:
        """Return the collective's error, if it has ended with one."""
        return self._error

    def has_ended(self) -> bool:
        """Whether the collective has ended on the host, with or without an error."""
        return self._ended

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback()` once when the collective has ended, with or without an error.

        It is called in the thread that runs the collective, or immediately in this one if the
        collective has already ended; the collective's CUDA stream is current. It must not wait for
        a collective of the same group. Its errors in the other thread go to threading.excepthook.

        Raises:
            TransportError: The collective has not ended, and this process was forked from the rank.
        """
        self._queue.check_process("this call", self)
        with self._queue.changed:
            if not self._ended:
                self._callbacks.append(callback)
                return
        with _current(self._streams):
            callback()

    def _run(self) -> None:
        """Carry out the call and keep its result, or its error, for `wait()`."""
        assert self._function is not None
        with no_grad(), inference_mode(self._inference), _current(self._streams):
            try:
                self._result = self._function()
                self._events = [stream.record_event() for stream in self._streams]
            except BaseException as error:  # noqa: BLE001 - wait() raises it
                self._fail(error)
            else:
                self._end()

    def _fail(self, error: BaseException) -> None:
        """End the collective with an error for `wait()`, unless it has ended."""
        if not self._ended:
            self._error = error
            self._queue.note(error)
            self._end()

    def _end(self) -> None:
        self._function = None
        with self._queue.changed:
            self._ended = True
            callbacks, self._callbacks = self._callbacks, []
            self._queue.changed.notify_all()
        for callback in callbacks:
            try:
                callback()
            except BaseException:  # noqa: BLE001 - the calls behind this one must run
                # Report it like an error that ends a thread. The user's own hook may raise.
                with suppress(BaseException):
                    said = (*sys.exc_info(), threading.current_thread())
                    threading.excepthook(threading.ExceptHookArgs(said))


class CallQueue:
    """Runs one rank's calls one after the other, in the order of their starts.

    Synchronous calls run in their caller's thread if nothing is queued. The communication thread,
    or a thread that waits for them, carries out the others.

    After a mismatch the ranks are still in step; after any other error in calls they are not, and
    every later call raises a TransportError that names that error.

    Calls of several threads are ordered by their arrival, which may differ between ranks. Then
    calls with names are a mismatch on all ranks, but equal calls without names would get each
    other's results: so only one thread may make calls without names, the first that did, as long as
    it lives.

    Attributes:
        changed: Held to change the queue; notified when calls end.
        closed: Whether `close` was called.
    """

    def __init__(self, transport: Transport, timeout: float, record: GroupRecord) -> None:
        self._transport, self._timeout, self._record = transport, timeout, record
        # A signal's handler may make calls while its thread holds the lock.
        self._lock = lock = threading.RLock()
        self.changed, self._added = threading.Condition(lock), threading.Condition(lock)
        self._works: deque[Work[Any]] = deque()
        # The thread that runs the current call; that call's Work if it is asynchronous; the number
        # of times that the communication thread has found nothing.
        self._inside: int | None = None
        self._running: Work[Any] | None = None
        self._in_call = False
        self._looks = _MAX_LOOKS
        self._thread: threading.Thread | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._process = os.getpid()
        # The first error that may have left calls half done; whether the transport has ended.
        self._failure: BaseException | None = None
        self._ended = self._aborted = self.closed = False
        # The text of an asynchronous call's mismatch that no wait has raised yet.
        self._unraised = ""
        self._unnamed_from: Callable[[], threading.Thread | None] = lambda: None

    def run(self, call: Call, function: Callable[[], Any]) -> Any:
        """Run `function`, which carries out the call, when its turn comes; return its result."""
        self._check_usable(call)
        if self._enter():
            try:
                with torch.no_grad():
                    return self._guarded(call, function)
            finally:
                self._leave()
        self._refuse_nested()
        work = self.submit(call, function)
        try:
            return self.result(work)
        except BaseException as error:
            if not work._ended:
                self.note(error)
            raise

    def submit(self, call: Call, function: Callable[[], Any], *, small: bool = False) -> Work[Any]:
        """Queue `function`; on CUDA it runs on the group's streams, after the caller's work so far.

        small: whether to leave the call to its caller for a while, who may wait for it soon.
        """
        self._check_usable(call)
        if len(self._works) >= MAX_QUEUED and not self.is_inside():
            with suppress(IndexError):
                self._wait_for(self._works[0])
        before: dict[torch.cuda.Stream, torch.cuda.Event] = {}
        for tensor in on_cuda(call.memory):
            device = tensor.device
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            stream = self._streams[device]
            if stream not in before:
                before[stream] = torch.cuda.current_stream(device).record_event()
            # The caller may drop the tensor early: its memory must not be reused before the stream
            # has finished with it.
            tensor.record_stream(stream)

        def run() -> Any:
            for stream, event in before.items():
                stream.wait_event(event)
            return self._guarded(call, function)

        due = time.monotonic() + _LEFT_SECONDS if small else 0.0
        work: Work[Any] = Work(self, call.title, run, [*before], due)
        # NCCL needs one order on the GPU: another order than the caller's could wait forever.
        at_once = bool(before) and self._transport.shares_gpu and not self.is_inside()
        with self._lock:
            self._start_thread()
            self._works.append(work)
            if not small:
                # Do not leave earlier calls to their callers: this one waits behind them.
                for each in self._works:
                    each.due = 0.0
            # Do not wake the communication thread needlessly: it would compete with this thread.
            if not at_once or self._works[0] is not work:
                self._tell(work)
        if at_once and not self._run_first(work):
            self._wait_for(work)
        return work

    def begin(self, call: Call, first: Callable[[], None], rest: Callable[[], Any]) -> Work[Any]:
        """Run `first`, which never waits, in this thread if nothing is before it; queue `rest`.

        Otherwise only `rest` is queued, which then begins with the work of `first`.
        """
        self._check_usable(call)
        if not self._enter():
            return self.submit(call, rest, small=True)
        try:
            with self._lock:
                self._start_thread()  # before anything is sent, since it may fail
            self._guarded(call, first, whole=False)
            due = time.monotonic() + _LEFT_SECONDS
            work: Work[Any] = Work(self, call.title, partial(self._guarded, call, rest), (), due)
            with self._lock:
                # In front of calls that were queued since `first` began.
                self._works.appendleft(work)
                self._tell(work)
            return work
        finally:
            self._leave()

    def result(self, work: Work[Any]) -> Any:
        """Wait for the work, and return its result or raise its error."""
        with span(lambda: f"wait {work.title}") if recording() else NOTHING:
            if not work._ended:
                self._wait_for(work)
        if work._error is not None:
            if self._unraised == str(work._error):
                self._unraised = ""
            raise work._error
        if work._events:
            for stream, event in zip(work._streams, work._events, strict=True):
                torch.cuda.current_stream(stream.device).wait_event(event)
            # The result may be allocated on the communication stream: the allocator must not reuse
            # its memory before this stream has finished with it.
            for tensor in on_cuda(work._result):
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
            self.check_streams()
        return work._result

    def _wait_for(self, work: Work[Any]) -> None:
        """Wait until the work has ended; this thread carries out queued calls if it can."""
        self.check_process("this call")
        self._refuse_nested()
        while not work._ended:
            # Not under a mode of the caller, which would intercept the call's operations.
            if not validation.active_mode() and self._run_first():
                continue
            with self._lock:
                if not work._ended:
                    self.changed.wait(CHECK_SECONDS)
            if self._thread is not None and not self._thread.is_alive():
                work._fail(TransportError("the communication thread ended before the call"))

    def _run_first(self, only: Work[Any] | None = None) -> bool:
        """Run the first queued call in this thread if possible; return whether it ran.

        Calls with callbacks, or on a GPU, are left to the communication thread, except for `only`.
        """
        with self._lock:
            first = self._works[0] if self._works else None
            if self._inside is not None or first is None or only not in (None, first):
                return False
            if only is None and (first._callbacks or first._streams):
                return False
            work = self._take()
        try:
            work._run()
        finally:
            self._leave()
        error = work._error
        if error is not None and not isinstance(error, Exception):
            # An interrupt of this thread, in any call.
            raise error
        return True

    def _enter(self) -> bool:
        """Acquire the right to run calls, unless one is running or queued."""
        with self._lock:
            if self._inside is not None or self._works:
                return False
            self._inside = threading.get_ident()
            return True

    def _take(self) -> Work[Any]:
        """Remove the first queued call, and acquire the right to run it."""
        self._inside = threading.get_ident()
        self._running = work = self._works.popleft()
        return work

    def _leave(self) -> None:
        """Release the right to run calls."""
        try:
            if self._aborted:
                self._end_transport()
        finally:
            with self._lock:
                self._inside = self._running = None
                if self._works:
                    self._tell(self._works[0])
                if self._works or self.closed:
                    self.changed.notify_all()

    def _tell(self, work: Work[Any]) -> None:
        """Wake the communication thread, unless it leaves the work to its caller for a while."""
        if not work.due or work._callbacks or self._looks >= _MAX_LOOKS:
            self._looks = 0
            self._added.notify()

    def _start_thread(self) -> None:
        if self.closed:
            raise TransportError("this group was shut down while it was called")
        if self._thread is None:
            thread = threading.Thread(
                target=self._serve,
                args=(torch.get_num_threads(),),
                name=f"collectives-{self._transport.rank}",
                daemon=True,
            )
            thread.start()
            self._thread = thread

    def _serve(self, threads: int) -> None:
        """Run as the communication thread, until the queue is closed and empty."""
        # In a new thread BLAS would ignore the caller's setting and use as many threads as there
        # are processors, and ranks that share a host would wait for each other's threads.
        torch.set_num_threads(threads)
        while True:
            with self._lock:
                while (pause := self._pause()) != 0.0:
                    if self.closed and not self._works:
                        return
                    found = self._added.wait(pause)
                    self._looks = 0 if found or self._works else self._looks + 1
                work = self._take()
            work._run()
            # Do not keep its tensors while this thread waits.
            del work
            self._leave()

    def _pause(self) -> float | None:
        """Return the seconds for the communication thread to wait; None until it is woken."""
        if self._works and self._inside is None:
            first = self._works[0]
            left = first.due - time.monotonic()
            return 0.0 if left <= 0.0 or first._callbacks or self.closed else left
        return _LEFT_SECONDS if self._looks < _MAX_LOOKS else None

    def _guarded(self, call: Call, function: Callable[[], Any], *, whole: bool = True) -> Any:
        """Run `function`; record its failure, and keep errors that make the group unusable.

        whole: whether the call ends with it, so that all ranks have reached this call.
        """
        if self._failure is not None and self._transport.size > 1:
            # A failure outside of calls has not ended the transport yet.
            self._end_transport()
            raise TransportError(
                f"{call.kind}: this group is unusable since an earlier failure: "
                f"{describe(self._failure)}"
            ) from self._failure
        self._in_call = True
        try:
            # An earlier call's work on a stream may have failed by now.
            self._transport.check_streams()
            result = function()
            if self.closed and self._failure is not None and self._transport.size > 1:
                # A signal's handler has closed the group: messages may be missing.
                raise TransportError(f"{call.kind}: {describe(self._failure)}")
        except CollectiveMismatchError as error:
            self._record.failed(call, error)
            raise
        except BaseException as error:
            self.note(error)
            if self._transport.size > 1:
                self._end_transport()
                self._record.failed(call, error)
            if isinstance(error, CollectiveError) and self._unraised:
                # An earlier call's mismatch: some rank that raised it has ended since, and only
                # that error explains why this call's peers never came.
                raise CollectiveMismatchError(self._unraised) from error
            failure = self._failure
            if self.closed and isinstance(error, Exception) and failure not in (None, error):
                raise TransportError(f"{call.kind}: {describe(failure)}") from error
            raise
        finally:
            self._in_call = False
        if whole:
            self._unraised = ""
            call.record[ENDED] = perf_counter_ns()
        return result

    def note(self, error: BaseException) -> None:
        """Keep an error that may have left the call half done; a mismatch does not."""
        if isinstance(error, CollectiveMismatchError):
            self._unraised = str(error)
        elif self._failure is None:
            self._failure = error

    def check_streams(self) -> None:
        """Raise the error of a failure on a stream, if any; write the flight record."""
        try:
            self._transport.check_streams()
        except CollectiveError as error:
            if not self._record.error:
                self._record.failed(None, error)
            raise

    def _check_thread(self, call: Call) -> None:
        """Raise ValueError for calls without a name from a second thread."""
        thread, first = threading.current_thread(), self._unnamed_from()
        # During backward the first thread waits for autograd's threads, which have one order. Not
        # public, but the only way to ask whether this thread is in backward.
        if torch._C._current_graph_task_id() != -1:
            return
        if first is not None and first.is_alive():
            raise ValueError(
                f"{call.kind} without a name from thread {thread.name!r}, while {first.name!r} "
                "makes such calls on this group: threads may come in another order on each rank, "
                "and equal calls would be mixed up; pass name=, or give each thread a group (split)"
            )
        self._unnamed_from = weakref.ref(thread)

    def check_process(self, what: str, work: Work[Any] | None = None) -> None:
        """Raise TransportError in a fork of the rank's process, unless `work` has ended."""
        if os.getpid() != self._process and not (work and work._ended):
            raise TransportError(
                f"{what}: this process was forked from a rank; only the rank itself can use its "
                "groups and wait for their calls: start processes that are to be ranks by torchrun "
                "or by spawn"
            )

    def is_inside(self) -> bool:
        """Return whether this thread is inside one of the group's calls, as in a callback."""
        return self._inside == threading.get_ident()

    def _refuse_nested(self) -> None:
        if self.is_inside():
            raise TransportError(
                "this thread is inside a call of the same group, in a callback or a signal's "
                "handler, and would wait for itself: pass async_op=True and wait() elsewhere"
            )

    def _check_usable(self, call: Call) -> None:
        """Raise unless the group, this process and this thread can make the call."""
        # For other calls, the check of the tensors in this thread has also checked its mode.
        if call.queued or not call.tensors:
            validation.no_mode(call.kind)
        if self.closed:
            raise TransportError(
                f"{call.kind}: this group was shut down; make it again as before, by init() or "
                "split()"
            )
        if os.getpid() != self._process:
            self.check_process(call.kind)
        if not call.name and self._unnamed_from() is not threading.current_thread():
            self._check_thread(call)

    def abort(self, reason: str) -> None:
        """Make the group unusable from any thread; interrupt a running call, fail waiting ones."""
        if self.closed or self._ended or self._aborted:
            return
        if self._failure is None:
            self._failure = TransportError(reason)
            # Set before an interrupted call writes the file.
            self._record.aborted = perf_counter_ns(), reason
        self._aborted = True
        # No two threads may use the transport: a thread that runs a call ends it afterwards.
        with self._lock:
            idle = self._inside is None
            if idle:
                self._inside = threading.get_ident()
        if idle:
            self._leave()
        else:
            self._transport.interrupt(reason)
        self._record.write()

    def _end_transport(self) -> None:
        """Abort the transport, once: its peers are still in this call, and would mix up messages.

        Called by the thread that has the right to run calls.
        """
        if not self._ended and self._failure is not None:
            self._ended = True
            self._transport.abort(describe(self._failure))

    def close(self) -> None:
        """Refuse further calls; let calls under way finish, and end the communication thread.

        They may continue while they make progress. Inside the group's call, as in a signal's
        handler, nothing is waited for, and that call ends in an error.

        Raises:
            TransportError: Calls were lost: they failed, or made no progress within the timeout of
                a step. Not after `abort`.
        """
        self.closed = self._record.closed = True
        if os.getpid() != self._process:
            return
        with self._lock:
            # A running call that has ended may still be in its callbacks.
            running = None if self._running is None or self._running._ended else self._running
            queued = [work for work in (running, *self._works) if work is not None]
            self._added.notify()
        # In a callback, the call itself has ended.
        under_way = self._in_call if self.is_inside() else not self._drained()
        if under_way:
            error = TransportError("this group was closed while a call was under way")
            self._failure = self._failure or error
            self._transport.interrupt(describe(error))
        lost = [work for work in queued if not (work._ended and work._error is None)]
        if self._aborted or not (lost or under_way):
            return
        raised = next((each for work in lost if (each := work._error) is not None), None)
        why = f"the first with {describe(raised)}" if raised else "they did not end"
        count = len(lost) + (under_way and running not in lost)
        raise TransportError(
            f"{count} {'call was' if count == 1 else 'calls were'} under way when this group was "
            f"closed and lost, {why}: wait() for what must be done"
        ) from raised

    def _drained(self) -> bool:
        """Wait until nothing runs or is queued; return False if there is no more progress."""
        seen, since = (-1, -1), time.monotonic()
        with self._lock:
            while self._works or self._inside is not None:
                if (now := (len(self._works), self._transport.steps)) != seen:
                    seen, since = now, time.monotonic()
                elif time.monotonic() - since > self._timeout + _CLOSE_SECONDS:
                    return False
                self.changed.wait(CHECK_SECONDS)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CHECK_SECONDS)
        return True


def _current(streams: Sequence[torch.cuda.Stream]) -> AbstractContextManager[object]:
    """Return a context that makes these streams current, and the first one's device."""
    if not streams:
        return nullcontext()
    if len(streams) == 1:
        return torch.cuda.stream(streams[0])
    current = ExitStack()
    # Entering a stream also makes its device current: enter the first one last, so that it stays.
    for stream in reversed(streams):
        current.enter_context(torch.cuda.stream(stream))
    return current


def on_cuda(values: Any) -> list[torch.Tensor]:
    """Return the CUDA tensors among a call's tensors, or in its result."""
    # A result may be one tensor, several, or None, as for a barrier.
    several = values if isinstance(values, list | tuple) else (values,)
    return [each for each in several if isinstance(each, torch.Tensor) and each.is_cuda]
