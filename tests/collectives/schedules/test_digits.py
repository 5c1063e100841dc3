"""`direct` in levels: where it takes them, its proof, and what its messages cost."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import pytest

from collectives.schedules import digits, direct
from collectives.schedules.algorithm import Order
from collectives.schedules.digits import tables_by
from collectives.schedules.folding import Fold
from collectives.schedules.levels import schedule_of
from collectives.schedules.schedule import Schedule, sharded
from collectives.schedules.spec import AllReduceSpec
from collectives.schedules.symbolic_step import ScheduleError
from collectives.schedules.topology import Topology
from collectives.schedules.user_schedules import verified
from collectives.schedules.verify import verify
from tests.collectives.schedules.simulation import answers, cost, one_level, two_levels, with_step

DIRECT = AllReduceSpec("direct", 1, -1)


@pytest.fixture(autouse=True)
def _one_object_each() -> None:
    """Schedules are compared as objects: none is kept here that its maker has let go."""
    schedule_of.cache_clear()


def on_nodes(size: int, local: int) -> Schedule:
    return one_level("direct", 1, Topology(size, local), one_tree=True)


def all_levels(size: int) -> Iterator[Schedule]:
    """By any nodes, and of any size by the digits that many ranks have."""
    for local in (d for d in range(1, size + 1) if size % d == 0):
        yield on_nodes(size, local)
    yield digits.all_reduce(size, direct.radices_of(Fold(size).leaves))


@pytest.mark.parametrize(
    "sizes",
    [
        (*range(2, 18), 24, 32),
        pytest.param((*range(18, 24), *range(25, 32), *range(33, 65)), marks=pytest.mark.slow),
    ],
    ids=["quick", "rest"],
)
def test_levels_are_proved_for_every_size_and_all_nodes(sizes: tuple[int, ...]) -> None:
    for size in sizes:
        for schedule in {*all_levels(size)}:
            for each in (schedule, sharded(schedule, 2)):
                proof = verify(each)
                assert proof.carries_adasum and proof.one_tree and proof.by_tree


@pytest.mark.parametrize("size", [2, 4, 6, 8, 16, 17, 23, 32])
def test_levels_have_the_tree_of_one_level_and_of_vhdd(size: int) -> None:
    tree = Order.BALANCED.tree(range(size))
    for schedule in all_levels(size):
        assert answers(schedule) == [[tree] * schedule.chunks] * size


def test_nodes_of_powers_of_two_have_a_level_inside_and_others_none() -> None:
    assert on_nodes(16, 8) is digits.all_reduce(16, (8, 2))
    assert on_nodes(8, 2) is digits.all_reduce(8, (2, 4))
    assert on_nodes(64, 16) is digits.all_reduce(64, (4, 4, 4))
    assert on_nodes(1024, 8) is digits.all_reduce(1024, (8, 8, 4, 4))
    for size, local in ((8, 8), (16, 16), (16, 1), (12, 4), (12, 6), (6, 2), (15, 3)):
        assert on_nodes(size, local) is direct.all_reduce(size)
    # Of many ranks in any case.
    assert on_nodes(17, 17) is digits.all_reduce(17, (4, 4))
    assert on_nodes(24, 8) is digits.all_reduce(24, (4, 4))
    assert on_nodes(1024, 1) is digits.all_reduce(1024, (8, 8, 4, 4))


def test_operators_without_a_tree_or_of_all_ranks_at_once_have_one_level() -> None:
    for topology in (Topology(16, 8), Topology(32, 1)):
        one = direct.all_reduce(topology.size)
        assert schedule_of(DIRECT, topology) is one
        assert schedule_of(DIRECT, topology, one_tree=True, at_once=True) is one
        assert schedule_of(DIRECT, topology, one_tree=True) is not one


def test_radices_are_few_and_no_more_than_8() -> None:
    assert [direct.radices_of(1 << bits) for bits in range(8)] == [
        (),
        (2,),
        (4,),
        (8,),
        (4, 4),
        (8, 4),
        (8, 8),
        (8, 4, 4),
    ]
    for wrong in ((3, 2), (4, 4), (8, 1), (-2, -4)):
        with pytest.raises(ValueError, match="radices must be powers of two that make 8"):
            digits.all_reduce(9, wrong)


def test_two_nodes_exchange_whole_slices_and_tables_inside_alone() -> None:
    """5 groups of messages: slices and tables in the node, slices across, tables, the gather."""
    schedule = on_nodes(16, 8)
    for rank in range(16):
        node = tuple(range(rank // 8 * 8, rank // 8 * 8 + 8))
        inside, across, gather = schedule.steps(rank)
        assert inside.group == across.group == node
        assert not inside.digits and not across.digits
        assert [send.peer for send in across.sends] == [(rank + 8) % 16]
        assert {send.peer for send in (*inside.sends, *gather.sends)} == {*node} - {rank}
    costs = cost(schedule)
    assert costs.sent == costs.received == (Fraction(2 * 7, 8) + Fraction(1, 8),) * 16


@pytest.mark.parametrize(
    ("size", "radices"), [(64, (8, 8)), (32, (8, 4)), (16, (4, 4)), (16, (8, 2)), (8, (2, 2, 2))]
)
def test_levels_send_as_many_bytes_as_one(size: int, radices: tuple[int, ...]) -> None:
    costs, steps = cost(digits.all_reduce(size, radices)), 2 * len(radices) - (radices[-1] == 2)
    assert costs.steps == steps
    assert costs.sent == costs.received == (Fraction(2 * (size - 1), size),) * size
    assert costs.staged <= Fraction(size - 1, size)
    for rank in range(size):
        sends = [len(step.sends) for step in digits.all_reduce(size, radices).steps(rank)]
        assert sends[: len(radices)] == [radix - 1 for radix in radices]


def test_slices_of_a_64th_are_exchanged_whole() -> None:
    """A 64th of the buffer each: 3 of them are sent to either digit's ranks, and none come back."""
    costs = cost(digits.all_reduce(1024, (8, 8, 4, 4)))
    assert costs.steps == 6
    assert set(costs.sent) == {Fraction(2 * 63, 64) + 2 * Fraction(3, 64)}


def test_tables_travel_by_digits_between_more_than_8_ranks() -> None:
    assert [step.digits for step in digits.all_reduce(64, (8, 8)).steps(9)] == [(), (8, 8), (), ()]
    assert [step.digits for step in digits.all_reduce(8, (2, 4)).steps(3)] == [(), (), (), ()]
    assert tables_by((1, 16)) == tables_by((2, 1, 4)) == ()
    assert tables_by((2, 1, 8)) == (2, 8)
    for local in (1, 2, 8):
        schedule = two_levels("xring", 1, "direct", 1, Topology(9 * local, local), one_tree=True)
        (step,) = (step for step in schedule.steps(0) if step.tree)
        assert step.digits == (() if local == 1 else (local, 9))
        assert verify(schedule).carries_adasum


@pytest.mark.parametrize("wrong", [(8, 4), (64,), (8, 8, 8)])
def test_digits_that_do_not_number_their_group_are_found(wrong: tuple[int, ...]) -> None:
    schedule = digits.all_reduce(64, (8, 8))
    steps = {rank: tuple(schedule.steps(rank)) for rank in range(64)}
    for rank in range(64) if wrong != (64,) else (5,):
        schedule = with_step(schedule, rank, 1, steps[rank][1]._replace(digits=wrong))
    message = "ranks 0 and 5 name different trees" if wrong == (64,) else "do not number the 64"
    with pytest.raises(ScheduleError, match=message):
        verify(schedule)


def test_users_schedules_that_differ_in_digits_alone_are_others() -> None:
    schedule = digits.all_reduce(16, (4, 4))
    other = schedule
    for rank in range(16):
        step = tuple(schedule.steps(rank))[1]
        other = with_step(other, rank, 1, step._replace(digits=(2, 8)))
    one, two = (verified(each, 0, 16) for each in (schedule, other))
    assert one.digest != two.digest
    assert [step.digits for step in two.schedule.steps(0)][1] == (2, 8)


def test_digits_without_a_tree_are_found() -> None:
    schedule = one_level("vhdd", 1, Topology(2, 2))
    for rank in range(2):
        (step, _) = one_level("vhdd", 1, Topology(2, 2)).steps(rank)
        schedule = with_step(schedule, rank, 0, step._replace(digits=(2,)))
    with pytest.raises(ScheduleError, match="or there is no tree"):
        verify(schedule)


@pytest.mark.parametrize("schedule", [on_nodes(4, 2), on_nodes(8, 2)], ids=["2 x 2", "4 x 2"])
def test_every_lost_message_of_a_level_is_found(schedule: Schedule) -> None:
    for rank in range(schedule.size):
        for number, step in enumerate(schedule.steps(rank)):
            for side in ("sends", "recvs"):
                transfers = getattr(step, side)
                for i in range(len(transfers)):
                    kept = transfers[:i] + transfers[i + 1 :]
                    bad = with_step(schedule, rank, number, step._replace(**{side: kept}))
                    with pytest.raises(ScheduleError):
                        verify(bad)
