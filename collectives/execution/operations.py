"""What each kind of call does on one rank, once it was negotiated.

A rank that has joined runs the same functions on zeros: so each takes all that is not data from the
options, which are equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import torch

from collectives.errors import CollectiveMismatchError, TransportError
from collectives.execution.all_reduce import AllReduceOptions
from collectives.execution.operation import Operation
from collectives.execution.owner_pieces import in_pieces
from collectives.execution.vectors import flatten
from collectives.owners import owners
from collectives.reducers import Sum
from collectives.schedules import binomial_tree, bruck, ring
from collectives.schedules.auto import all_gather_schedule, reduce_schedule
from collectives.schedules.partition import split_bounds
from collectives.schedules.spec import parse_all_reduce_spec
from collectives.transport.base import Message

Tensor = torch.Tensor
_NO_OUT = -1
_RUN_OPTIONS = ("segments", "prescale", "postscale")


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
    call.execute(reduce_schedule(flat.nbytes, dst, call.size), flat, call.op)
    if call.rank == dst:
        call.finish(flat)


def _owners(call: Operation) -> list[int]:
    return owners([tensor.nbytes for tensor in call.tensors], call.size)


def _reduce_to_owners(call: Operation) -> list[int]:
    chosen: list[int] | None = call.options["owners"]
    if chosen is not None:
        for pieces in in_pieces(call, chosen):
            pieces.reduce()
        return chosen
    chosen = _owners(call)
    for tensor, owner in zip(call.tensors, chosen, strict=True):
        _reduce_onto(call, tensor, owner)
    return chosen


def _broadcast_from_owners(call: Operation) -> Sequence[Tensor]:
    chosen: list[int] | None = call.options["owners"]
    if chosen is not None:
        for pieces in in_pieces(call, chosen):
            pieces.broadcast()
        return call.tensors
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
    width, device = prod(mine.shape[1:]), "cuda" if whole.is_cuda else "cpu"
    schedule = all_gather_schedule(device, whole.nbytes, call.runner.topology)
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
    _check_counts(call, table[:, 0])
    rows = [0, *torch.cumsum(table[:, 0], 0).tolist()]
    for rank, rows_of_out in enumerate(table[:, 1].tolist()):
        if rows_of_out not in (_NO_OUT, rows[-1]):
            raise CollectiveMismatchError(
                f"{call.label}: out of {call.runner.transport.named([rank])} has {rows_of_out} "
                f"rows, and all ranks' tensors together have {rows[-1]}"
            )
    return rows


def _all_to_all(call: Operation) -> tuple[Tensor, Tensor]:
    """Exchange the first tensor's rows; the second tells how many of them go to each rank."""
    tensor, splits = call.tensors
    received = torch.empty_like(splits)
    _exchange(call, splits.split(1), received.split(1), f"the counts of {call.label}")
    _check_counts(call, received)
    whole = tensor.new_empty(int(received.sum()), *tensor.shape[1:])
    sends = tensor.detach().split([*splits.tolist(), tensor.shape[0] - int(splits.sum())])
    _exchange(call, sends[: call.size], whole.split(received.tolist()), call.label)
    return whole, received


def _check_counts(call: Operation, counts: Tensor) -> None:
    """Refuse numbers of rows that no ranks can have, before there is memory for them."""
    said = counts.tolist()
    if min(said) < 0 or sum(said) >= 1 << 63:
        raise TransportError(f"{call.label}: ranks say that they have {said} rows")


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
