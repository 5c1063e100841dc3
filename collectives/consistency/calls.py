"""A group's calls: each negotiated with the other ranks, then carried out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from collectives import validation
from collectives.consistency.description import Call, Description
from collectives.consistency.messages import Joined
from collectives.consistency.negotiation import Negotiation
from collectives.execution.all_reduce import Runner
from collectives.execution.call_queue import CallQueue
from collectives.execution.operation import Operation
from collectives.execution.operations import OPERATIONS
from collectives.execution.shared_memory_all_reduce import (
    SharedMemoryAllReduce,
    plan_shared_memory_all_reduce,
)
from collectives.reducers import Average, Reducer, Sum
from collectives.schedules.registry import LIBRARIES
from collectives.schedules.spec import parse_all_reduce_spec
from collectives.trace import recording, span
from collectives.transport.shared_memory.symmetric_memory import RanksDiffer
from collectives.work import Work

# Up to here the copy to shared memory is short beside what follows it.
_BEGIN_BYTES = 2 * 1024 * 1024
# Up to here a copy to undo a call with is cheaper than a negotiation of its own; beyond, a
# negotiation costs little beside the call.
_UNDO_BYTES = 256 * 1024
# Whose ranges in timelines say more: operator, algorithm and bytes.
_WITH_RANGES = ("all_reduce", "grouped_all_reduce", "run")


class Calls:
    """Carries out the calls of one rank."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._transport = runner.transport
        self.queue = CallQueue(runner.transport, runner.timeout)
        self._negotiation = Negotiation(runner.transport, runner.timeout, runner.workspace)
        self._count = 0
        self._requests = 0

    def __call__(
        self, call: Call, *, run: Callable[[], Any] | None = None, async_op: bool = False
    ) -> Any:
        """Negotiate `call` with the other ranks, then return what its operation returns, or a Work.

        run: What to do in place of an operation, for a call in which a rank that has joined cannot
        take part.
        """
        description = call.description
        if not description.name:
            self.queue.check_thread(description.kind)

        movable = async_op and description.name is not None

        def work() -> Any:
            self._negotiation.movable = movable
            if run is not None:
                self._negotiation.negotiate(description, self._next_label(description))
                return run()
            shared = self.plan(call)
            return self._finish(call, shared, self._signal(call, shared))

        if not async_op:
            return self.queue.run(description.kind, work, call.memory)
        return self._enqueue(
            description, lambda: self.queue.run(description.kind, work, call.memory, async_op=True)
        )

    def number(self, call: Call) -> Call:
        """Negotiate the making of a request; return the call that each of its starts makes."""
        description = call.description
        self(Call(replace(description, kind=f"{description.kind}_init")), run=lambda: None)
        # Alike on all ranks, which make their requests in one order.
        self._requests += 1
        return call._replace(description=replace(description, request=self._requests))

    def plan(self, call: Call) -> SharedMemoryAllReduce | None:
        """Return how the call runs in shared memory; None where it goes by messages."""
        return plan_shared_memory_all_reduce(
            self._runner, call.description.kind, call.description.options, call.tensors, call.op
        )

    def start(self, call: Call, shared: SharedMemoryAllReduce | None) -> Work:
        """Start a request's call, whose plan is made, as far as that needs no waiting."""
        return self._enqueue(call.description, lambda: self._start(call, shared))

    def _enqueue(self, description: Description, start: Callable[[], Work]) -> Work:
        """Start a call; timelines show how long that takes its caller, and the wait for it."""
        if not recording():
            return start()
        name = _called(description)
        with span(lambda: f"enqueue {name}"):
            work = start()
        work.name = name
        return work

    def _start(self, call: Call, shared: SharedMemoryAllReduce | None) -> Work:
        kind, label = call.description.kind, ""
        if not call.description.name:
            self.queue.check_thread(kind)

        def first() -> None:
            nonlocal label
            label = self._signal(call, shared)

        def rest() -> Any:
            self._negotiation.movable = False
            if not label:
                first()
            code = None
            if shared is None and self._may_carry_code(call):
                code = self._negotiation.code_for_messages(call.description)
            if code is None:
                return self._finish(call, shared, label)
            return self._run_with_code(code, call, label)

        if shared is not None and shared.vector.nbytes <= _BEGIN_BYTES:
            return self.queue.begin(kind, first, rest)

        on_gpu = any(tensor.is_cuda for tensor in call.tensors)
        if on_gpu and torch.cuda.is_current_stream_capturing():
            # The graph takes what this thread's stream gets, not the communication thread's.
            done: Work[Any] = Work()
            done.run(lambda: self.queue.run(kind, rest, call.memory))
            return done
        work: Work = self.queue.run(kind, rest, call.memory, async_op=True)
        return work

    def _signal(self, call: Call, shared: SharedMemoryAllReduce | None) -> str:
        """Do what a call can do before it waits; return what errors call it."""
        label = self._next_label(call.description)
        if shared is not None:
            shared.fill()
        self._negotiation.signal(call.description)
        return label

    def _may_carry_code(self, call: Call) -> bool:
        """Whether every rank's result depends on a message of every rank, and is soon undone."""
        kind, options = call.description.kind, call.description.options
        tensors = call.tensors
        nbytes = sum(tensor.nbytes for tensor in tensors)
        if not all(tensor.is_cpu for tensor in tensors) or not 0 < nbytes <= _UNDO_BYTES:
            return False
        if kind == "reduce_scatter":
            pieces = tensors[0].shape[0] if options["by_rows"] else tensors[0].numel()
            return pieces >= self._transport.size
        if kind not in ("all_reduce", "grouped_all_reduce"):
            return False
        specs = parse_all_reduce_spec(options["algorithm"])
        names = {name for spec in specs for name in (spec.inner, spec.outer)}
        return names.isdisjoint(LIBRARIES)

    def _run_with_code(self, code: int, call: Call, label: str) -> Any:
        """Carry out a call whose messages tell whether the ranks differ."""
        kept = [tensor.clone() for tensor in call.tensors]
        self._runner.code = code
        # Outside of an `except`, so that a mismatch is the only error in a traceback.
        try:
            with suppress(RanksDiffer):
                return self._run(call, label)
        finally:
            self._runner.code = 0
        self._negotiation.flush(label)
        for tensor, values in zip(call.tensors, kept, strict=True):
            tensor.copy_(values)
        return self._finish(call, None, label)

    def _run(self, call: Call, label: str) -> Any:
        options = call.description.options
        # Alike on all ranks: they make the same calls.
        self._runner.first = self._count - 1
        operation = Operation(
            self._runner, options, call.tensors, call.op, label, call.schedule, call.out
        )
        kind = call.description.kind
        if kind in _WITH_RANGES or not recording():
            return OPERATIONS[kind](operation)
        with span(lambda: _called(call.description)):
            return OPERATIONS[kind](operation)

    def _finish(self, call: Call, shared: SharedMemoryAllReduce | None, label: str) -> Any:
        """Wait until all ranks have signalled this call, and carry it out."""
        if recording():
            with span(lambda: f"negotiate {_called(call.description)}"):
                outcome = self._negotiation.wait(call.description, label)
        else:
            outcome = self._negotiation.wait(call.description, label)
        if shared is None or outcome.joined:
            return self._run(call, label)
        shared.reduce(label)
        return call.tensors[0] if call.description.kind == "all_reduce" else call.tensors

    def join(self, operators: Iterable[Reducer], device: torch.device | None) -> int:
        """Take part in the other ranks' calls, with zeros, until all ranks have joined.

        Arguments and result as for `Group.join`.
        """
        validation.instance("operators", operators, Iterable, "a list of Reducers")
        validation.instance("device", device, torch.device | None, "a torch.device or None")
        reducers = (Sum, Average, *operators)
        for op in reducers:
            validation.reducer("operators", op)
        by_name = {str(op): op for op in reducers}
        if device is None and torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
        self.queue.check_thread("join")

        def work() -> int:
            if self._transport.size == 1:
                return self._transport.rank
            mine = Joined(self._count, by_name)
            self._negotiation.movable = False
            while True:
                outcome = self._negotiation.negotiate(mine, self._next_label("join"))
                if outcome.last is not None:
                    return outcome.last
                assert outcome.call is not None
                theirs = outcome.call
                zeros = [each.zeros(device) for each in theirs.tensors]
                op = by_name[theirs.options.get("op", str(Sum))]
                label = f"{theirs} (call {self._count - 1}{self._transport.of_ranks}, joined)"
                self._run(Call(theirs, zeros, op), label)

        answer: int = self.queue.run("join", work)
        return answer

    def _next_label(self, call: Description | str) -> str:
        """Count a call; return what errors call it."""
        if isinstance(call, Description):
            call = f"{call.kind} {call.name!r}" if call.name else call.kind
        label = f"{call} (call {self._count}{self._transport.of_ranks})"
        self._count += 1
        return label


def _called(description: Description) -> str:
    """Return what timelines call a call."""
    return f"{description.kind} {description.name!r}" if description.name else description.kind
