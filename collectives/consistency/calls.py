"""A group's calls: each negotiated with the other ranks, then carried out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from collectives import validation
from collectives.consistency.description import Call, Description
from collectives.consistency.messages import Joined
from collectives.consistency.negotiation import Negotiation
from collectives.cost import ASSUMED
from collectives.execution.all_reduce import Runner
from collectives.execution.call_queue import CallQueue
from collectives.execution.operation import Operation
from collectives.execution.operations import OPERATIONS
from collectives.execution.shared_memory_all_reduce import (
    SharedMemoryAllReduce,
    plan_shared_memory_all_reduce,
)
from collectives.reducers import Average, Reducer, Sum
from collectives.trace import recording, span
from collectives.work import Work

# Up to here the copy to shared memory is short beside what follows it.
_BEGIN_BYTES = 2 * 1024 * 1024
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
        call = self._with_link_rates(call)
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
        call = self._with_link_rates(call)
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
            return self._finish(call, shared, label)

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

    def _with_link_rates(self, call: Call) -> Call:
        """Let ranks agree on the rates that messages between GPUs are cut by, where any were set.

        Two ends that cut a message otherwise would take parts of it for each other.
        """
        rates = self._runner.gpu_link_rates
        if rates is ASSUMED or not any(tensor.is_cuda for tensor in call.tensors):
            return call
        options = {**call.description.options, "link rates": str(rates)}
        return call._replace(description=replace(call.description, options=options))

    def _signal(self, call: Call, shared: SharedMemoryAllReduce | None) -> str:
        """Do what a call can do before it waits; return what errors call it."""
        label = self._next_label(call.description)
        if shared is not None:
            shared.fill()
        self._negotiation.signal(call.description)
        return label

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
