"""How many ranks stand behind both operands of every reduction: said, derived and held equal."""

from __future__ import annotations

import pytest

from collectives.schedules import copying
from collectives.schedules.schedule import Action, Collective, Schedule, Step, Transfer
from collectives.schedules.symbolic_step import ScheduleError
from collectives.schedules.topology import Topology
from collectives.schedules.verify import verify
from tests.collectives.schedules.simulation import one_level, with_step


def test_leaves_of_three_ranks_are_those_of_the_tree() -> None:
    """Rank 1 folds into rank 0, which then stands for two."""
    first, then = verify(one_level("rd", 1, Topology(3, 3))).leaves[0][:2]
    assert (first, then) == (((1, 1),), ((2, 1),))
    assert verify(one_level("rd", 1, Topology(3, 3))).leaves[2][1] == ((1, 2),)


def test_leaves_that_are_not_so_are_an_error() -> None:
    schedule = one_level("rd", 1, Topology(3, 3))
    step = list(schedule.steps(0))[1]
    wrong = step._replace(recvs=(step.recvs[0]._replace(leaves=(1, 1)),))
    message = (
        r"step 1: rank 0 says that \(1, 1\) ranks are combined in its value and rank 2's message, "
        r"not \(2, 1\)"
    )
    with pytest.raises(ScheduleError, match=message):
        verify(with_step(schedule, 0, 1, wrong))


def test_leaves_of_a_gathered_schedule_are_none() -> None:
    assert {found for step in verify(copying.bruck(5)).leaves[0] for found in step} == {None}


def test_leaves_that_differ_inside_a_message_carry_no_adasum() -> None:
    """Rank 1 sends chunk 0 of itself alone with chunk 1 of ranks 1 and 2."""
    steps = [
        [Step(), reduced(1, 0, 2, 0), reduced(2, 0, 1, 0)],
        [reduced(2, 1, 2, 1), Step(sends=(Transfer(0, 0, 2),)), Step()],
        [Step(sends=(Transfer(1, 1, 2),)), Step(), Step(sends=(Transfer(0, 0, 1),))],
    ]
    kind = Collective.REDUCE
    proof = verify(Schedule("uneven", 3, 2, kind, lambda r: steps[r], whole_segments=True))
    assert proof.leaves[0][1] == (None,)
    assert not proof.carries_adasum


def reduced(peer: int, start: int, stop: int, rank: int) -> Step:
    return Step(recvs=(Transfer(peer, start, stop, Action.REDUCE_RIGHT),), group=(rank,))
