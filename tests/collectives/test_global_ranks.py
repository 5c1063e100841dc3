"""Errors of a group that was split name the ranks as the whole group numbers them."""

from __future__ import annotations

import logging
import re
import threading
import time

import pytest
import torch

import adasum
import collectives.stall
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


def test_abort_of_a_split_names_the_global_rank() -> None:
    def job(group: Group) -> str | None:
        part = split(group)
        if part is None:
            return None
        if group.rank == 2:
            part.abort("enough")
            return None
        with pytest.raises((CollectiveTimeoutError, TransportError)) as caught:
            part.barrier()
        return str(caught.value)

    said = [each for each in run_threads(4, job) if each is not None]
    assert len(said) == 2 and all("rank 2 called abort(): enough" in each for each in said)


@everywhere
def test_stall_warning_of_a_split_names_global_ranks(
    way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(collectives.stall, "warning_seconds", lambda: 0.3)

    def job(group: Group) -> None:
        part = split(group)
        if part is None:
            return
        part.barrier()
        if group.rank == 2:
            deadline = time.monotonic() + 30.0
            while not warnings() and time.monotonic() < deadline:
                time.sleep(0.02)
        part.barrier()

    def warnings() -> list[str]:
        said = [record.getMessage() for record in [*caplog.records]]
        return [each for each in said if "has waited" in each and "of ranks 3, 1, 2" in each]

    with caplog.at_level(logging.WARNING):
        run(way, 4, job)
    said = warnings()
    assert said
    assert all(re.match(r"rank [13] has waited [\d.]+ s for rank [123]", each) for each in said)


def test_process_set_names_global_ranks() -> None:
    def job(group: Group) -> str | None:
        members = adasum.add_process_set([1, 3])
        if not members.included():
            return None
        with pytest.raises(CollectiveMismatchError) as caught:
            adasum.allreduce(torch.ones(group.rank), name="loss", process_set=members)
        with pytest.raises(TypeError, match="rank 3: an object of function"):
            adasum.allgather_object(
                (lambda: None) if group.rank == 3 else 1,
                process_set=members,
            )
        return str(caught.value)

    _, *said = [each for each in run_threads(4, job) if each is not None]
    assert all(
        each.startswith("ranks disagree in the group of ranks 1, 3: rank 1 calls all_reduce(loss)")
        and ", rank 3 calls " in each
        for each in said
    )


def test_ranks_of_a_group_are_those_of_the_whole() -> None:
    def job(group: Group) -> None:
        assert group.ranks == (0, 1, 2, 3)
        part = split(group)
        if part is not None:
            assert part.ranks == MEMBERS
            assert repr(part) == f"Group(rank={part.rank}, size=3 of ranks 3, 1, 2)"

    run_threads(4, job)
