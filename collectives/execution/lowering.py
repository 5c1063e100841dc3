"""Lowering translates one rank's steps of a schedule to elements and ranks of the transport."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from collectives.schedules.schedule import (
    Action,
    Schedule,
    Step,
    Tree,
    segment_bounds,
    split_bounds,
    steps_of,
)

# A ring of 1,024 ranks takes a megabyte.
_MAX_ENTRIES = 128


class Range(NamedTuple):
    """Elements [low, high) to or from `peer`, in the buffer, or in scratch memory if `staged`."""

    peer: int
    low: int
    high: int
    staged: bool = False


class Reduction(NamedTuple):
    """A reduction of received operands into elements [low, high) of the buffer.

    Attributes:
        before: Numbers of the step's receives that precede the rank's own value, in order.
        after: Numbers of the receives that follow it.
        leaves: How many ranks' contributions each operand combines, in order; None if the schedule
            does not say.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    low: int
    high: int
    leaves: tuple[int, ...] | None


class LoweredStep(NamedTuple):
    """A step in elements. Peers and group are ranks of the transport; the rest is as in a `Step`.

    Attributes:
        name: The step's name in errors.
        staged: Number of received elements that must not be written to the buffer yet.
        sent_first: Whether elements that are both sent and reduced into have been sent when the
            part to reduce arrives.
    """

    name: str
    sends: tuple[Range, ...]
    recvs: tuple[Range, ...]
    staged: int
    reductions: tuple[Reduction, ...]
    sent_first: bool
    group: tuple[int, ...]
    phase: int
    tree: Tree


def chunk_bounds(schedule: Schedule, numel: int, segments: Sequence[int] | None) -> list[int]:
    """Return the element boundaries of nearly equal chunks, whole segments if so scheduled."""
    if not schedule.whole_segments:
        return split_bounds(numel, schedule.chunks)
    return segment_bounds((0, numel) if segments is None else segments, schedule.chunks)


@lru_cache(maxsize=_MAX_ENTRIES)
def lower(
    schedule: Schedule, rank: int, bounds: tuple[int, ...], members: tuple[int, ...]
) -> tuple[LoweredStep, ...]:
    """Return the steps of the schedule's `rank`.

    bounds: Element boundaries of the schedule's chunks. members: The transport's ranks that act as
    the schedule's ranks 0, 1, ...
    """
    return tuple(
        _lower_step(f"step {number} ({schedule.name})", step, bounds, members)
        for number, step in enumerate(steps_of(schedule, rank))
    )


@lru_cache(maxsize=_MAX_ENTRIES)
def lower_evenly(
    schedule: Schedule,
    rank: int,
    numel: int,
    segments: tuple[int, ...] | None,
    members: tuple[int, ...],
) -> tuple[LoweredStep, ...]:
    """Return the same steps for the chunks of `chunk_bounds`."""
    return lower(schedule, rank, tuple(chunk_bounds(schedule, numel, segments)), members)


def _lower_step(
    name: str, step: Step, bounds: Sequence[int], members: Sequence[int]
) -> LoweredStep:
    recvs, staged = [], 0
    found: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    for number, (peer, start, stop, action, *_) in enumerate(step.recvs):
        low, high = bounds[start], bounds[stop]
        if action is Action.COPY:
            recvs.append(Range(members[peer], low, high))
            continue
        recvs.append(Range(members[peer], staged, staged + high - low, staged=True))
        staged += high - low
        sides = found.setdefault((start, stop), ([], []))
        sides[action is Action.REDUCE_RIGHT].append(number)
    return LoweredStep(
        name,
        sends=tuple(Range(members[peer], bounds[a], bounds[b]) for peer, a, b, *_ in step.sends),
        recvs=tuple(recvs),
        staged=staged,
        reductions=tuple(
            Reduction(
                tuple(before),
                tuple(after),
                bounds[start],
                bounds[stop],
                _leaves([step.recvs[i].leaves for i in (*before, *after)], len(before)),
            )
            for (start, stop), (before, after) in found.items()
        ),
        sent_first=sent_first(step),
        group=tuple(members[r] for r in step.group),
        phase=step.phase,
        tree=step.tree,
    )


def _leaves(received: Sequence[tuple[int, int] | None], before: int) -> tuple[int, ...] | None:
    """Return how many ranks each operand combines; `before` operands precede the rank's own."""
    said = [leaves for leaves in received if leaves is not None]
    if len(said) < len(received):
        return None
    counts = [theirs for _, theirs in said]
    return (*counts[:before], said[0][0], *counts[before:])


def sent_first(step: Step) -> bool:
    """Return whether elements that are both sent and reduced into are sent before data arrive."""
    sent = {each[1:3] for each in step.sends}
    received = {each[1:3] for each in step.recvs if each.action is not Action.COPY}
    starts, stops = sorted(start for start, _ in sent), sorted(stop for _, stop in sent)

    def overlapping(start: int, stop: int) -> int:
        # Sent ranges that begin before `stop`, minus the ones that end by `start`.
        return bisect_left(starts, stop) - bisect_right(stops, start)

    return all(overlapping(*each) <= (each in sent) for each in received)
