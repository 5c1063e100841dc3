"""A group's calls: each negotiated with the other ranks, then carried out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from collectives.consistency.description import Description
from collectives.consistency.messages import Joined
from collectives.consistency.negotiation import Negotiation
from collectives.execution.all_reduce import Runner
from collectives.execution.call_queue import CallQueue
from collectives.execution.operations import OPERATIONS, WITH_JOINED, Operation
from collectives.execution.shared_memory_all_reduce import (
    SharedMemoryAllReduce,
    plan_shared_memory_all_reduce,
)
from collectives.reducers import Average, Reducer, Sum
from collectives.schedules.registry import LIBRARIES
from collectives.schedules.spec import parse_all_reduce_spec
from collectives.transport.shared_memory.symmetric_memory import RanksDiffer
from collectives.work import Work

Tensors = Sequence[torch.Tensor]
# Up to here the copy to shared memory is short beside what follows it.
_BEGIN_BYTES = 2 * 1024 * 1024
# Up to here a copy to undo a call with is cheaper than a negotiation of its own; beyond, that is
# little beside the call.
_UNDO_BYTES = 256 * 1024


class Calls:
    """What carries out the calls of one rank."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._transport = runner.transport
        self.queue = CallQueue(runner.transport, runner.timeout)
        self._negotiation = Negotiation(runner.transport, runner.timeout, runner.workspace)
        self._count = 0

    def __call__(
        self,
        call: Description,
        tensors: Tensors,
        op: Reducer = Sum,
        *,
        run: Callable[[], Any] | None = None,
        async_op: bool = False,
    ) -> Any:
        """Negotiate `call` with the other ranks, then return what its operation returns, or a Work.

        run: Instead of an operation, for a call that no rank can have joined.
        """
        if not call.name:
            self.queue.check_thread(call.kind)

        def work() -> Any:
            label = self._label(call)
            if run is not None:
                self._negotiation.negotiate(call, label)
                return run()
            shared = self.plan(call, tensors, op)
            if shared is not None:
                shared.fill()
            self._negotiation.signal(call)
            return self._finish(call, tensors, op, shared, label)

        return self.queue.run(call.kind, work, tensors, async_op=async_op)

    def plan(
        self, call: Description, tensors: Tensors, op: Reducer
    ) -> SharedMemoryAllReduce | None:
        """Return how the call runs in shared memory; None where it goes by messages."""
        return plan_shared_memory_all_reduce(self._runner, call.kind, call.options, tensors, op)

    def start(
        self,
        call: Description,
        tensors: Tensors,
        op: Reducer,
        shared: SharedMemoryAllReduce | None,
    ) -> Work:
        """Start a request's call, whose plan is made, as far as that needs no waiting."""
        if not call.name:
            self.queue.check_thread(call.kind)
        label = ""

        def first() -> None:
            nonlocal label
            label = self._label(call)
            if shared is not None:
                shared.fill()
            self._negotiation.signal(call)

        def rest() -> Any:
            code = None
            if shared is None and self._may_carry_code(call, tensors):
                code = self._negotiation.code_for_messages(call)
            if code is None:
                return self._finish(call, tensors, op, shared, label)
            return self._run_with_code(code, call, tensors, op, label)

        if shared is not None and shared.nbytes <= _BEGIN_BYTES:
            return self.queue.begin(call.kind, first, rest)

        def both() -> Any:
            first()
            return rest()

        if any(tensor.is_cuda for tensor in tensors) and torch.cuda.is_current_stream_capturing():
            # The graph takes what this thread's stream gets, not the communication thread's.
            done = Work()
            done.run(lambda: self.queue.run(call.kind, both, tensors))
            return done
        work: Work = self.queue.run(call.kind, both, tensors, async_op=True)
        return work

    def _may_carry_code(self, call: Description, tensors: Tensors) -> bool:
        """Whether every rank's result depends on a message of every rank, and is soon undone."""
        if not all(tensor.is_cpu for tensor in tensors):
            return False
        if not 0 < sum(tensor.nbytes for tensor in tensors) <= _UNDO_BYTES:
            return False
        if call.kind == "reduce_scatter":
            pieces = tensors[0].shape[0] if call.options["by_rows"] else tensors[0].numel()
            return pieces >= self._transport.size
        if call.kind not in ("all_reduce", "grouped_all_reduce"):
            return False
        specs = parse_all_reduce_spec(call.options["algorithm"])
        names = {name for spec in specs for name in (spec.inner, spec.outer)}
        return names.isdisjoint(LIBRARIES)

    def _run_with_code(
        self, code: int, call: Description, tensors: Tensors, op: Reducer, label: str
    ) -> Any:
        """Carry out a call whose messages tell whether the ranks differ."""
        kept = [tensor.clone() for tensor in tensors]
        self._runner.code = code
        try:
            return self._run(call, tensors, op, label)
        except RanksDiffer:
            self._runner.code = 0
            self._negotiation.flush(label)
            for tensor, values in zip(tensors, kept, strict=True):
                tensor.copy_(values)
            self._negotiation.wait(call, label)
            return self._run(call, tensors, op, label)
        finally:
            self._runner.code = 0

    def _run(self, call: Description, tensors: Tensors, op: Reducer, label: str) -> Any:
        operation = Operation(self._runner, call.options, tensors, op, label)
        return OPERATIONS[call.kind](operation)

    def _finish(
        self,
        call: Description,
        tensors: Tensors,
        op: Reducer,
        shared: SharedMemoryAllReduce | None,
        label: str,
    ) -> Any:
        """Wait until all ranks have signalled this call, and carry it out."""
        outcome = self._negotiation.wait(call, label)
        if shared is None or outcome.joined:
            return self._run(call, tensors, op, label)
        shared.reduce(label)
        return tensors[0] if call.kind == "all_reduce" else tensors

    def join(self, operators: Iterable[Reducer], device: torch.device | None) -> int:
        """Take part in the other ranks' calls, with zeros, until all ranks have joined.

        Returns the rank that was the last to join, the highest of those that joined at once.
        """
        known = {str(op): op for op in (Sum, Average, *operators)}
        self.queue.check_thread("join")

        def work() -> int:
            if self._transport.size == 1:
                return self._transport.rank
            mine = Joined(self._count, known, WITH_JOINED)
            while True:
                outcome = self._negotiation.negotiate(mine, self._label("join"))
                if outcome.last is not None:
                    return outcome.last
                assert outcome.call is not None
                call = outcome.call
                zeros = [each.zeros(device) for each in call.tensors]
                op = known[call.options.get("op", str(Sum))]
                self._run(call, zeros, op, f"{call} (call {self._count - 1}, joined)")

        answer: int = self.queue.run("join", work)
        return answer

    def _label(self, call: Description | str) -> str:
        if isinstance(call, Description):
            call = f"{call.kind} {call.name!r}" if call.name else call.kind
        label = f"{call} (call {self._count})"
        self._count += 1
        return label
