"""An all-reduce that is not sent back: who holds what then."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from collectives.schedules import digits, direct, ring
from collectives.schedules.reduced_slices import reduced_slices
from collectives.schedules.registry import SCHEDULES
from collectives.schedules.schedule import Schedule, steps_of
from collectives.schedules.topology import Topology
from tests.collectives.schedules.simulation import answers, one_level

SIZES = (2, 3, 4, 5, 7, 8, 12, 16)


def check(schedule: Schedule) -> int:
    """The holders have the whole schedule's answers; return how many steps are left out."""
    count, holders = reduced_slices(schedule)
    begun = replace(schedule, steps=lambda rank: steps_of(schedule, rank)[:count])
    whole, found = answers(schedule), answers(begun)
    edges = [0, *(stop for _, stop, _ in holders)]
    assert [held[:2] for held in holders] == list(pairwise(edges))
    assert edges[-1] == schedule.chunks
    for start, stop, ranks in holders:
        assert ranks
        for rank in ranks:
            assert found[rank][start:stop] == whole[0][start:stop]
    return len(steps_of(schedule, 0)) - count


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_holders_have_the_result_of_every_algorithm(name: str, size: int) -> None:
    check(one_level(name, 1, Topology(size, size)))


@pytest.mark.parametrize("radices", [(2, 2), (4, 2), (2, 4, 2), (8, 8, 2), (4, 8)], ids=str)
def test_levels_end_before_they_send_back(radices: tuple[int, ...]) -> None:
    leaves = digits.prod(radices)
    for size in (leaves, leaves + 1):
        # A last digit of 2 leaves both ranks with the result: it has no step back.
        back = len(radices) - (radices[-1] == 2) + (size > leaves)
        assert check(digits.all_reduce(size, radices)) == back


def test_what_is_left_out_is_the_gather_or_nothing() -> None:
    assert reduced_slices(direct.all_reduce(3)) == (1, ((0, 1, (0,)), (1, 2, (1,)), (2, 3, (2,))))
    everyone = (0, 4, (0, 1, 2, 3))
    # Whose results are made one by one, and whose chunks are whole segments.
    for schedule in (ring.all_reduce(4), one_level("psgpu", 4, Topology(4, 4))):
        count, holders = reduced_slices(schedule)
        assert count <= len(steps_of(schedule, 0))
        assert holders[0][2] == everyone[2] or len(holders) > 1
