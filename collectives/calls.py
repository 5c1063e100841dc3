"""Carry out a group's calls: negotiate with the other ranks, then run."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter_ns
from typing import Any

import torch

from collectives import validation
from collectives.call import Call
from collectives.execution.all_reduce import AllReduceOptions, Runner
from collectives.execution.node_launches import by_messages, plan_node_all_reduce
from collectives.execution.operations import OPERATIONS
from collectives.execution.replay import NEW, SEEN, Replay
from collectives.execution.shared_memory import plan_host_all_reduce
from collectives.negotiation import Joined, Negotiation
from collectives.recorder import KIND, NEGOTIATED, NOTHING, UNRECORDED, GroupRecord, recording, span
from collectives.reducers import Average, Reducer, Sum
from collectives.tree_order import KEYS, in_order
from collectives.work import CallQueue, Work
from kernels.validation import check_flag

# Up to this size the caller begins its call: a longer copy would keep it from its own work.
_BEGIN_BYTES = 2 * 1024 * 1024
# Calls that write their tensors.
_IN_PLACE = {"all_reduce", "grouped_all_reduce", "run", "broadcast", "broadcast_from_owners"}
_IN_PLACE |= {"reduce", "reduce_to_owners"}


class Calls:
    """Carries out the calls of one rank.

    Each call is planned, then begun (numbered, and signalled to the other ranks), and then run once
    all ranks have signalled it. `run` does all of that in the caller's thread if no call is queued;
    `start` leaves the rest to the communication thread, or to a thread that waits.
    """

    def __init__(self, runner: Runner, record: GroupRecord) -> None:
        self._runner, self._record = runner, record
        self._transport, self._of_ranks = runner.transport, runner.transport.of_ranks
        self.queue = CallQueue(runner.transport, runner.timeout, record)
        self._negotiation = Negotiation(runner.transport, runner.timeout)
        self._count = 0
        self._requests = itertools.count(1)

    def run(self, call: Call, async_op: bool = False) -> Any:
        """Carry out a direct call; return its result, or its Work if it is asynchronous."""
        if async_op is not False:
            async_op = check_flag("async_op", async_op)
        self._plan(call)
        if async_op:
            # The user decides when to start a named call, and may use another order on some ranks:
            # the error of a mismatch then says so.
            call.movable = call.name is not None
            return self.start(call)
        return self.queue.run(call, partial(self._carry_out, call))

    def _plan(self, call: Call) -> None:
        """Make a plan for memory that the ranks share, if the call can run in it."""
        call.plan = plan_host_all_reduce(self._runner, call)
        if call.plan is None:
            call.plan = plan_node_all_reduce(self._runner, call)

    def plan_request(self, call: Call, last: Call | None = None) -> None:
        """Plan a request. last: Its call with the last buffers, whose plan may take the new one."""
        if last is not None and last.plan is not None and last.plan.rebind(call):
            call.plan = last.plan
            return
        self._plan(call)
        # In memory that GPUs share, a request already is one launch, or few.
        call.replay = Replay.of(self._runner, call) if call.plan is None else None

    def reduces_by_tree(self, call: Call) -> bool:
        """Return whether the all-reduce passes all ranks' operands with their tree to the op."""
        self._plan(call)
        if call.plan is not None:
            return call.plan.by_tree
        return self._runner.reduces_by_tree(call.tensors, call.op, AllReduceOptions.of(call))

    def number(self, call: Call) -> Call:
        """Negotiate the making of a request and number it; return the call for its starts."""
        # All ranks count it in the same negotiated call, and get the same number.
        making = replace(call, kind=f"{call.kind}_init", instead=self._requests.__next__)
        number: int = self.queue.run(making, partial(self._carry_out, making))
        return replace(call, request=number)

    def start(self, call: Call) -> Work[Any]:
        """Start a planned call without waiting for other ranks."""
        if call.plan is not None and call.plan.by_messages:
            # The first start of the request found no memory that GPUs share.
            self.plan_request(call)
        call.label, call.record, call.queued = "", UNRECORDED, perf_counter_ns()
        carry_out = partial(self._carry_out, call)
        on_gpu = any(tensor.is_cuda for tensor in call.tensors)
        if not on_gpu and call.replay is None:
            if call.plan is not None and call.plan.nbytes <= _BEGIN_BYTES:
                return self.queue.begin(call, partial(self._begin, call), carry_out)
            return self.queue.submit(call, carry_out)
        if on_gpu and torch.cuda.is_current_stream_capturing():
            if call.plan is not None:
                # A graph would outlive the bound memory, and run while other launches do.
                call = by_messages(call)
                carry_out = partial(self._carry_out, call)
            call.stage = NEW
            # In this thread, since the graph captures only the work on its stream.
            done: Work[Any] = Work(self.queue, call.title, lambda: self.queue.run(call, carry_out))
            done._run()
            return done
        replay, call.stage = call.replay, NEW
        free = replay is not None and not self.queue.is_inside()
        if replay is not None:
            call.stage = replay.begin(held=free and self._transport.shares_gpu)
        work = self.queue.submit(call, carry_out)
        if replay is not None and free and call.stage == SEEN:
            replay.hold()
        return work

    def _begin(self, call: Call) -> None:
        """Do the part before waiting for the other ranks: label, fill and signal the call."""
        call.label = self._next_label(call)
        # In this order: after the signal, other ranks may read the filled buffer.
        if call.plan is not None:
            call.plan.fill()
        self._negotiation.signal(call)

    def _carry_out(self, call: Call) -> Any:
        """Begin the call if `_begin` has not, wait until all ranks have begun it, and run it."""
        if not call.label:
            self._begin(call)
        watched = recording()
        with span(lambda: f"negotiate {call.title}") if watched else NOTHING:
            outcome = self._negotiation.wait(call)
        call.record[NEGOTIATED] = perf_counter_ns()
        if call.instead is not None:
            return call.instead()
        with span(lambda: self._range(call, outcome.joined)) if watched else NOTHING:
            # Ranks that have joined fill no buffer: the call then runs by messages, and these ranks
            # send zeros.
            if call.plan is not None and not outcome.joined and call.plan.ready():
                call.plan.run(call)
                result = call.tensors[0] if call.kind == "all_reduce" else call.tensors
            else:
                # The call's number; all ranks make the same calls, so it is the same on all.
                self._runner.first = self._count - 1
                operation = partial(OPERATIONS[call.kind], self._runner, call)
                # Ranks that have joined take part step by step, without a graph.
                least = NEW if outcome.joined else outcome.stage
                replay = call.replay
                result = (
                    replay.start(self._runner, call, least, operation) if replay else operation()
                )
        if call.kind in _IN_PLACE and self._transport.size > 1:
            # Some writes bypass autograd, which may have saved the tensors: tell it of a change.
            torch.autograd.graph.increment_version(call.tensors)
        if call.then is not None:
            call.then(result)
        return result

    def _range(self, call: Call, joined: Sequence[int]) -> str:
        """Return the call's name in profilers, with its plan in shared memory, if any."""
        return call.title if call.plan is None or joined else f"{call.title}: {call.plan}"

    def join(self, operators: Iterable[Reducer], device: torch.device | None) -> int:
        """Take part in the other ranks' calls, with zeros, until all ranks have joined.

        Arguments and result are the same as for `Group.join`.
        """
        validation.instance("operators", operators, Iterable, "a list of Reducers")
        validation.instance("device", device, torch.device | None, "a torch.device or None")
        reducers = (Sum, Average, *(validation.reducer("operators", op) for op in operators))
        by_name = {str(op): op for op in reducers}
        if device is None and torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())

        def take_part() -> int:
            if self._transport.size == 1:
                return self._transport.rank
            since = self._count
            while True:
                mine = Joined(since, by_name, self._next_label(joining))
                self._negotiation.signal(mine)
                outcome = self._negotiation.wait(mine)
                joining.record[NEGOTIATED] = perf_counter_ns()
                if outcome.last is not None:
                    return outcome.last
                assert outcome.call is not None
                joining.record[KIND] = f"join, in {outcome.call.kind}"
                self._take_part(outcome.call, by_name, device)

        joining = Call("join")
        answer: int = self.queue.run(joining, take_part)
        return answer

    def _take_part(
        self, call: Call, by_name: Mapping[str, Reducer], device: torch.device | None
    ) -> None:
        """Carry out the other ranks' call, with zeros as this rank's tensors."""
        call.tensors = [each.zeros(device) for each in call.described]
        plain = by_name[call.options.get("op", str(Sum))]
        call.op = in_order(plain, **{key: call.options[key] for key in KEYS & call.options.keys()})
        call.label = f"{call} (call {self._count - 1}{self._of_ranks}, joined)"
        self._runner.first = self._count - 1
        with span(lambda: call.title):
            OPERATIONS[call.kind](self._runner, call)

    def _next_label(self, call: Call) -> str:
        """Count and record `call`; return its name for errors."""
        number, kind = self._count, call.kind
        name = call.name
        self._count = number + 1
        call.record = self._record.begin(call, number)
        return f"{f'{kind} {name!r}' if name else kind} (call {number}{self._of_ranks})"
