"""Tensors packed by owner, to be reduced onto their owners and copied from there."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch

from collectives.execution.all_reduce import Runner
from collectives.execution.call import Call
from collectives.execution.vectors import Vector, flatten, vector_of
from collectives.owners import owners
from collectives.schedules import direct, to_owners
from collectives.schedules.schedule import Schedule

Tensor = torch.Tensor


@dataclass(frozen=True)
class OwnedVector:
    """Tensors as one vector, in which each owner's lie side by side.

    Attributes:
        order: The ranks in the order in which what they own lies in the vector.
        bounds: Boundaries of the owners' pieces, in that order.
        mine: Which of the vector's tensors this rank owns.
    """

    runner: Runner
    call: Call
    vector: Vector
    order: tuple[int, ...]
    bounds: Sequence[int]
    mine: slice

    def reduce(self) -> None:
        """Reduce each piece onto its owner; what the others hold afterwards has no meaning."""
        runner, call, vector = self.runner, self.call, self.vector
        flat = vector.buffer(runner.packed)
        vector.fill(flat, runner.factor(call, flat.dtype))
        at_once = call.op.operands == "all"
        self._execute((direct if at_once else to_owners).reduce_scatter(runner.size), flat)
        mine = self.order.index(runner.rank)
        runner.finish(call, flat[self.bounds[mine] : self.bounds[mine + 1]])
        slots, tensors = self._slots(flat), vector.tensors
        _copy(slots[self.mine], tensors[self.mine])

    def broadcast(self) -> None:
        """Copy each piece from its owner to every rank."""
        flat = self.vector.buffer(self.runner.packed)
        slots, tensors, mine = self._slots(flat), list(self.vector.tensors), self.mine
        _copy(tensors[mine], slots[mine])
        self._execute(to_owners.all_gather(self.runner.size), flat)
        del slots[mine], tensors[mine]
        _copy(slots, tensors)

    def _slots(self, flat: Tensor) -> list[Tensor]:
        """Return where the tensors lie in the buffer; nowhere if they are it."""
        return [] if self.vector.layout is None else self.vector.layout.views(flat)

    def _execute(self, schedule: Schedule, flat: Tensor) -> None:
        self.runner.execute(self.call, schedule, flat, self.call.op, self.bounds, self.order)


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    if sources and targets:
        torch._foreach_copy_(list(targets), list(sources))


def owners_of(call: Call, size: int) -> list[int]:
    """Return the ranks that own a call's tensors: as it says, or by least bytes."""
    chosen: list[int] | None = call.options["owners"]
    return owners([tensor.nbytes for tensor in call.tensors], size) if chosen is None else chosen


def owned_vectors(runner: Runner, call: Call, chosen: Sequence[int]) -> Iterator[OwnedVector]:
    """Yield the tensors of each dtype and device as one vector, or as one each."""
    # What needs all operands needs them in the order of the ranks.
    at_once = call.op.operands == "all"
    order = tuple(range(runner.size)) if at_once else to_owners.order(runner.size)
    position = {rank: i for i, rank in enumerate(order)}
    kinds: dict[tuple[torch.dtype, torch.device], list[tuple[int, Tensor]]] = {}
    for tensor, owner in zip(call.tensors, chosen, strict=True):
        entry = position[owner], tensor.detach()
        kinds.setdefault((tensor.dtype, tensor.device), []).append(entry)
    for entries in kinds.values():
        entries.sort(key=itemgetter(0))
        places, tensors = zip(*entries, strict=True)
        vector = vector_of(tensors, None)
        if vector is not None:
            yield _owned_vector(runner, call, vector, order, places)
            continue
        for place, tensor in entries:
            vector = Vector([flatten(tensor)], tensor.numel(), tensor.dtype, None)
            yield _owned_vector(runner, call, vector, order, [place])


def _owned_vector(
    runner: Runner, call: Call, vector: Vector, order: tuple[int, ...], places: Sequence[int]
) -> OwnedVector:
    """Divide a vector by the places of its tensors' owners, which are in ascending order."""
    segments = (0, vector.numel) if vector.segments is None else vector.segments
    firsts = [bisect_left(places, place) for place in range(runner.size + 1)]
    mine = order.index(runner.rank)
    bounds = [segments[first] for first in firsts]
    return OwnedVector(runner, call, vector, order, bounds, slice(firsts[mine], firsts[mine + 1]))
