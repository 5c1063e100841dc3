"""Schedules are verified for all ranks at once, and the verifier finds faults."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from collectives.schedules import copying, halving, ring
from collectives.schedules.registry import ORDERED, SCHEDULES
from collectives.schedules.schedule import (
    IDLE,
    Action,
    Collective,
    Schedule,
    Step,
    Transfer,
    sharded,
)
from collectives.schedules.symbolic_step import ScheduleError
from collectives.schedules.topology import Topology
from collectives.schedules.verify import verify
from tests.collectives.schedules.simulation import one_level

# A proof of a ring takes size³ operations, the others size² log size.
QUICK = (*range(1, 25), 31, 32, 33, 64)
RINGS = pytest.mark.parametrize(
    "sizes",
    [QUICK, pytest.param(sorted({*range(1, 65)} - {*QUICK}), marks=pytest.mark.slow)],
    ids=["quick", "rest"],
)


@RINGS
@pytest.mark.parametrize("name", SCHEDULES)
def test_all_reduce_is_proved_for_every_size(name: str, sizes: Sequence[int]) -> None:
    """With an operator that needs one tree to 16 ranks; the line of larger rings has a test."""
    for size in sizes:
        assert verify(one_level(name, 1, Topology(size, size))).phases == (size > 1)
        if size <= 16 and name in ORDERED:
            schedule = one_level(name, 1, Topology(size, size), one_tree=True)
            assert verify(schedule).carries_adasum


@RINGS
def test_other_collectives_are_proved_for_every_size(sizes: Sequence[int]) -> None:
    for size in sizes:
        assert verify(ring.reduce_scatter(size)).steps == size - 1
        assert verify(ring.all_gather(size)).steps == size - 1
        for root in {0, size // 2, size - 1}:
            assert verify(copying.broadcast(size, root)).steps == (size - 1).bit_length()
    assert verify(copying.broadcast(1000, 7)).steps == 10


def _pair(steps: dict[int, list[Any]], chunks: int = 1) -> Schedule:
    return Schedule("made up", 2, chunks, Collective.ALL_REDUCE, lambda rank: steps[rank])


@pytest.mark.parametrize(
    ("steps", "chunks", "message"),
    [
        ({0: [IDLE], 1: [IDLE]}, 1, "misses the contribution of rank 1"),
        ({0: [IDLE], 1: []}, 1, "rank 1 has no step"),
        ({0: [Step(sends=(Transfer(0, 0, 1),))], 1: [IDLE]}, 1, "as its peer"),
        ({0: [Step(sends=(Transfer(1, 0, 2),))], 1: [IDLE]}, 1, r"chunks \[0, 2\) of 1"),
        (
            {
                0: [Step(sends=(Transfer(1, 0, 1),))],
                1: [Step(recvs=(Transfer(0, 1, 2, Action.REDUCE_LEFT),))],
            },
            2,
            r"expects \[1, 2\)",
        ),
        (
            {
                0: [Step(sends=(Transfer(1, 0, 1),), recvs=(Transfer(1, 0, 1),))],
                1: [Step(sends=(Transfer(0, 0, 1),), recvs=(Transfer(0, 0, 1),))],
            },
            1,
            "receives into chunks it is sending",
        ),
        (
            {
                r: [
                    Step(
                        sends=(Transfer(1 - r, 0, 1),),
                        recvs=(Transfer(1 - r, 0, 1, Action.REDUCE_LEFT),),
                    )
                ]
                for r in range(2)
            },
            1,
            "another order",
        ),
        (
            {
                r: [
                    Step(
                        sends=(Transfer(1 - r, 0, 1),),
                        recvs=(
                            Transfer(1 - r, 0, 1, Action.REDUCE_LEFT if r else Action.REDUCE_RIGHT),
                        ),
                    )
                ]
                * 2
                for r in range(2)
            },
            1,
            "the contribution of rank 0-1 is counted twice",
        ),
        ({0: [(Transfer(1, 0, 1),)], 1: [IDLE]}, 1, "rank 0 must yield a Step, got tuple"),
        ({0: [IDLE], 1: [Step(recvs=[0])]}, 1, "rank 1 must send and receive .* got 0"),
        (
            {0: [Step((Transfer(1, 0, 1),))], 1: [Step((), (Transfer(0, 0, 1, "copy"),))]},
            1,
            "must send and receive tuples of Transfers, each with an Action, got .*'copy'",
        ),
    ],
)
def test_faults_are_named(steps: dict[int, list[Any]], chunks: int, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        verify(_pair(steps, chunks))


@pytest.mark.parametrize("chunks", [2**20 + 1, 2**40])
def test_schedule_of_too_many_chunks_is_refused_before_there_is_memory_for_them(
    chunks: int,
) -> None:
    with pytest.raises(ValueError, match="chunks must be at most 1048576, made up has"):
        _pair({}, chunks)


def test_verification_of_more_chunks_than_can_be_held_is_refused() -> None:
    schedule = Schedule("large", 64, 2**20, Collective.ALL_REDUCE, lambda rank: [])
    with pytest.raises(ScheduleError, match=r"262144 are the most"):
        verify(schedule)


def test_verification_of_many_messages_costs_no_square_of_them() -> None:
    """Comparing each with each takes a minute."""
    start = time.monotonic()
    assert verify(sharded(halving.doubling(2), 20_000)).steps == 1
    assert time.monotonic() - start < 20.0
