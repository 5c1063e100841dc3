"""Errors of a group that was split name the ranks as the whole group numbers them."""

from __future__ import annotations

import re
import threading

import pytest
import torch

from collectives import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    Group,
    TransportError,
    run_threads,
)
from tests.collectives.consistency.ranks import everywhere, run

# Of four ranks; in the part they are 0 and 1, and again in the part of that.
MEMBERS = (3, 1, 2)


def split(group: Group) -> Group | None:
    return group.split(MEMBERS)


@everywhere
def test_mismatch_in_a_split_names_global_ranks_and_the_group(way: str) -> None:
    def job(group: Group) -> str | None:
        part = split(group)
        if part is None:
            return None
        with pytest.raises(CollectiveMismatchError) as caught:
            part.all_reduce(torch.ones(2 if group.rank == 2 else 3))
        part.barrier()
        return str(caught.value)

    first, *said = run(way, 4, job)
    assert first is None and len({*said}) == 1
    assert said[0] == (
        "ranks disagree in the group of ranks 3, 1, 2: rank 3 calls all_reduce() with tensor 0: "
        "shape (3,) torch.float32 cpu, rank 2 calls all_reduce() with tensor 0: shape (2,) "
        "torch.float32 cpu"
    )


@everywhere
def test_timeout_in_a_nested_split_names_global_ranks_and_the_group(way: str) -> None:
    waited = threading.Event()

    def job(group: Group) -> str | None:
        part = split(group)
        inner = part.split([2, 0]) if part is not None else None
        if inner is None:
            return None
        assert inner.ranks == (2, 3)
        inner.barrier()
        if group.rank == 3:
            assert waited.wait(30.0)
            return None
        with pytest.raises(CollectiveTimeoutError) as caught:
            inner.all_reduce(torch.ones(3))
        waited.set()
        return str(caught.value)

    _, _, said, _ = run(way, 4, job, timeout=1.0)
    assert said is not None and "(call 1 of ranks 2, 3)" in said
    assert {int(rank) for rank in re.findall(r"\brank (\d+)", said)} == {2, 3}, said


@everywhere
def test_end_of_a_rank_of_a_split_names_its_global_rank(way: str) -> None:
    def job(group: Group) -> str | None:
        part = split(group)
        if part is None or group.rank == 1:
            if part is not None:
                part.close()
            return None
        with pytest.raises((CollectiveTimeoutError, TransportError)) as caught:
            part.all_reduce(torch.ones(3))
        return str(caught.value)

    said = [each for each in run(way, 4, job, timeout=5.0) if each is not None]
    assert len(said) == 2
    for each in said:
        # The second one to notice may hear of it from the first.
        named = {int(rank) for rank in re.findall(r"\brank (\d+)", each)}
        assert named <= {1, 2, 3} and 1 in named, each


def test_ranks_of_a_group_are_those_of_the_whole() -> None:
    def job(group: Group) -> None:
        assert group.ranks == (0, 1, 2, 3)
        part = split(group)
        if part is not None:
            assert part.ranks == MEMBERS
            assert repr(part) == f"Group(rank={part.rank}, size=3 of ranks 3, 1, 2)"

    run_threads(4, job)
