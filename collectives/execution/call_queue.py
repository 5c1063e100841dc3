"""A group's calls, one after the other in the order in which they were made."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import perf_counter_ns
from typing import Any

import torch

from collectives import validation
from collectives.errors import CollectiveError, CollectiveMismatchError, TransportError, describe
from collectives.execution.call import Call
from collectives.flight.dump import failed
from collectives.flight.recorder import ENDED, UNRECORDED, GroupRecord
from collectives.stall import Wait, waits
from collectives.transport.base import Transport
from collectives.work import Work
from collectives.worker import Worker


class CallQueue:
    """The order of one rank's calls, and what becomes of the group where one fails.

    After a mismatch the ranks are still in step; after any other error raised while a call runs
    they are not, and every later call is a TransportError naming that error. An exception from
    outside, as of a signal's handler, leaves the group as it was where no call has begun.

    Threads take turns in the order in which they come, which may be another on each rank. Where
    they do, calls with names are a mismatch on all ranks, but equal calls without names would get
    each other's answers: so only one thread makes those, the first that did as long as it lives.
    """

    def __init__(self, transport: Transport, timeout: float, record: GroupRecord) -> None:
        self._transport = transport
        self._record = record
        record.queue = weakref.ref(self)
        self._timeout = timeout
        # Not a method of this object: what the group holds would wait for a garbage collection.
        check_streams = partial(_check_streams, transport, record)
        self._worker = Worker(f"collectives-{transport.rank}", check_streams)
        # What `abort` was called with, and whether the transport has been aborted.
        self._asked: TransportError | None = None
        self._ended = False
        self._unnamed_from: Callable[[], threading.Thread | None] = lambda: None
        self.closed = False

    def run(self, call: Call, function: Callable[[], Any], *, async_op: bool = False) -> Any:
        """Run `function`, which carries out the call, when its turn comes; `async_op`: its Work."""
        self._check_usable(call.kind)
        guarded = self._guarded(call, function)
        if not async_op:
            return self._worker.call(guarded, call.memory)
        # A thread of its own would run it before or after what the caller's starts next.
        now = self._transport.shares_gpu and any(tensor.is_cuda for tensor in call.memory)
        work = self._worker.submit(guarded, call.memory, now=now)
        work.call = call.kind, call.name, call.queued
        return work

    def begin(self, call: Call, first: Callable[[], None], rest: Callable[[], Any]) -> Work:
        """Run `first`, which never waits, in this thread if it is its turn; queue `rest`.

        The communication thread runs that, or the Work's wait() if it comes first. Where it is not
        its turn `rest` begins with what `first` does.
        """
        self._check_usable(call.kind)
        begun = self._guarded(call, first, whole=False)
        finish = self._guarded(call, rest)
        return self._worker.begin(begun, finish) or self._worker.submit(finish)

    def is_inside(self) -> bool:
        """Return whether this thread is inside a call, as in a callback."""
        return self._worker.running_thread() == threading.get_ident()

    def check_thread(self, call: Call) -> None:
        """Raise ValueError for a call without a name from a second thread."""
        if call.name:
            return
        thread, first = threading.current_thread(), self._unnamed_from()
        # In backward the first thread waits for autograd's, which come in one order. torch says
        # whether a thread is in backward nowhere else.
        if first is thread or torch._C._current_graph_task_id() != -1:
            return
        if first is not None and first.is_alive():
            raise ValueError(
                f"{call.kind} without a name from thread {thread.name!r}, while {first.name!r} "
                "makes such calls on this group: threads may come in another order on each rank, "
                "and equal calls would be mixed up; pass name=, or give each thread a group (split)"
            )
        self._unnamed_from = weakref.ref(thread)

    def _check_usable(self, kind: str) -> None:
        validation.no_mode(kind)
        if self.closed:
            raise TransportError(
                f"{kind}: this group was shut down; make it again as before, by init() or split()"
            )
        if self._worker.is_forked():
            # Its communication thread is not here, and some transports' sockets are shared.
            raise TransportError(
                f"{kind}: this process was forked from a rank; only the rank itself can use its "
                "groups: start processes that are to be ranks by torchrun or by spawn"
            )

    def _guarded(
        self, call: Call, function: Callable[[], Any], *, whole: bool = True
    ) -> Callable[[], Any]:
        """Wrap `function`: its failure is recorded; one that leaves the group unusable is kept.

        whole: Whether the call has ended with it, so that the ranks are known to be together.
        """
        kind = call.kind

        def guarded() -> Any:
            failure = self._failure()
            if failure is not None:
                # A failure outside of a call has not ended the transport yet.
                self._end_transport(failure)
                raise TransportError(
                    f"{kind}: this group is unusable since an earlier failure: {describe(failure)}"
                ) from failure
            try:
                # What an earlier call left on a stream may have ended meanwhile.
                self._transport.check_streams()
                result = function()
                if whole:
                    self._worker.unraised = ""
                    call.record[ENDED] = perf_counter_ns()
                return result
            except CollectiveMismatchError as error:
                self._dump(call, error)
                raise
            except BaseException as error:
                # Before anything else: a second signal may come in what follows.
                if self._worker.failure is None:
                    self._worker.failure = error
                call.record[ENDED] = perf_counter_ns()
                if self._transport.size > 1:
                    self._end_transport(error)
                    self._dump(call, error)
                if isinstance(error, CollectiveError) and (mismatch := self._worker.unraised):
                    # Of an earlier call: a rank that got its error has ended since, and that error
                    # alone says why this call's peers never came.
                    raise CollectiveMismatchError(mismatch) from error
                raise

        return guarded

    def _dump(self, call: Call, error: BaseException) -> None:
        """Write this rank's flight record: here, as the error may end the process at once."""
        call.record[ENDED] = call.record[ENDED] or perf_counter_ns()
        failed(self._record, call.record, error, lambda: call.code)

    def wait(self) -> Wait | None:
        """Return the wait of the thread that carries out a call, if it has waited for long."""
        return waits.get(self._worker.running_thread() or 0)

    def queued(self) -> list[tuple[str, str | None, int]]:
        """Return kind, name and time of the asynchronous calls that have not ended."""
        return self._worker.queued()

    def abort(self, reason: str) -> None:
        """Make the group unusable from any thread; what runs is interrupted, what waits raises."""
        if self.closed or self._ended or self._asked is not None:
            return
        error = TransportError(reason)
        if self._failure() is None:
            self._asked = error
        # Whoever runs a call ends the transport, as no two threads may use it; where that call ends
        # before it is interrupted, whoever comes next does.
        if not self._worker.try_call(lambda: self._end_transport(error)):
            self._transport.interrupt(reason)
            with suppress(TransportError):
                self._worker.submit(lambda: self._end_transport(error))

    def _failure(self) -> BaseException | None:
        """Return what made the group unusable: alone a rank is in step with itself."""
        return self._asked or (self._worker.failure if self._transport.size > 1 else None)

    def _end_transport(self, error: BaseException) -> None:
        """Abort the transport, once: its peers are in this call, the next would meet its messages.

        Called by whoever runs a call or takes the place of one.
        """
        if not self._ended:
            self._transport.abort(describe(self._failure() or error))
            self._ended = True

    def close(self) -> None:
        """Take no more calls; let the queued ones finish, and end the communication thread.

        TransportError where calls were lost: they failed, or nothing came of them for longer than a
        step may take, or this is called inside a call, behind which they wait. Not after `abort`.
        """
        self.closed = True
        lost = self._worker.close(self._timeout, lambda: self._transport.steps)
        if not lost or self._asked is not None:
            return
        error = next((each for work in lost if (each := work.error()) is not None), None)
        why = f"the first with {describe(error)}" if error else "they did not end"
        raise TransportError(
            f"{len(lost)} asynchronous {'call was' if len(lost) == 1 else 'calls were'} under way "
            f"when this group was closed and lost, {why}: wait() for what must be done"
        ) from error


def _check_streams(transport: Transport, record: GroupRecord) -> None:
    """Raise the error of a call that failed on its stream, if any; write the flight record."""
    try:
        transport.check_streams()
    except CollectiveError as error:
        if not record.error:
            failed(record, UNRECORDED, error, lambda: 0)
        raise
