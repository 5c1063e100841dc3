"""A rank's steps in elements: what the executor goes by, for every schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from collectives.execution.lowering import Cut, Leg, Reduction, legs_of
from collectives.schedules import ring
from collectives.schedules.registry import SCHEDULES, one_level
from collectives.schedules.schedule import Action, Step, Transfer
from collectives.schedules.topology import Topology

SIZES = [2, 3, 4, 5, 8]
SEGMENTS = (0, 3, 3, 50, 90, 91)


@pytest.mark.parametrize("numel", [91, 5, 1, 0])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_sent_is_received(name: str, size: int, numel: int) -> None:
    schedule = one_level(name, 1, Topology(size, size))
    segments = SEGMENTS if numel == 91 else None
    ways = [legs_of(schedule, rank, numel, segments=segments) for rank in range(size)]
    for number, legs in enumerate(zip(*ways, strict=True)):
        for rank, leg in enumerate(legs):
            assert leg.name == f"step {number} ({schedule.name})"
            for cut in leg.sends:
                assert 0 <= cut.low <= cut.high <= numel
                back = [c for c in legs[cut.peer].recvs if c.peer == rank]
                sent = [c for c in leg.sends if c.peer == cut.peer]
                assert [c.high - c.low for c in sent] == [c.high - c.low for c in back]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_reduced_lies_in_scratch_side_by_side(name: str, size: int) -> None:
    for rank in range(size):
        for leg in legs_of(one_level(name, 1, Topology(size, size)), rank, 91):
            staged = [cut for cut in leg.recvs if cut.staged]
            ends = [0, *(cut.high for cut in staged)]
            assert [cut.low for cut in staged] == ends[:-1]
            assert ends[-1] == leg.staged
            used = [n for each in leg.reductions for n in (*each.before, *each.after)]
            assert sorted(used) == [n for n, cut in enumerate(leg.recvs) if cut.staged]
            for reduction in leg.reductions:
                length = reduction.high - reduction.low
                for number in (*reduction.before, *reduction.after):
                    cut = leg.recvs[number]
                    assert cut.high - cut.low == length


def test_one_step_in_numbers() -> None:
    legs = legs_of(one_level("rechd", 1, Topology(2, 2)), 1, 7)
    assert legs[0] == Leg(
        name="step 0 (rechd)",
        sends=(Cut(0, 0, 4),),
        recvs=(Cut(0, 0, 3, staged=True),),
        staged=3,
        reductions=(Reduction((0,), (), 4, 7),),
        sent_first=True,
        group=(0, 1),
        phase=0,
    )
    assert legs[1].sends == (Cut(0, 4, 7),)
    assert legs[1].recvs == (Cut(0, 0, 4),)
    assert (legs[1].staged, legs[1].reductions) == (0, ())


def test_some_of_the_ranks() -> None:
    here, there = (
        legs_of(one_level("vhdd", 1, Topology(2, 2)), 1, 8, ranks=ranks) for ranks in ((4, 6), None)
    )
    for mine, other in zip(here, there, strict=True):
        members = {0: 4, 1: 6}
        assert [members[cut.peer] for cut in other.sends] == [cut.peer for cut in mine.sends]
        assert [members[cut.peer] for cut in other.recvs] == [cut.peer for cut in mine.recvs]
        assert tuple(members[rank] for rank in other.group) == mine.group


def test_given_bounds_and_whole_segments() -> None:
    bounds = [0, 1, 6, 6]
    leg = legs_of(ring.all_gather(3), 0, 6, bounds=bounds)[0]
    assert leg.sends == (Cut(1, 0, 1),)
    assert leg.recvs == (Cut(2, 6, 6),)

    line = one_level("xring", 2, Topology(2, 2), one_tree=True)
    assert line.whole_segments
    cuts = {
        end
        for rank in range(2)
        for leg in legs_of(line, rank, 91, segments=SEGMENTS)
        for cut in leg.sends
        for end in (cut.low, cut.high)
    }
    assert cuts <= set(SEGMENTS)


def test_a_call_that_repeats_finds_its_steps_made() -> None:
    schedule = one_level("rechd", 1, Topology(4, 4))
    assert legs_of(schedule, 2, 1000) is legs_of(schedule, 2, 1000)
    others = [legs_of(schedule, 1, 1000), legs_of(schedule, 2, 1001)]
    assert all(other != legs_of(schedule, 2, 1000) for other in others)


def test_ranges_that_come_twice_are_one_reduction() -> None:
    """Left to right: those LEFT in the order listed, the rank's own value, those RIGHT."""
    recvs = (
        Transfer(1, 0, 1, Action.REDUCE_RIGHT),
        Transfer(2, 0, 1, Action.REDUCE_LEFT),
        Transfer(3, 1, 2),
        Transfer(3, 0, 1, Action.REDUCE_LEFT),
    )
    base = one_level("rd", 1, Topology(4, 4))
    schedule = replace(base, chunks=2, steps=lambda rank: (Step(recvs=recvs),))
    (leg,) = legs_of(schedule, 0, 9)
    assert leg.reductions == (Reduction((1, 3), (0,), 0, 5),)
    assert leg.recvs[2] == Cut(3, 5, 9)
    assert [cut.low for cut in leg.recvs if cut.staged] == [0, 5, 10]
    assert leg.staged == 15
