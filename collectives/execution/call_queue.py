"""A group's calls, one after the other in the order in which they were made, each agreed on."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from collectives.consistency.agreement import Joined
from collectives.consistency.description import Description
from collectives.consistency.negotiation import Consent
from collectives.errors import CollectiveMismatchError, TransportError, words
from collectives.execution.all_reduce import Runner
from collectives.execution.operations import OPERATIONS, WITH_JOINED, exhibit, written_by
from collectives.reducers import Average, Reducer, Sum
from collectives.work import Worker


class Calls:
    """What carries out the calls of one rank.

    After a mismatch the ranks are still in step; after any other error raised while a call runs
    they are not, and every later call is a TransportError naming that error.

    Threads take turns in the order in which they come, which may be another on each rank. Where
    they do, calls with names are a mismatch on all ranks, but equal calls without names would get
    each other's answers: so only one thread makes those, the first that did as long as it lives.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._transport = runner.transport
        self._worker = Worker(f"collectives-{self._transport.rank}")
        self._consent = Consent(runner, self._worker.upcoming)
        self._count = 0
        self._failure: BaseException | None = None
        self._unnamed_from: Callable[[], threading.Thread | None] = lambda: None
        self._process = os.getpid()
        self.closed = False

    def __call__(
        self,
        call: Description,
        tensors: list[torch.Tensor],
        op: Reducer = Sum,
        *,
        run: Callable[[], Any] | None = None,
        async_op: bool = False,
    ) -> Any:
        """Agree on `call` with the other ranks, then return what its operation returns, or a Work.

        run: instead of an operation, for a call that no rank can have joined.
        """
        if not call.name:
            self._check_thread(call.kind)

        def work() -> Any:
            label = self._label(f"{call.kind} {call.name!r}" if call.name else call.kind)
            if run is not None:
                self._consent.agree(call, label)
                return run()
            return self._consent.carry_out(
                call,
                label,
                lambda: OPERATIONS[call.kind](self._runner, call, tensors, op, label),
                lambda: written_by(call, tensors),
                lambda: exhibit(self._runner, call, tensors, op),
            )

        return self._in_order(call.kind, work, tensors, async_op, call)

    def join(self, operators: Iterable[Reducer], device: torch.device | None) -> int:
        """Take part in the other ranks' calls, with zeros, until all ranks have joined.

        Returns the rank that was the last to join, the highest of those that joined at once.
        """
        known = {str(op): op for op in (Sum, Average, *operators)}
        self._check_thread("join")

        def work() -> int:
            if self._transport.size == 1:
                return self._transport.rank
            mine = Joined(self._count, known, WITH_JOINED)
            while True:
                agreed = self._consent.agree(mine, self._label("join"))
                if agreed.last is not None:
                    return agreed.last
                assert agreed.call is not None
                call = agreed.call
                zeros = [look.zeros(device) for look in call.tensors]
                op = known[call.options.get("op", str(Sum))]
                label = f"{call} (call {self._count - 1}, joined)"
                WITH_JOINED[call.kind](self._runner, call, zeros, op, label)

        answer: int = self._in_order("join", work, (), False)
        return answer

    def _check_thread(self, kind: str) -> None:
        """Raise ValueError for a call without a name from a second thread."""
        thread, first = threading.current_thread(), self._unnamed_from()
        # In backward the first thread waits for autograd's, which come in one order.
        if first is thread or torch._C._current_graph_task_id() != -1:
            return
        if first is not None and first.is_alive():
            raise ValueError(
                f"{kind} without a name from thread {thread.name!r}, while {first.name!r} makes "
                "such calls on this group: threads may come in another order on each rank, and "
                "equal calls would be mixed up; pass name=, or give each thread a group (split)"
            )
        self._unnamed_from = weakref.ref(thread)

    def _label(self, what: str) -> str:
        label = f"{what} (call {self._count})"
        self._count += 1
        return label

    def _in_order(
        self,
        kind: str,
        work: Callable[[], Any],
        tensors: Sequence[torch.Tensor],
        async_op: bool,
        call: Description | None = None,
    ) -> Any:
        """Do the work when its turn comes; remember a failure that leaves the group unusable."""
        if self.closed:
            raise TransportError(f"{kind}: this group was shut down; call init() again")
        if os.getpid() != self._process:
            # Its communication thread is not here, and some transports' sockets are shared.
            raise TransportError(
                f"{kind}: this process was forked from a rank; only the rank itself can use its "
                "groups: start processes that are to be ranks by torchrun or by spawn"
            )

        def guarded() -> Any:
            if self._failure is not None:
                cause = words(self._failure)
                raise TransportError(
                    f"{kind}: this group is unusable since an earlier failure: {cause}"
                ) from self._failure
            try:
                return work()
            except CollectiveMismatchError:
                raise
            except BaseException as error:
                if self._transport.size > 1:
                    self._give_up(error)
                raise

        if async_op:
            return self._worker.submit(guarded, tensors, call)
        return self._worker.call(guarded, tensors, call)

    def _give_up(self, error: BaseException) -> None:
        """The peers are in the middle of this call: the next one would meet its messages."""
        self._failure = error
        abandon = getattr(self._transport, "abandon", None)
        if abandon is not None:
            abandon(words(error))

    def close(self) -> None:
        """Take no more calls; let the queued ones finish, and end the communication thread."""
        self.closed = True
        self._worker.close(self._runner.timeout)
