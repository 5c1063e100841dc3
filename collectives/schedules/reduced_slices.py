"""Where an all-reduce has its result before it sends it back: behind which step, on which ranks."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from collectives.schedules.schedule import Action, Schedule, steps_of


class ReducedSlices(NamedTuple):
    """What `reduced_slices` finds.

    Attributes:
        steps: How many steps there are up to the last one that reduces, with it.
        holders: (start, stop, ranks) of chunks in ascending order: the ranks that then hold the
            result of chunks [start, stop).
    """

    steps: int
    holders: tuple[tuple[int, int, tuple[int, ...]], ...]


@lru_cache(maxsize=64)
def reduced_slices(schedule: Schedule) -> ReducedSlices:
    """Return how far an all-reduce has to run until every chunk's result is on some rank.

    Of one whose last reductions are not of all chunks, once each, that is all of it.
    """
    whole = ((0, schedule.chunks, tuple(range(schedule.size))),)
    if schedule.whole_segments or schedule.gathered:
        return ReducedSlices(len(steps_of(schedule, 0)), whole)
    reduced: dict[int, dict[tuple[int, int], list[int]]] = {}
    count = 0
    for rank in range(schedule.size):
        for number, step in enumerate(schedule.steps(rank)):
            count = number + 1
            for chunks in {recv[1:3] for recv in step.recvs if recv.action is not Action.COPY}:
                reduced.setdefault(number, {}).setdefault(chunks, []).append(rank)
    last = max(reduced, default=-1)
    held = sorted(reduced.get(last, {}).items())
    edges = [0, *[stop for (_, stop), _ in held]]
    tiled = [chunks for chunks, _ in held] == list(pairwise(edges)) and edges[-1] == schedule.chunks
    if not tiled:
        return ReducedSlices(count, whole)
    return ReducedSlices(last + 1, tuple([(*chunks, tuple(ranks)) for chunks, ranks in held]))
