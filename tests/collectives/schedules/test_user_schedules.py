"""`Group.run`: all-reduces that users write, verified, negotiated and run like any other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import repeat
from typing import Any

import pytest
import torch

from adasum import Adasum
from collectives import (
    Average,
    Collective,
    CollectiveMismatchError,
    Group,
    Step,
    Sum,
    Transfer,
    run_threads,
)
from collectives.schedules import copying, halving, ring
from collectives.schedules.schedule import IDLE
from tests.collectives.consistency.ranks import everywhere, run
from tests.frozen.calls import line

# What a specification names, run as if a user had written it.
KNOWN = {
    "rd": halving.doubling,
    "rechd": halving.all_reduce,
    "bruck": copying.bruck,
    "xring": ring.all_reduce,
}


def draw(rank: int, numel: int = 1021) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


@everywhere
@pytest.mark.parametrize("name", KNOWN)
def test_run_of_a_known_algorithms_schedule_has_its_bits(way: str, name: str) -> None:
    segments = (0, 7, 7, 500, 1021)

    def job(group: Group) -> None:
        schedule = KNOWN[name](group.size)
        for op in (Sum, Average) if name == "xring" else (Sum, Average, Adasum):
            named, own = draw(group.rank), draw(group.rank)
            options: Any = {"segments": segments, "prescale": 0.5, "postscale": 3.0}
            group.all_reduce(named, op, algorithm=name, **options)
            assert group.run(schedule, own, op, **options) is own
            assert torch.equal(own, named)

    run(way, 3, job)


def never_ending(rank: int) -> Iterator[Step]:
    while True:
        yield IDLE


class Unhashable:
    """Steps of an object with an equality of its own."""

    def __eq__(self, other: object) -> bool:
        return self is other

    def __call__(self, rank: int) -> list[Step]:
        return []


FINE = line(2)
BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "no all-reduce": (
        replace(FINE, collective=Collective.BROADCAST),
        ValueError,
        "schedule must be an all-reduce",
    ),
    "for ever": (replace(FINE, steps=never_ending), ValueError, "rank 0 has more than 65536 steps"),
    "no step": (replace(FINE, steps=lambda rank: [None]), TypeError, "step 0 must be a Step"),
    "no transfer": (
        replace(FINE, steps=lambda rank: [Step(sends=((1, 0, 1),))]),
        TypeError,
        "step 0: a message must be a Transfer, got tuple",
    ),
    "no rank": (
        replace(FINE, steps=lambda rank: [Step(sends=(Transfer("1", 0, 1),))]),
        TypeError,
        "step 0: 'str' object",
    ),
    "no action": (
        replace(FINE, steps=lambda rank: [Step(recvs=(Transfer(1, 0, 1, "copy"),))]),
        TypeError,
        "action must be an Action",
    ),
    "messages for ever": (
        replace(FINE, steps=lambda rank: [Step(sends=repeat(Transfer(1 - rank, 0, 1)))]),
        ValueError,
        "rank 0 has more than 131072 messages",
    ),
    "ranks of a group for ever": (
        replace(FINE, steps=lambda rank: [Step(group=repeat(rank))]),
        ValueError,
        "group",
    ),
    "no hash": (replace(FINE, steps=Unhashable()), TypeError, r"schedule\.steps must have a hash"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_schedule_raises_before_anything_is_sent(case: str) -> None:
    schedule, error, text = BAD[case]

    def main(group: Group) -> float:
        tensor = torch.ones(3)
        with pytest.raises(error, match=text):
            group.run(schedule, tensor)
        assert tensor.eq(1).all()
        group.run(FINE, tensor)
        return tensor[0].item()

    start = time.monotonic()
    assert run_threads(2, main, timeout=30.0) == [2.0, 2.0]
    # No rank has waited for the other until the timeout.
    assert time.monotonic() - start < 30.0


def test_run_while_a_rank_has_joined_is_a_mismatch() -> None:
    def main(group: Group) -> None:
        if group.rank == 0:
            with pytest.raises(CollectiveMismatchError, match="while rank 0 has joined"):
                group.join()
        else:
            with pytest.raises(CollectiveMismatchError, match="while rank 0 has joined"):
                group.run(FINE, torch.ones(3))

    run_threads(2, main)
