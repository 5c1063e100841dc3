"""How many ranks stand behind both operands of every reduction: said, derived and held equal."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from collectives.schedules import copying, ring
from collectives.schedules.registry import ORDERED, SCHEDULES
from collectives.schedules.schedule import Action, Collective, Schedule, Step, Transfer
from collectives.schedules.symbolic_step import ScheduleError
from collectives.schedules.topology import Topology
from collectives.schedules.verify import verify, with_leaves
from tests.collectives.schedules.simulation import one_level, silent, two_levels, with_step

COPY = Action.COPY


def schedules(size: int) -> Iterator[Schedule]:
    """Every algorithm, with one tree and without, in shards and on two levels."""
    for name in SCHEDULES:
        for one_tree in {False, name in ORDERED}:
            shards = 1 + size % 2 if size > 2 else 1
            yield one_level(name, shards, Topology(size, size), one_tree=one_tree)
    yield ring.scatter_gather(size).reduce(size // 2)
    yield ring.reduce_scatter(size)
    local = next((d for d in (3, 2, 4) if size % d == 0), 1)
    for inner, outer in (("xring", "rd"), ("rechd", "vhdd"), ("pscpu", "xring"), ("nccl", "rechd")):
        yield two_levels(inner, 1, outer, 1, Topology(size, local), one_tree=True)


def prove(size: int) -> None:
    for schedule in schedules(size):
        unsaid = silent(schedule)
        derived = verify(unsaid).leaves
        for rank in range(size):
            steps = list(schedule.steps(rank))
            said = tuple(tuple(recv.leaves for recv in step.recvs) for step in steps)
            assert said == derived[rank], (schedule, rank)
            assert list(with_leaves(unsaid).steps(rank)) == steps


@pytest.mark.parametrize("size", [*range(1, 9), 11, 12, 17])
def test_leaves_of_every_algorithm_are_those_that_verify_derives(size: int) -> None:
    prove(size)


def test_leaves_are_said_by_every_algorithm_to_64_ranks() -> None:
    """The other tests verify the algorithms of so many ranks, which proves what they say."""
    for size in range(1, 65):
        for schedule in schedules(size):
            for rank in {0, size // 2, size - 1}:
                for step in schedule.steps(rank):
                    assert all((r.action is COPY) == (r.leaves is None) for r in step.recvs)


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
