"""One rank's steps of a schedule in elements, worked out once for calls that repeat."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from collectives.schedules.partition import segment_bounds, split_bounds
from collectives.schedules.schedule import Action, Schedule, Step, Transfer, steps_of

# Of the latest schedules and lengths. One of 1,024 ranks' rings takes a megabyte.
_MOST = 128


class Cut(NamedTuple):
    """Elements [low, high) to or from `peer`: of the buffer, or of scratch where `staged`."""

    peer: int
    low: int
    high: int
    staged: bool = False


class Reduction(NamedTuple):
    """Elements [low, high) of the buffer with what has come for them.

    before, after: numbers of the step's receives, in the order of the reduction; between them the
    rank's own value.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    low: int
    high: int


class Leg(NamedTuple):
    """A step. Peers and group are ranks of the transport.

    name: what an error calls it. staged: elements that come but must not be in the buffer yet.
    sent_first: whether what a part of a message is reduced into has been sent when that part has
    come. group, phase: as in a `Step`.
    """

    name: str
    sends: tuple[Cut, ...]
    recvs: tuple[Cut, ...]
    staged: int
    reductions: tuple[Reduction, ...]
    sent_first: bool
    group: tuple[int, ...]
    phase: int


def legs_of(
    schedule: Schedule,
    rank: int,
    numel: int,
    *,
    segments: Sequence[int] | None = None,
    bounds: Sequence[int] | None = None,
    ranks: tuple[int, ...] | None = None,
) -> Sequence[Leg]:
    """The steps of the schedule's `rank` on a buffer of `numel` elements.

    bounds: element boundaries of the chunks; unless given, nearly equal pieces, of whole segments
    where the schedule asks for them. ranks: the transport's ranks that stand for the schedule's
    ranks 0, 1, ...; the same numbers unless given.
    """
    if bounds is not None:
        return _legs(schedule, rank, bounds, ranks)
    if schedule.whole_segments:
        whole = (0, numel) if segments is None else segments
        return _legs(schedule, rank, segment_bounds(whole, schedule.chunks), ranks)
    return _even(schedule, rank, numel, ranks)


@lru_cache(maxsize=_MOST)
def _even(
    schedule: Schedule, rank: int, numel: int, ranks: tuple[int, ...] | None
) -> tuple[Leg, ...]:
    return _legs(schedule, rank, split_bounds(numel, schedule.chunks), ranks)


def _legs(
    schedule: Schedule, rank: int, cuts: Sequence[int], ranks: tuple[int, ...] | None
) -> tuple[Leg, ...]:
    members = range(schedule.size) if ranks is None else ranks
    return tuple(
        _leg(f"step {number} ({schedule.name})", step, cuts, members)
        for number, step in enumerate(steps_of(schedule, rank))
    )


def _leg(name: str, step: Step, cuts: Sequence[int], members: Sequence[int]) -> Leg:
    recvs, staged = [], 0
    found: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    for number, (peer, start, stop, action) in enumerate(step.recvs):
        low, high = cuts[start], cuts[stop]
        if action is Action.COPY:
            recvs.append(Cut(members[peer], low, high))
            continue
        recvs.append(Cut(members[peer], staged, staged + high - low, staged=True))
        staged += high - low
        sides = found.setdefault((start, stop), ([], []))
        sides[action is Action.REDUCE_RIGHT].append(number)
    return Leg(
        name,
        sends=tuple(_sent(transfer, cuts, members) for transfer in step.sends),
        recvs=tuple(recvs),
        staged=staged,
        reductions=tuple(
            Reduction(tuple(before), tuple(after), cuts[start], cuts[stop])
            for (start, stop), (before, after) in found.items()
        ),
        sent_first=sent_first(step),
        group=tuple(members[r] for r in step.group),
        phase=step.phase,
    )


def _sent(transfer: Transfer, cuts: Sequence[int], members: Sequence[int]) -> Cut:
    return Cut(members[transfer.peer], cuts[transfer.start], cuts[transfer.stop])


def sent_first(step: Step) -> bool:
    """Whether what a part of a message is reduced into has been sent when that part has come."""
    return all(
        sent.stop <= recv.start or recv.stop <= sent.start or sent[1:3] == recv[1:3]
        for recv in step.recvs
        if recv.action is not Action.COPY
        for sent in step.sends
    )
