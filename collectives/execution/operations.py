"""What each kind of call does on one rank, once it was negotiated.

A rank that has joined runs the same functions on zeros: so each takes all that is not data from the
options, which are equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from collectives.execution.all_reduce import Runner
from collectives.execution.gathering import gather_pieces
from collectives.execution.vectors import flatten
from collectives.owners import owners
from collectives.reducers import Reducer, Sum
from collectives.schedules import binomial_tree, ring
from collectives.schedules.partition import split_bounds
from collectives.schedules.spec import parse_all_reduce_spec
from collectives.transport.base import Message

__all__ = ["OPERATIONS", "WITH_JOINED"]

Tensor = torch.Tensor
Options = Mapping[str, Any]
Operation = Callable[[Runner, Options, list[Tensor], Reducer, str], Any]


def _all_reduce(
    runner: Runner, options: Options, tensors: list[Tensor], op: Reducer, label: str
) -> Tensor:
    runner.all_reduce(
        flatten(tensors[0]),
        op,
        parse_all_reduce_spec(options["algorithm"]),
        options["segments"],
        options["prescale"],
        options["postscale"],
        label,
    )
    return tensors[0]


def _grouped_all_reduce(
    runner: Runner, options: Options, tensors: list[Tensor], op: Reducer, label: str
) -> list[Tensor]:
    specs = parse_all_reduce_spec(options["algorithm"])
    parts: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        parts.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for part in parts.values():
        runner.all_reduce_packed(part, op, specs, options["prescale"], options["postscale"], label)
    return tensors


def _reduce(
    runner: Runner, options: Options, tensors: list[Tensor], op: Reducer, label: str
) -> Tensor:
    _reduce_onto(runner, tensors[0], options["dst"], op, label)
    return tensors[0]


def _reduce_onto(runner: Runner, tensor: Tensor, dst: int, op: Reducer, label: str) -> None:
    flat = tensor.detach().view(-1)
    size = runner.transport.size
    if size > 1:
        runner.execute(ring.reduce(size, dst), flat, op, label)
    if runner.transport.rank == dst:
        op.finish(flat, size)


def _owners(runner: Runner, tensors: Sequence[Tensor]) -> list[int]:
    return owners([tensor.nbytes for tensor in tensors], runner.transport.size)


def _reduce_to_owners(
    runner: Runner, options: Options, tensors: list[Tensor], op: Reducer, label: str
) -> list[int]:
    chosen = _owners(runner, tensors)
    for tensor, owner in zip(tensors, chosen, strict=True):
        _reduce_onto(runner, tensor, owner, op, label)
    return chosen


def _broadcast_from(runner: Runner, tensor: Tensor, root: int, label: str) -> None:
    size = runner.transport.size
    if size > 1:
        runner.execute(binomial_tree.broadcast(size, root), tensor.detach().view(-1), Sum, label)


def _broadcast_from_owners(
    runner: Runner, options: Options, tensors: list[Tensor], op: Reducer, label: str
) -> list[Tensor]:
    for tensor, owner in zip(tensors, _owners(runner, tensors), strict=True):
        _broadcast_from(runner, tensor, owner, label)
    return tensors


def _broadcast(
    runner: Runner, options: Options, tensors: list[Tensor], op: Reducer, label: str
) -> Tensor:
    _broadcast_from(runner, tensors[0], options["root"], label)
    return tensors[0]


def _reduce_scatter(
    runner: Runner, options: Options, tensors: list[Tensor], op: Reducer, label: str
) -> Tensor:
    tensor = tensors[0]
    flat = tensor.detach().clone().view(-1)
    size, rank = runner.transport.size, runner.transport.rank
    by_rows = options["by_rows"]
    rows = split_bounds(tensor.shape[0] if by_rows else flat.numel(), size)
    width = flat.numel() // rows[-1] if rows[-1] else 0
    bounds = [row * width for row in rows]
    if size > 1 and op.needs_one_tree:
        runner.all_reduce(flat, op, parse_all_reduce_spec("auto"), None, 1.0, 1.0, label)
    elif size > 1:
        runner.execute(ring.reduce_scatter(size), flat, op, label, bounds=bounds)
    piece = flat[bounds[rank] : bounds[rank + 1]].clone()
    if not op.needs_one_tree:
        op.finish(piece, size)
    if by_rows:
        return piece.view(rows[rank + 1] - rows[rank], *tensor.shape[1:])
    return piece


def _all_gather(
    runner: Runner, options: Options, tensors: list[Tensor], op: Reducer, label: str
) -> Tensor:
    tensor = tensors[0]
    if runner.transport.size == 1:
        return tensor.detach().clone()
    rows = torch.tensor([tensor.shape[0]], device="cpu")
    counts, _ = _pieces(runner, rows, label)
    whole, _ = _pieces(runner, tensor.detach().view(-1), label)
    return whole.view(int(counts.sum()), *tensor.shape[1:])


def _pieces(runner: Runner, mine: Tensor, label: str) -> tuple[Tensor, list[int]]:
    return gather_pieces(mine, runner.transport, label, runner.timeout, runner.workspace)


def _all_gather_bytes(
    runner: Runner, options: Options, tensors: list[Tensor], op: Reducer, label: str
) -> list[bytes]:
    payload = tensors[0]
    if runner.transport.size == 1:
        return [payload.numpy().tobytes()]
    whole, bounds = _pieces(runner, payload, label)
    raw = whole.numpy().tobytes()
    return [raw[low:high] for low, high in pairwise(bounds)]


def _all_to_all(
    runner: Runner, options: Options, tensors: list[Tensor], op: Reducer, label: str
) -> tuple[Tensor, Tensor]:
    """tensors: The rows, and how many of them go to each rank."""
    tensor, splits = tensors
    transport = runner.transport
    received = torch.empty_like(splits)
    _exchange(runner, list(splits.split(1)), list(received.split(1)), f"the counts of {label}")
    whole = tensor.new_empty(int(received.sum()), *tensor.shape[1:])
    sends = tensor.detach().split([*splits.tolist(), tensor.shape[0] - int(splits.sum())])
    _exchange(runner, sends[: transport.size], whole.split(received.tolist()), label)
    return whole, received


def _exchange(runner: Runner, sends: Sequence[Tensor], recvs: Sequence[Tensor], label: str) -> None:
    """Send one piece to every rank and receive one from each, all at once."""
    transport = runner.transport
    recvs[transport.rank].copy_(sends[transport.rank])
    others = [rank for rank in range(transport.size) if rank != transport.rank]
    if others:
        transport.exchange(
            [Message(rank, sends[rank]) for rank in others],
            [Message(rank, recvs[rank]) for rank in others],
            label,
            runner.timeout,
        )


def _barrier(
    runner: Runner, options: Options, tensors: list[Tensor], op: Reducer, label: str
) -> None:
    """Nothing: the negotiation alone does that."""


# Those that a rank with nothing to give can take part in.
WITH_JOINED: dict[str, Operation] = {
    "all_reduce": _all_reduce,
    "grouped_all_reduce": _grouped_all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_gather_bytes": _all_gather_bytes,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "barrier": _barrier,
}

OPERATIONS: dict[str, Operation] = {
    **WITH_JOINED,
    # Every rank owns some of the results, which a rank that has joined would lose.
    "reduce_to_owners": _reduce_to_owners,
    "broadcast_from_owners": _broadcast_from_owners,
}
