"""Reduce tensors onto the ranks that own them, and copy them from there to every rank.

Tensors of one dtype and device are one vector, sorted by owner. Each rank reduces an equal slice of
it, as in a reduce-scatter by `direct`, and sends its parts to their owners: a sum has the bits of
`rd` and `rechd`, and no rank holds more than the vector and the other ranks' slices.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

import torch

from collectives import validation
from collectives.execution.all_reduce import AllReduceOptions, Runner
from collectives.execution.call import Call
from collectives.execution.vectors import Vector, flatten, vector_of
from collectives.reducers import Needs, Sum, is_plain_sum
from collectives.schedules import direct
from collectives.schedules.auto import all_gather_schedule
from collectives.schedules.partition import split_bounds
from collectives.schedules.spec import parse_all_reduce_spec
from collectives.transport.base import Message
from collectives.tree_order import in_order

Tensor = torch.Tensor


def owners(numels: Sequence[int], size: int) -> list[int]:
    """Assign each variable to the rank with the least load so far; of several, to the lowest one.

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
    """Reduce a call's tensors onto their owners; what the other ranks' tensors hold has no meaning.

    An operator that needs whole segments is all-reduced by `auto`, and has those bits.
    """
    op, chosen = call.op, _owners_of(call, runner.size)
    if Needs.ONE_TREE in op.needs:
        options = AllReduceOptions.of(call)._replace(specs=parse_all_reduce_spec("auto"))
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
    """Yield each vector, the boundaries of its owners' pieces, and which tensors this rank owns.

    Tensors whose owners the caller named travel together; others one by one, to spare memory.
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
    """Return where a packed vector's tensors lie in the buffer; nothing if they are the buffer."""
    return [] if vector.layout is None else vector.layout.views(flat)


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    if sources and targets:
        torch._foreach_copy_(list(targets), list(sources))


def _send_to_owners(
    runner: Runner, call: Call, flat: Tensor, slices: Sequence[int], bounds: Sequence[int]
) -> None:
    """Send every owner what this rank's slice has of its piece, and receive the own piece."""
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
