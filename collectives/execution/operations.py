"""A function for each kind of call, which carries it out on one rank after the negotiation.

A rank that has joined runs the same functions on zeros, so everything but the data comes from the
options, which are equal on all ranks.

Reductions to owners: tensors of one dtype and device are one vector, sorted by owner. Each rank
reduces an equal slice of it, as in a reduce-scatter by `direct`, and sends the slice's parts to
their owners. So a sum has the bits of `rd` and `rechd`, and no rank holds more than the vector and
the other ranks' slices.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

import torch

from collectives import validation
from collectives.call import Call
from collectives.errors import CollectiveMismatchError, TransportError
from collectives.execution.all_reduce import (
    AUTO,
    AllReduceOptions,
    Runner,
    all_reduce,
    grouped_all_reduce,
)
from collectives.execution.vectors import Vector, flatten, multiply, vector_of
from collectives.reducers import Needs, Operands, Piece, Reducer, Sum, is_plain_sum
from collectives.schedules import copying, direct, ring
from collectives.schedules.auto import all_gather_schedule, reduce_schedule
from collectives.schedules.schedule import Schedule, split_bounds
from collectives.transport.base import Message
from collectives.tree_order import in_order

Tensor = torch.Tensor
_NO_OUT = -1


def _reduce(runner: Runner, call: Call) -> Tensor:
    (tensor,) = call.tensors
    flat, dst = flatten(tensor), call.options["dst"]
    multiply(flat, runner.factor(call, flat.dtype))
    schedule = reduce_schedule(flat.nbytes, dst, runner.size, call.op.needs)
    runner.execute(call, schedule, flat, call.op)
    if runner.rank == dst:
        runner.finish(call, flat)
    return tensor


def _broadcast(runner: Runner, call: Call) -> Tensor:
    (tensor,) = call.tensors
    schedule = copying.broadcast(runner.size, call.options["root"])
    runner.execute(call, schedule, flatten(tensor), Sum)
    return tensor


def _reduce_scatter(runner: Runner, call: Call) -> Tensor:
    (tensor,) = call.tensors
    op, rank, size, by_rows = call.op, runner.rank, runner.size, call.options["by_rows"]
    flat = flatten(tensor).clone()
    rows = split_bounds(tensor.shape[0] if by_rows else flat.numel(), size)
    width = flat.numel() // rows[-1] if rows[-1] else 0
    bounds = [row * width for row in rows]
    schedule = _reduce_scatter_schedule(op, size)
    piece = flat[bounds[rank] : bounds[rank + 1]]
    wide = call.out if call.out is not None and call.out.dtype != flat.dtype else None
    if schedule is None:
        options = AllReduceOptions.of(call)._replace(specs=AUTO)
        runner.all_reduce(flat, op, options, call.label)
    else:
        multiply(flat, runner.factor(call, flat.dtype))
        if wide is not None:
            piece = flatten(wide).copy_(piece)
            op = _WrittenTo(op, piece, bounds[rank])
        runner.execute(call, schedule, flat, op, bounds)
    if call.out is None:
        piece = piece.clone()
    if schedule is not None:
        runner.finish(call, piece)
    if by_rows:
        piece = piece.view(rows[rank + 1] - rows[rank], *tensor.shape[1:])
    if call.out is None:
        return piece
    if wide is None:
        call.out.detach().copy_(piece)
    return call.out


class _WrittenTo(Reducer):
    """An operator that writes its results for one slice of the buffer to `out`, in `out`'s dtype.

    start: The slice's first element in the buffer.
    """

    def __init__(self, op: Reducer, out: Tensor, start: int) -> None:
        self.name, self.needs = op.name, op.needs
        self._op, self._out, self._start = op, out, start

    def check(self, dtype: torch.dtype) -> None:
        self._op.check(dtype)

    def reduce(self, operands: Operands) -> None:
        for parts, old, start in operands.pieces:
            out = self._out[start - self._start :][: old.numel()]
            self._op.reduce(replace(operands, pieces=(Piece(parts, out, start),)))


def _reduce_scatter_schedule(op: Reducer, size: int) -> Schedule | None:
    """Return a schedule that leaves each rank its piece; None if only an all-reduce can."""
    if not op.needs:
        return ring.reduce_scatter(size)
    return None if Needs.ONE_TREE in op.needs else direct.reduce_scatter(size)


def _all_gather(runner: Runner, call: Call) -> Tensor:
    return _gather(runner, call)[0]


def _all_gather_bytes(runner: Runner, call: Call) -> list[bytes]:
    whole, bounds = _gather(runner, call)
    raw = whole.numpy().tobytes()
    return [raw[low:high] for low, high in pairwise(bounds)]


def _gather(runner: Runner, call: Call) -> tuple[Tensor, list[int]]:
    """Return all ranks' rows as one tensor, and the ranks' boundaries in it, in rows."""
    (mine,) = call.tensors
    rows = _row_bounds(runner, call)
    result = mine.new_empty(rows[-1], *mine.shape[1:]) if call.out is None else call.out
    whole = result.detach()
    own = whole[rows[runner.rank] : rows[runner.rank + 1]]
    if own.data_ptr() != mine.data_ptr():
        inside = mine.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        own.copy_(mine.detach().clone() if inside else mine.detach())
    width, device = prod(mine.shape[1:]), "cuda" if whole.is_cuda else "cpu"
    schedule = all_gather_schedule(device, whole.nbytes, runner.topology)
    runner.execute(call, schedule, whole.view(-1), Sum, [row * width for row in rows])
    return result, rows


def _row_bounds(runner: Runner, call: Call) -> list[int]:
    """Return the boundaries of all ranks' rows; raise on all ranks if an `out` has another size."""
    (mine,) = call.tensors
    table = torch.zeros(runner.size, 2, dtype=torch.int64, device="cpu")
    table[runner.rank, 0] = mine.shape[0]
    table[runner.rank, 1] = _NO_OUT if call.out is None else call.out.shape[0]
    bounds = range(0, 2 * runner.size + 1, 2)
    runner.execute(call, copying.all_gather(runner.size), table.view(-1), Sum, bounds)
    _check_counts(runner, call, table[:, 0])
    rows = [0, *torch.cumsum(table[:, 0], 0).tolist()]
    for rank, rows_of_out in enumerate(table[:, 1].tolist()):
        if rows_of_out not in (_NO_OUT, rows[-1]):
            raise CollectiveMismatchError(
                f"{call.label}: out of {runner.transport.named([rank])} has {rows_of_out} "
                f"rows, and all ranks' tensors together have {rows[-1]}"
            )
    return rows


def _all_to_all(runner: Runner, call: Call) -> tuple[Tensor, Tensor]:
    """Exchange the first tensor's rows; the second holds the number of rows for each rank."""
    tensor, splits = call.tensors
    received = torch.empty_like(splits)
    _exchange(runner, call, splits.split(1), received.split(1), f"the counts of {call.label}")
    _check_counts(runner, call, received)
    whole = tensor.new_empty(int(received.sum()), *tensor.shape[1:])
    sends = tensor.detach().split([*splits.tolist(), tensor.shape[0] - int(splits.sum())])
    _exchange(runner, call, sends[: runner.size], whole.split(received.tolist()), call.label)
    return whole, received


def _check_counts(runner: Runner, call: Call, counts: Tensor) -> None:
    """Raise TransportError for impossible numbers of rows, before memory for them is allocated."""
    said = counts.tolist()
    if min(said) < 0 or sum(said) >= 1 << 63:
        raise TransportError(f"{call.label}: ranks report impossible numbers of rows: {said}")


def _exchange(
    runner: Runner, call: Call, sends: Sequence[Tensor], recvs: Sequence[Tensor], step: str
) -> None:
    """Send one piece to every rank and receive one from each, all at once."""
    recvs[runner.rank].copy_(sends[runner.rank])
    peers = [rank for rank in range(runner.size) if rank != runner.rank]
    if peers:
        runner.transport.exchange(
            [Message(peer, sends[peer]) for peer in peers],
            [Message(peer, recvs[peer]) for peer in peers],
            step,
            runner.timeout,
        )


def symmetric_empty(runner: Runner, call: Call, device: torch.device | None) -> Tensor:
    """Allocate memory that the node's GPUs share, on this rank's `device`."""
    dtype = getattr(torch, call.options["dtype"].removeprefix("torch."))
    nbytes = call.options["numel"] * dtype.itemsize
    return runner.add_node_memory(nbytes, device).tensor.view(dtype)


def owners(numels: Sequence[int], size: int) -> list[int]:
    """Assign each variable to the rank with the least load so far; the lowest such rank if tied.

    The result depends only on the arguments, so all ranks compute the same owners. numels: The
    elements (or bytes) of each variable, in the same order on all ranks.
    """
    validation.integer("size", size, 1)
    given: object = numels
    if isinstance(given, torch.Tensor) or not isinstance(given, Iterable):
        raise TypeError(f"numels must be a list or tuple of ints, got {type(numels).__name__}")
    # A heap of (load, rank): tuples are compared by the load, and by the rank if loads are equal.
    load = [(0, rank) for rank in range(size)]
    answer = []
    for i, numel in enumerate(numels):
        validation.integer(f"numels[{i}]", numel, 0)
        least, rank = load[0]
        heapq.heapreplace(load, (least + numel, rank))
        answer.append(rank)
    return answer


def reduce_to_owners(runner: Runner, call: Call) -> list[int]:
    """Reduce a call's tensors onto their owners; other ranks' tensors are undefined afterwards.

    Operators that need whole segments are all-reduced by `auto`, with the same bits.
    """
    op, chosen = call.op, _owners_of(call, runner.size)
    if Needs.ONE_TREE in op.needs:
        options = AllReduceOptions.of(call)._replace(specs=AUTO)
        for kind in _kinds(call.tensors).values():
            tensors = [call.tensors[i].detach() for i in kind]
            runner.all_reduce_packed(tensors, op, options, call.label)
        return chosen
    for vector, bounds, mine in _owned_vectors(runner, call, chosen):
        flat = vector.buffer(runner.packed)
        vector.fill(flat, runner.factor(call, flat.dtype))
        slices = split_bounds(vector.numel, runner.size)
        in_tree = in_order(Sum, "tree") if is_plain_sum(op) else op
        runner.execute(call, direct.reduce_scatter(runner.size), flat, in_tree, slices)
        runner.finish(call, flat[slices[runner.rank] : slices[runner.rank + 1]])
        _send_to_owners(runner, call, flat, slices, bounds)
        _copy(_slots(vector, flat)[mine], vector.tensors[mine])
    return chosen


def broadcast_from_owners(runner: Runner, call: Call) -> Sequence[Tensor]:
    """Copy a call's tensors from their owners to every rank."""
    for vector, bounds, mine in _owned_vectors(runner, call, _owners_of(call, runner.size)):
        flat = vector.buffer(runner.packed)
        slots, tensors = _slots(vector, flat), list(vector.tensors)
        _copy(tensors[mine], slots[mine])
        device = "cuda" if flat.is_cuda else "cpu"
        schedule = all_gather_schedule(device, flat.nbytes, runner.topology)
        runner.execute(call, schedule, flat, Sum, bounds)
        del slots[mine], tensors[mine]
        _copy(slots, tensors)
    return call.tensors


def _owners_of(call: Call, size: int) -> list[int]:
    chosen: list[int] | None = call.options["owners"]
    return owners([tensor.nbytes for tensor in call.tensors], size) if chosen is None else chosen


def _kinds(tensors: Sequence[Tensor]) -> dict[tuple[torch.dtype, torch.device], list[int]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, tensor in enumerate(tensors):
        kinds.setdefault((tensor.dtype, tensor.device), []).append(i)
    return kinds


def _owned_vectors(
    runner: Runner, call: Call, chosen: Sequence[int]
) -> Iterator[tuple[Vector, list[int], slice]]:
    """Yield each vector, the boundaries of its owners' pieces, and a slice of this rank's tensors.

    If the caller named the owners, tensors travel together; otherwise one by one, to save memory.
    """
    for kind in _kinds(call.tensors).values():
        numbers = sorted(kind, key=chosen.__getitem__)
        tensors = [call.tensors[i].detach() for i in numbers]
        vector = None if call.options["owners"] is None else vector_of(tensors, None)
        if vector is not None:
            found = [(vector, [chosen[i] for i in numbers])]
        else:
            alone = [Vector([flatten(one)], one.numel(), one.dtype, None) for one in tensors]
            found = [(one, [chosen[i]]) for one, i in zip(alone, numbers, strict=True)]
        for vector, ranks in found:
            segments = (0, vector.numel) if vector.segments is None else vector.segments
            firsts = [bisect_left(ranks, rank) for rank in range(runner.size + 1)]
            mine = slice(firsts[runner.rank], firsts[runner.rank + 1])
            yield vector, [segments[first] for first in firsts], mine


def _slots(vector: Vector, flat: Tensor) -> list[Tensor]:
    """Return views of a packed vector's tensors in the buffer; none if one tensor is the buffer."""
    return [] if vector.layout is None else vector.layout.views(flat)


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    if sources and targets:
        torch._foreach_copy_(list(targets), list(sources))


def _send_to_owners(
    runner: Runner, call: Call, flat: Tensor, slices: Sequence[int], bounds: Sequence[int]
) -> None:
    """Send each owner its part of this rank's slice, and receive the parts of this rank's piece."""
    rank = runner.rank
    sends: list[Message] = []
    recvs: list[Message] = []
    for peer in set(range(runner.size)) - {rank}:
        for messages, holder, owner in ((sends, rank, peer), (recvs, peer, rank)):
            low = max(slices[holder], bounds[owner])
            high = min(slices[holder + 1], bounds[owner + 1])
            if low < high:
                messages.append(Message(peer, flat[low:high]))
    if sends or recvs:
        where = f"the owners' parts of {call.label}"
        runner.transport.exchange(sends, recvs, where, runner.timeout)
    runner.transport.steps += 1


def _barrier(runner: Runner, call: Call) -> None:
    """Do nothing: the negotiation is the barrier."""


OPERATIONS: dict[str, Callable[[Runner, Call], Any]] = {
    "all_reduce": all_reduce,
    "grouped_all_reduce": grouped_all_reduce,
    "run": all_reduce,
    "reduce": _reduce,
    "reduce_to_owners": reduce_to_owners,
    "broadcast_from_owners": broadcast_from_owners,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_gather_bytes": _all_gather_bytes,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "barrier": _barrier,
}

# Calls that joined ranks can take part in. In the others they would lose results that they own, or
# lack the user's schedule.
WITH_JOINED = OPERATIONS.keys() - {"reduce_to_owners", "broadcast_from_owners", "run"}
