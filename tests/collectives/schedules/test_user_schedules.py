"""`Group.run`: all-reduces that users write, verified, negotiated and run like any other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adasum import Adasum
from collectives import (
    Average,
    CollectiveMismatchError,
    Group,
    Sum,
    run_threads,
)
from collectives.schedules import copying, halving, ring
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


FINE = line(2)


def test_run_while_a_rank_has_joined_is_a_mismatch() -> None:
    def main(group: Group) -> None:
        if group.rank == 0:
            with pytest.raises(CollectiveMismatchError, match="while rank 0 has joined"):
                group.join()
        else:
            with pytest.raises(CollectiveMismatchError, match="while rank 0 has joined"):
                group.run(FINE, torch.ones(3))

    run_threads(2, main)
