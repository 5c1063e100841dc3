"""A mismatch as its user sees it: the only error of its traceback, and in the user's words."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import adasum as hvd
import collectives
from collectives import CollectiveMismatchError, Group
from tests.collectives.consistency.ranks import everywhere, run


def differing_model(rank: int) -> nn.Module:
    """Its last layer has another width on each rank."""
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2 + rank))


def step(rank: int, compression: type) -> None:
    model = differing_model(rank)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression=compression,
        groups=[list(model.parameters())],
        # Else the comparison of parameters finds it first.
        check_parameters=False,
    )
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


USES = {
    "allreduce": (
        lambda rank: hvd.allreduce(torch.ones(2 + rank), name="loss"),
        "rank 0 calls all_reduce(loss) with tensor 0: shape (2,)",
    ),
    "allreduce_": (
        lambda rank: hvd.allreduce_(torch.ones(2 + rank), name="loss"),
        "rank 0 calls all_reduce(loss) with tensor 0: shape (2,)",
    ),
    "grouped_allreduce": (
        lambda rank: hvd.grouped_allreduce([torch.ones(2)] * (1 + rank), name="loss"),
        "rank 0 calls grouped_all_reduce(loss) with 1 tensor, rank 1 calls "
        "grouped_all_reduce(loss) with 2 tensors, among them tensor 1: shape (2,)",
    ),
    "optimizer": (
        lambda rank: step(rank, hvd.Compression.none),
        "with 1.weight: shape (2, 3) torch.float32 cpu, rank 1",
    ),
    "compressing optimizer": (
        lambda rank: step(rank, hvd.Compression.bf16),
        "with 1.weight: shape (2, 3) torch.bfloat16 cpu, rank 1",
    ),
}


@pytest.mark.parametrize("use", USES)
def test_mismatch_is_told_in_the_words_of_the_call(use: str) -> None:
    call, text = USES[use]

    def job(group: Group) -> str:
        with pytest.raises(CollectiveMismatchError) as caught:
            call(group.rank)
        return str(caught.value)

    for said in collectives.run_threads(2, job):
        assert text in said


def train_with_metric(
    rank: int,
    *,
    first: int,
    process_set: hvd.ProcessSet | None = None,
    pause: float = 0.0,
    **options: object,
) -> list[float]:
    """Steps in which rank `first` starts its metric before backward, and the others behind it.

    It computes for `pause` seconds in between, in which its metric may have failed already.
    """
    model = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        **options,  # type: ignore[arg-type]
    )
    seen = []
    for _ in range(3):

        def metric(value: float) -> hvd.Handle:
            tensor = torch.tensor([value])
            return hvd.allreduce_async(tensor, name="metric", op=hvd.Sum, process_set=process_set)

        optimizer.zero_grad()
        loss = model(torch.ones(1, 3)).sum()
        if rank == first:
            handle = metric(loss.item())
            time.sleep(pause)
        loss.backward()
        if rank != first:
            handle = metric(loss.item())
        optimizer.step()
        seen.append(hvd.synchronize(handle).item())
    return seen


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("pause", [0.0, 0.3])
@pytest.mark.parametrize("options", [{}, {"check_parameters": False}, {"num_groups": 1}], ids=str)
def test_metric_that_ranks_start_at_different_places_is_what_the_error_names(
    first: int, pause: float, options: dict[str, object]
) -> None:
    """On every rank, and no call of the library's own, of which the user knows nothing."""

    def job(group: Group) -> str:
        with pytest.raises(CollectiveMismatchError) as caught:
            train_with_metric(group.rank, first=first, pause=pause, **options)  # type: ignore[arg-type]
        return str(caught.value)

    said, other = collectives.run_threads(2, job)
    assert said == other
    assert f"rank {first} calls all_reduce(metric)" in said
    assert "start it at the same place on every rank" in said
    assert "check" not in said


@everywhere
def test_named_asynchronous_call_that_meets_another_kind_is_named_first(way: str) -> None:
    def job(group: Group) -> str:
        if group.rank == 1:
            work = group.all_reduce(torch.ones(3), name="metric", async_op=True)
        with pytest.raises(CollectiveMismatchError) as caught:
            group.barrier("epoch") if group.rank != 1 else work.wait()
        return str(caught.value)

    said = {*run(way, 3, job)}
    assert said == {
        "ranks disagree: rank 1 calls all_reduce(metric), and rank 0 makes another call, a "
        "barrier: all_reduce(metric) was started at another place among the calls; start it at "
        "the same place on every rank, as before backward() on all or behind it on all, or in a "
        "group of its own (Group.split, or a process set)"
    }
