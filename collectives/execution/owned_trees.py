"""Tensors reduced onto their owners by an operator that reads trees, to the bits of an all-reduce.

Where that goes by `direct`, all tensors of a kind are one vector, cut into the same slices. Each
rank reduces its slice and sends its parts to their owners, where an all-reduce gathers them on all
ranks: about half the bytes. Where it does not (little data, float64, two ranks or many) it is that
all-reduce. In shared memory a rank copies from the buffers only what it owns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from operator import itemgetter

import torch

from collectives.execution.all_reduce import AllReduceOptions, Runner
from collectives.execution.call import Call
from collectives.execution.executor import execute
from collectives.execution.vectors import Vector, vector_of
from collectives.schedules import direct
from collectives.schedules.partition import split_bounds
from collectives.schedules.spec import parse_all_reduce_spec
from collectives.transport.base import Message

Tensor = torch.Tensor


def reduce_trees_to_owners(runner: Runner, call: Call, owners: Sequence[int]) -> None:
    """Reduce a call's tensors onto their owners; what other ranks hold then has no meaning."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, tensor in enumerate(call.tensors):
        kinds.setdefault((tensor.dtype, tensor.device), []).append(i)
    for chosen in kinds.values():
        tensors = [call.tensors[i].detach() for i in chosen]
        options = AllReduceOptions.of(call)._replace(specs=parse_all_reduce_spec("auto"))
        if runner.reduces_by_tree(tensors, call.op, options):
            _reduce(runner, call, tensors, [owners[i] for i in chosen])
        else:
            runner.all_reduce_packed(tensors, call.op, options, call.label)


def _reduce(runner: Runner, call: Call, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
    """Reduce this rank's slice of a vector, and exchange what slices hold of owners' tensors."""
    vector = vector_of(tensors, None)
    assert vector is not None
    flat = vector.buffer(runner.packed)
    vector.fill(flat, runner.factor(call, vector.dtype))
    schedule = direct.reduce_scatter(runner.size)
    execute(schedule, flat, call.op, runner.context(call.label), segments=vector.segments)
    slices = split_bounds(vector.numel, runner.size)
    call.op.finish(flat[slices[runner.rank] : slices[runner.rank + 1]], runner.size)
    sends, recvs = [], []
    for holder, owner, low, high in _parts(vector, slices, owners):
        if holder == runner.rank != owner:
            sends.append(Message(owner, flat[low:high]))
        elif owner == runner.rank != holder:
            recvs.append(Message(holder, flat[low:high]))
    where = f"the owners' parts of {call.label}"
    runner.transport.exchange(sends, recvs, where, runner.timeout)
    runner.transport.steps += 1
    mine = [i for i, owner in enumerate(owners) if owner == runner.rank]
    vector.store_some(flat, mine, call.options["postscale"])


def _parts(
    vector: Vector, slices: Sequence[int], owners: Sequence[int]
) -> Iterator[tuple[int, int, int, int]]:
    """Yield who holds, and who is to have, which elements, in ascending order."""
    segments = (0, vector.numel) if vector.segments is None else vector.segments
    slots = zip(owners, segments[:-1], segments[1:], strict=True)
    for owner, run in groupby(slots, key=itemgetter(0)):
        (_, first, last), *others = run
        stop = others[-1][2] if others else last
        for holder, (start, end) in enumerate(pairwise(slices)):
            low, high = max(first, start), min(stop, end)
            if low < high:
                yield holder, owner, low, high
