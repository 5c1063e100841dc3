"""Reductions onto owners, to the bits of an all-reduce whose elements depend on each other.

All tensors of a kind are one vector, as in that all-reduce. It ends where it has reduced: each rank
then holds a slice of the result, of which it sends the parts to their owners. So about half the
bytes travel of those of an all-reduce, which sends the slices to all ranks; where it goes by `rd`,
each rank holds all of it, and there is nothing to send. In shared memory a rank copies from the
buffers only what it owns.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from operator import itemgetter

import torch

from collectives.execution.all_reduce import AllReduceOptions, Held, Runner
from collectives.execution.call import Call
from collectives.execution.vectors import Vector, vector_of
from collectives.schedules.spec import parse_all_reduce_spec
from collectives.schedules.topology import Topology
from collectives.transport.base import Message

Tensor = torch.Tensor
# An owner, the first element of what it owns, and the one behind the last.
Slot = tuple[int, int, int]


def reduce_trees_to_owners(runner: Runner, call: Call, owners: Sequence[int]) -> None:
    """Reduce a call's tensors onto their owners; what other ranks hold then has no meaning."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, tensor in enumerate(call.tensors):
        kinds.setdefault((tensor.dtype, tensor.device), []).append(i)
    options = AllReduceOptions.of(call)._replace(specs=parse_all_reduce_spec("auto"))
    for chosen in kinds.values():
        tensors = [call.tensors[i].detach() for i in chosen]
        vector = None if runner.size == 1 else vector_of(tensors, None)
        if vector is None:
            runner.all_reduce_packed(tensors, call.op, options, call.label)
        else:
            _reduce(runner, call, vector, [owners[i] for i in chosen])


def _reduce(runner: Runner, call: Call, vector: Vector, owners: Sequence[int]) -> None:
    """Reduce a vector, and exchange what ranks hold of others' tensors."""
    flat = vector.buffer(runner.packed)
    vector.fill(flat, runner.factor(call, vector.dtype))
    options = AllReduceOptions(parse_all_reduce_spec("auto"), vector.segments)
    held = runner.all_reduce(flat, call.op, options, call.label, prescale=1.0, gather=False)
    segments = (0, vector.numel) if vector.segments is None else vector.segments
    slots = list(zip(owners, segments[:-1], segments[1:], strict=True))
    send_to_owners(runner, call, flat, held, slots)
    mine = [i for i, owner in enumerate(owners) if owner == runner.rank]
    vector.store_some(flat, mine, call.options["postscale"])


def send_to_owners(
    runner: Runner, call: Call, flat: Tensor, held: Sequence[Held], slots: Sequence[Slot]
) -> None:
    """Send each owner what it does not hold of its slots, which lie in ascending order."""
    sends, recvs = [], []
    for holder, owner, low, high in _parts(tuple(held), tuple(slots), runner.topology):
        if holder == runner.rank:
            sends.append(Message(owner, flat[low:high]))
        elif owner == runner.rank:
            recvs.append(Message(holder, flat[low:high]))
    if sends or recvs:
        where = f"the owners' parts of {call.label}"
        runner.transport.exchange(sends, recvs, where, runner.timeout)
    runner.transport.steps += 1


# A training's reductions repeat.
@lru_cache(maxsize=64)
def _parts(
    held: tuple[Held, ...], slots: tuple[Slot, ...], topology: Topology
) -> tuple[tuple[int, int, int, int], ...]:
    """Return who sends, and to whom, which elements, in ascending order.

    Of several ranks that hold them that is one of the owner's node, if there is one.
    """
    starts, local = [start for start, _, _ in held], topology.local_size
    found = []
    for owner, run in groupby(slots, key=itemgetter(0)):
        (_, first, last), *others = run
        last = others[-1][2] if others else last
        at = max(bisect_right(starts, first) - 1, 0)
        for start, stop, ranks in held[at : bisect_right(starts, last)]:
            low, high = max(first, start), min(last, stop)
            if low < high and owner not in ranks:
                node = owner // local
                far = [(rank // local != node, abs(rank - owner), rank) for rank in ranks]
                found.append((min(far)[-1], owner, low, high))
    return tuple(found)
