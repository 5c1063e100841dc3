"""What each kind of call does on one rank, once it was negotiated.

A rank that has joined runs the same functions on zeros: so each takes all that is not data from the
options, which are equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch

from collectives.execution.all_reduce import AllReduceOptions, Runner
from collectives.execution.executor import execute
from collectives.execution.vectors import flatten, multiply
from collectives.owners import owners
from collectives.reducers import Reducer, Sum
from collectives.schedules import binomial_tree, ring
from collectives.schedules.partition import split_bounds
from collectives.schedules.schedule import Schedule
from collectives.schedules.spec import parse_all_reduce_spec
from collectives.transport.base import Message

Tensor = torch.Tensor


@dataclass(frozen=True)
class Operation:
    """One call on one rank.

    Attributes:
        runner: What carries it out.
        options: As in the call's description.
        tensors: This rank's.
        op: The reducer; any for a call that reduces nothing.
        label: What an error calls the call.
    """

    runner: Runner
    options: Mapping[str, Any]
    tensors: Sequence[Tensor]
    op: Reducer
    label: str

    @property
    def rank(self) -> int:
        """This rank."""
        return self.runner.transport.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.runner.transport.size

    def prescale(self, flat: Tensor, factor: float = 1.0) -> None:
        """Multiply by a factor, and by what the operator wants before it reduces."""
        multiply(flat, factor * self.op.prescale(flat.dtype, self.size))

    def execute(
        self, schedule: Schedule, flat: Tensor, op: Reducer, bounds: Sequence[int] | None = None
    ) -> None:
        """Run a schedule in place, of one rank none."""
        if self.size > 1:
            execute(schedule, flat, op, self.runner.context(self.label), bounds=bounds)


def _all_reduce(call: Operation) -> Tensor:
    (tensor,) = call.tensors
    options = AllReduceOptions.of(call.options)
    call.runner.all_reduce(flatten(tensor), call.op, options, call.label)
    return tensor


def _grouped_all_reduce(call: Operation) -> Sequence[Tensor]:
    parts: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in call.tensors:
        parts.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    options = AllReduceOptions.of(call.options)
    for part in parts.values():
        call.runner.all_reduce_packed(part, call.op, options, call.label)
    return call.tensors


def _reduce(call: Operation) -> Tensor:
    (tensor,) = call.tensors
    _reduce_onto(call, tensor, call.options["dst"])
    return tensor


def _reduce_onto(call: Operation, tensor: Tensor, dst: int) -> None:
    flat = flatten(tensor)
    call.prescale(flat)
    call.execute(ring.reduce(call.size, dst), flat, call.op)
    if call.rank == dst:
        call.op.finish(flat, call.size)


def _owners(call: Operation) -> list[int]:
    return owners([tensor.nbytes for tensor in call.tensors], call.size)


def _reduce_to_owners(call: Operation) -> list[int]:
    chosen = _owners(call)
    for tensor, owner in zip(call.tensors, chosen, strict=True):
        _reduce_onto(call, tensor, owner)
    return chosen


def _broadcast_from_owners(call: Operation) -> Sequence[Tensor]:
    for tensor, owner in zip(call.tensors, _owners(call), strict=True):
        call.execute(binomial_tree.broadcast(call.size, owner), flatten(tensor), Sum)
    return call.tensors


def _broadcast(call: Operation) -> Tensor:
    (tensor,) = call.tensors
    schedule = binomial_tree.broadcast(call.size, call.options["root"])
    call.execute(schedule, flatten(tensor), Sum)
    return tensor


def _reduce_scatter(call: Operation) -> Tensor:
    (tensor,) = call.tensors
    op, rank, size, by_rows = call.op, call.rank, call.size, call.options["by_rows"]
    prescale, postscale = call.options["prescale"], call.options["postscale"]
    flat = flatten(tensor).clone()
    rows = split_bounds(tensor.shape[0] if by_rows else flat.numel(), size)
    width = flat.numel() // rows[-1] if rows[-1] else 0
    bounds = [row * width for row in rows]
    if op.needs_one_tree:
        options = AllReduceOptions(parse_all_reduce_spec("auto"), prescale=prescale)
        call.runner.all_reduce(flat, op, options, call.label)
    else:
        call.prescale(flat, prescale)
        call.execute(ring.reduce_scatter(size), flat, op, bounds)
    piece = flat[bounds[rank] : bounds[rank + 1]].clone()
    if not op.needs_one_tree:
        op.finish(piece, size)
    multiply(piece, postscale)
    if by_rows:
        return piece.view(rows[rank + 1] - rows[rank], *tensor.shape[1:])
    return piece


def _all_gather(call: Operation) -> Tensor:
    return _gather(call)[0]


def _all_gather_bytes(call: Operation) -> list[bytes]:
    whole, bounds = _gather(call)
    raw = whole.numpy().tobytes()
    return [raw[low:high] for low, high in pairwise(bounds)]


def _gather(call: Operation) -> tuple[Tensor, list[int]]:
    """Return every rank's rows, one after the other, and the boundaries in rows."""
    (mine,) = call.tensors
    schedule = ring.all_gather(call.size)
    counts = torch.zeros(call.size, dtype=torch.int64, device="cpu")
    counts[call.rank] = mine.shape[0]
    call.execute(schedule, counts, Sum, range(call.size + 1))
    rows = [0, *torch.cumsum(counts, 0).tolist()]
    whole = mine.new_empty(rows[-1], *mine.shape[1:])
    whole[rows[call.rank] : rows[call.rank + 1]] = mine.detach()
    width = prod(mine.shape[1:])
    call.execute(schedule, whole.view(-1), Sum, [row * width for row in rows])
    return whole, rows


def _all_to_all(call: Operation) -> tuple[Tensor, Tensor]:
    """Exchange the first tensor's rows; the second tells how many of them go to each rank."""
    tensor, splits = call.tensors
    received = torch.empty_like(splits)
    _exchange(call, splits.split(1), received.split(1), f"the counts of {call.label}")
    whole = tensor.new_empty(int(received.sum()), *tensor.shape[1:])
    sends = tensor.detach().split([*splits.tolist(), tensor.shape[0] - int(splits.sum())])
    _exchange(call, sends[: call.size], whole.split(received.tolist()), call.label)
    return whole, received


def _exchange(call: Operation, sends: Sequence[Tensor], recvs: Sequence[Tensor], step: str) -> None:
    """Send one piece to every rank and receive one from each, all at once."""
    recvs[call.rank].copy_(sends[call.rank])
    peers = [rank for rank in range(call.size) if rank != call.rank]
    if peers:
        call.runner.transport.exchange(
            [Message(peer, sends[peer]) for peer in peers],
            [Message(peer, recvs[peer]) for peer in peers],
            step,
            call.runner.timeout,
        )


def _barrier(call: Operation) -> None:
    """Do nothing: the negotiation alone is the barrier."""


OPERATIONS: dict[str, Callable[[Operation], Any]] = {
    "all_reduce": _all_reduce,
    "grouped_all_reduce": _grouped_all_reduce,
    "reduce": _reduce,
    "reduce_to_owners": _reduce_to_owners,
    "broadcast_from_owners": _broadcast_from_owners,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_gather_bytes": _all_gather_bytes,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "barrier": _barrier,
}

# Every rank owns some of the results, which a rank that has joined would lose.
WITH_JOINED = OPERATIONS.keys() - {"reduce_to_owners", "broadcast_from_owners"}
