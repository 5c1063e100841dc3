"""Lowering: a rank's steps in elements, for every schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from collectives.execution.lowering import (
    LoweredStep,
    Range,
    Reduction,
    chunk_bounds,
    lower,
)
from collectives.schedules import ring
from collectives.schedules.registry import SCHEDULES
from collectives.schedules.schedule import Action, Schedule, Step, Transfer
from collectives.schedules.topology import Topology
from tests.collectives.schedules.simulation import one_level

SIZES = [2, 3, 4, 5, 8]
SEGMENTS = (0, 3, 3, 50, 90, 91)


def steps_of(
    schedule: Schedule, rank: int, numel: int, segments: Sequence[int] | None = None
) -> tuple[LoweredStep, ...]:
    bounds = chunk_bounds(schedule, numel, segments)
    return lower(schedule, rank, tuple(bounds), tuple(range(schedule.size)))


@pytest.mark.parametrize("numel", [91, 5, 1, 0])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_lower_on_all_ranks_pairs_sends_and_receives(name: str, size: int, numel: int) -> None:
    schedule = one_level(name, 1, Topology(size, size))
    segments = SEGMENTS if numel == 91 else None
    all_steps = [steps_of(schedule, rank, numel, segments) for rank in range(size)]
    for number, steps in enumerate(zip(*all_steps, strict=True)):
        for rank, step in enumerate(steps):
            assert step.name == f"step {number} ({schedule.name})"
            for each in step.sends:
                assert 0 <= each.low <= each.high <= numel
                back = [c for c in steps[each.peer].recvs if c.peer == rank]
                sent = [c for c in step.sends if c.peer == each.peer]
                assert [c.high - c.low for c in sent] == [c.high - c.low for c in back]


def test_lower_recursive_halving_gives_these_numbers() -> None:
    steps = steps_of(one_level("rechd", 1, Topology(2, 2)), 1, 7)
    assert steps[0] == LoweredStep(
        name="step 0 (rechd)",
        sends=(Range(0, 0, 4),),
        recvs=(Range(0, 0, 3, staged=True),),
        staged=3,
        reductions=(Reduction((0,), (), 4, 7, leaves=(1, 1)),),
        sent_first=True,
        group=(0, 1),
        phase=0,
        tree=(),
    )
    assert steps[1].sends == (Range(0, 4, 7),)
    assert steps[1].recvs == (Range(0, 0, 4),)
    assert (steps[1].staged, steps[1].reductions) == (0, ())


def test_lower_for_some_ranks_names_the_transports_ranks() -> None:
    here, there = (
        lower(one_level("vhdd", 1, Topology(2, 2)), 1, (0, 4, 8), members)
        for members in ((4, 6), (0, 1))
    )
    for mine, other in zip(here, there, strict=True):
        members = {0: 4, 1: 6}
        assert [members[each.peer] for each in other.sends] == [each.peer for each in mine.sends]
        assert [members[each.peer] for each in other.recvs] == [each.peer for each in mine.recvs]
        assert tuple(members[rank] for rank in other.group) == mine.group


def test_lower_with_bounds_or_whole_segments_cuts_there() -> None:
    step = lower(ring.all_gather(3), 0, (0, 1, 6, 6), (0, 1, 2))[0]
    assert step.sends == (Range(1, 0, 1),)
    assert step.recvs == (Range(2, 6, 6),)

    line = one_level("xring", 2, Topology(2, 2), one_tree=True)
    assert line.whole_segments
    ends = {
        end
        for rank in range(2)
        for step in steps_of(line, rank, 91, SEGMENTS)
        for each in step.sends
        for end in (each.low, each.high)
    }
    assert ends <= set(SEGMENTS)


def test_lower_again_returns_the_same_steps() -> None:
    schedule = one_level("rechd", 1, Topology(4, 4))
    assert steps_of(schedule, 2, 1000) is steps_of(schedule, 2, 1000)
    others = [steps_of(schedule, 1, 1000), steps_of(schedule, 2, 1001)]
    assert all(other != steps_of(schedule, 2, 1000) for other in others)


def test_lower_where_one_receive_does_not_say_its_leaves_leaves_them_open() -> None:
    recvs = (
        Transfer(1, 0, 1, Action.REDUCE_RIGHT, leaves=(1, 1)),
        Transfer(2, 0, 1, Action.REDUCE_RIGHT),
    )
    base = one_level("rd", 1, Topology(4, 4))
    (step,) = steps_of(replace(base, steps=lambda rank: (Step(recvs=recvs),)), 0, 9)
    assert step.reductions[0].leaves is None
