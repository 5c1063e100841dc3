"""What each kind of call does on one rank, once it was negotiated.

A rank that has joined runs the same functions on zeros: so each takes all that is not data from the
options, which are equal on all ranks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from operator import itemgetter
from typing import Any

import torch

from collectives.cost.choice import all_gather_schedule, reduce_schedule
from collectives.errors import CollectiveMismatchError
from collectives.execution.all_reduce import AllReduceOptions, Runner
from collectives.execution.executor import execute
from collectives.execution.vectors import Vector, flatten, multiply, vector_of
from collectives.owners import owners
from collectives.reducers import Reducer, Sum
from collectives.schedules import binomial_tree, bruck, ring, to_owners
from collectives.schedules.partition import split_bounds
from collectives.schedules.schedule import Schedule
from collectives.schedules.spec import parse_all_reduce_spec
from collectives.transport.base import Message

Tensor = torch.Tensor
_NO_OUT = -1
_RUN_OPTIONS = ("segments", "prescale", "postscale")


@dataclass(frozen=True)
class Operation:
    """One call on one rank.

    Attributes:
        runner: What carries it out.
        options: As in the call's description.
        tensors: This rank's.
        op: The reducer; any for a call that reduces nothing.
        label: What an error calls the call.
        schedule: What is run, for a call that says so itself.
        out: Where the result is written; None for a new tensor.
    """

    runner: Runner
    options: Mapping[str, Any]
    tensors: Sequence[Tensor]
    op: Reducer
    label: str
    schedule: Schedule | None = None
    out: Tensor | None = None

    @property
    def rank(self) -> int:
        """This rank."""
        return self.runner.transport.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.runner.transport.size

    def prescale(self, flat: Tensor) -> None:
        """Multiply by what the call and the operator want before they reduce."""
        multiply(flat, self.factor(flat.dtype))

    def factor(self, dtype: torch.dtype) -> float:
        """Return what `prescale` multiplies by."""
        asked: float = self.options.get("prescale", 1.0)
        return asked * self.op.prescale(dtype, self.size)

    def finish(self, flat: Tensor) -> None:
        """Do to a result what the operator and the call want after they have reduced."""
        self.op.finish(flat, self.size)
        multiply(flat, self.options.get("postscale", 1.0))

    def execute(
        self,
        schedule: Schedule,
        flat: Tensor,
        op: Reducer,
        bounds: Sequence[int] | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Run a schedule in place, of one rank none."""
        if self.size > 1:
            context = self.runner.context(self.label)
            execute(schedule, flat, op, context, bounds=bounds, ranks=ranks)


def _all_reduce(call: Operation) -> Tensor:
    (tensor,) = call.tensors
    options = AllReduceOptions.of(call.options)
    call.runner.all_reduce(flatten(tensor), call.op, options, call.label)
    return tensor


def _grouped_all_reduce(call: Operation) -> Sequence[Tensor]:
    for options, part in AllReduceOptions.of(call.options).by_range(call.tensors):
        call.runner.all_reduce_packed(part, call.op, options, call.label)
    return call.tensors


def _run(call: Operation) -> Tensor:
    (tensor,) = call.tensors
    assert call.schedule is not None
    options = AllReduceOptions((), *(call.options[name] for name in _RUN_OPTIONS))
    call.runner.run(call.schedule, flatten(tensor), call.op, options, call.label)
    return tensor


def _reduce(call: Operation) -> Tensor:
    (tensor,) = call.tensors
    _reduce_onto(call, tensor, call.options["dst"])
    return tensor


def _reduce_onto(call: Operation, tensor: Tensor, dst: int) -> None:
    flat = flatten(tensor)
    call.prescale(flat)
    runner = call.runner
    schedule = reduce_schedule(flat.nbytes, dst, runner.rates_of(flat), runner.topology)
    call.execute(schedule, flat, call.op)
    if call.rank == dst:
        call.finish(flat)


def _owners(call: Operation) -> list[int]:
    return owners([tensor.nbytes for tensor in call.tensors], call.size)


def _reduce_to_owners(call: Operation) -> list[int]:
    chosen: list[int] | None = call.options["owners"]
    if chosen is not None:
        for pieces in _in_pieces(call, chosen):
            pieces.reduce()
        return chosen
    chosen = _owners(call)
    for tensor, owner in zip(call.tensors, chosen, strict=True):
        _reduce_onto(call, tensor, owner)
    return chosen


def _broadcast_from_owners(call: Operation) -> Sequence[Tensor]:
    chosen: list[int] | None = call.options["owners"]
    if chosen is not None:
        for pieces in _in_pieces(call, chosen):
            pieces.broadcast()
        return call.tensors
    for tensor, owner in zip(call.tensors, _owners(call), strict=True):
        call.execute(binomial_tree.broadcast(call.size, owner), flatten(tensor), Sum)
    return call.tensors


@dataclass(frozen=True)
class _Pieces:
    """Tensors as one vector, in which each owner's lie side by side.

    Attributes:
        call: The call.
        vector: The tensors in `to_owners.order` of their owners.
        bounds: Boundaries of the owners' pieces, in that order.
        mine: Which of the vector's tensors this rank owns.
    """

    call: Operation
    vector: Vector
    bounds: Sequence[int]
    mine: slice

    def reduce(self) -> None:
        """Reduce each piece onto its owner; what the others hold afterwards has no meaning."""
        call, vector = self.call, self.vector
        flat = self._buffer()
        if vector.layout is None:
            call.prescale(flat)
        else:
            vector.fill(flat, call.factor(flat.dtype))
        self._execute(to_owners.reduce_scatter(call.size), flat)
        mine = to_owners.order(call.size).index(call.rank)
        call.finish(flat[self.bounds[mine] : self.bounds[mine + 1]])
        slots, tensors = self._slots(flat), vector.tensors
        _copy(slots[self.mine], tensors[self.mine])

    def broadcast(self) -> None:
        """Copy each piece from its owner to every rank."""
        flat = self._buffer()
        slots, tensors, mine = self._slots(flat), list(self.vector.tensors), self.mine
        _copy(tensors[mine], slots[mine])
        self._execute(to_owners.all_gather(self.call.size), flat)
        del slots[mine], tensors[mine]
        _copy(slots, tensors)

    def _slots(self, flat: Tensor) -> list[Tensor]:
        """Return where the tensors lie in the buffer; nowhere if they are it."""
        return [] if self.vector.layout is None else self.vector.layout.views(flat)

    def _buffer(self) -> Tensor:
        if self.vector.layout is None:
            return self.vector.tensors[0]
        return self.call.runner.packed.take(self.vector.numel, self.vector.tensors[0])

    def _execute(self, schedule: Schedule, flat: Tensor) -> None:
        ranks = to_owners.order(self.call.size)
        self.call.execute(schedule, flat, self.call.op, self.bounds, ranks)


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    if sources and targets:
        torch._foreach_copy_(list(targets), list(sources))


def _in_pieces(call: Operation, chosen: Sequence[int]) -> Iterator[_Pieces]:
    """Yield the tensors of each dtype and device as one vector, or as one each."""
    position = {rank: i for i, rank in enumerate(to_owners.order(call.size))}
    kinds: dict[tuple[torch.dtype, torch.device], list[tuple[int, Tensor]]] = {}
    for tensor, owner in zip(call.tensors, chosen, strict=True):
        entry = position[owner], tensor.detach()
        kinds.setdefault((tensor.dtype, tensor.device), []).append(entry)
    for entries in kinds.values():
        entries.sort(key=itemgetter(0))
        places, tensors = zip(*entries, strict=True)
        vector = vector_of(tensors, None)
        if vector is not None:
            yield _pieces(call, vector, places)
            continue
        for place, tensor in entries:
            yield _pieces(call, Vector([flatten(tensor)], tensor.numel(), None), [place])


def _pieces(call: Operation, vector: Vector, places: Sequence[int]) -> _Pieces:
    """Divide a vector by the places of its tensors' owners, which are in ascending order."""
    segments = (0, vector.numel) if vector.segments is None else vector.segments
    firsts = [bisect_left(places, place) for place in range(call.size + 1)]
    mine = to_owners.order(call.size).index(call.rank)
    bounds = [segments[first] for first in firsts]
    return _Pieces(call, vector, bounds, slice(firsts[mine], firsts[mine + 1]))


def _broadcast(call: Operation) -> Tensor:
    (tensor,) = call.tensors
    schedule = binomial_tree.broadcast(call.size, call.options["root"])
    call.execute(schedule, flatten(tensor), Sum)
    return tensor


def _reduce_scatter(call: Operation) -> Tensor:
    (tensor,) = call.tensors
    op, rank, size, by_rows = call.op, call.rank, call.size, call.options["by_rows"]
    flat = flatten(tensor).clone()
    rows = split_bounds(tensor.shape[0] if by_rows else flat.numel(), size)
    width = flat.numel() // rows[-1] if rows[-1] else 0
    bounds = [row * width for row in rows]
    if op.needs_one_tree:
        options = AllReduceOptions(
            parse_all_reduce_spec("auto"),
            prescale=call.options["prescale"],
            postscale=call.options["postscale"],
        )
        call.runner.all_reduce(flat, op, options, call.label)
    else:
        call.prescale(flat)
        call.execute(ring.reduce_scatter(size), flat, op, bounds)
    piece = flat[bounds[rank] : bounds[rank + 1]]
    if call.out is None:
        piece = piece.clone()
    if not op.needs_one_tree:
        call.finish(piece)
    if by_rows:
        piece = piece.view(rows[rank + 1] - rows[rank], *tensor.shape[1:])
    if call.out is None:
        return piece
    call.out.detach().copy_(piece)
    return call.out


def _all_gather(call: Operation) -> Tensor:
    return _gather(call)[0]


def _all_gather_bytes(call: Operation) -> list[bytes]:
    whole, bounds = _gather(call)
    raw = whole.numpy().tobytes()
    return [raw[low:high] for low, high in pairwise(bounds)]


def _gather(call: Operation) -> tuple[Tensor, list[int]]:
    """Return every rank's rows, one after the other, and the boundaries in rows."""
    (mine,) = call.tensors
    rows = _row_bounds(call)
    result = mine.new_empty(rows[-1], *mine.shape[1:]) if call.out is None else call.out
    whole = result.detach()
    whole[rows[call.rank] : rows[call.rank + 1]] = mine.detach()
    width, runner = prod(mine.shape[1:]), call.runner
    schedule = all_gather_schedule(whole.nbytes, runner.rates_of(whole), runner.topology)
    call.execute(schedule, whole.view(-1), Sum, [row * width for row in rows])
    return result, rows


def _row_bounds(call: Operation) -> list[int]:
    """Return the boundaries of all ranks' rows; raise on all ranks where one's `out` has others."""
    (mine,) = call.tensors
    table = torch.zeros(call.size, 2, dtype=torch.int64, device="cpu")
    table[call.rank, 0] = mine.shape[0]
    table[call.rank, 1] = _NO_OUT if call.out is None else call.out.shape[0]
    bounds = range(0, 2 * call.size + 1, 2)
    call.execute(bruck.all_gather(call.size), table.view(-1), Sum, bounds)
    rows = [0, *torch.cumsum(table[:, 0], 0).tolist()]
    for rank, rows_of_out in enumerate(table[:, 1].tolist()):
        if rows_of_out not in (_NO_OUT, rows[-1]):
            raise CollectiveMismatchError(
                f"{call.label}: out of rank {rank} has {rows_of_out} rows, and all ranks' tensors "
                f"together have {rows[-1]}"
            )
    return rows


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
    "run": _run,
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

# Every rank owns some of the results, which a rank that has joined would lose; and a schedule that
# a user wrote is not there.
WITH_JOINED = OPERATIONS.keys() - {"reduce_to_owners", "broadcast_from_owners", "run"}
