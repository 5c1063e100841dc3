"""Process sets and process_set=, in threads and in real processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import adasum as hvd
from adasum.horovod.process_sets import group_of
from collectives import CollectiveMismatchError, Group, run_threads
from tests.adasum.definition import make_model


def test_process_set_before_and_after_adding_tells_its_state() -> None:
    shared = hvd.ProcessSet([2, 0])

    def run(group: Group) -> None:
        mine = group.rank != 1
        assert shared.ranks == [0, 2]
        assert (shared.process_set_id, shared.size(), shared.rank()) == (None, None, None)
        with pytest.raises(ValueError, match=r"ProcessSet\(ranks=\[0, 2\]\).*add_process_set"):
            hvd.barrier(process_set=shared)
        assert hvd.add_process_set(shared) is shared
        assert shared.included() == mine
        assert (shared.process_set_id, shared.size()) == (1, 2)
        if mine:
            assert shared.rank() == group.rank // 2
        else:
            with pytest.raises(ValueError, match="rank 1 is not part of ProcessSet"):
                shared.rank()
        same = hvd.add_process_set([0, 2])
        assert same.process_set_id == 1
        other = hvd.add_process_set([1])
        assert other.process_set_id == 2
        assert hvd.get_process_set_ids_and_ranks() == {0: [0, 1, 2], 1: [0, 2], 2: [1]}
        assert hvd.process_set_by_id(2).ranks == [1]
        whole = hvd.global_process_set
        assert hvd.process_set_by_id(0) is whole is hvd.add_process_set(whole)
        assert (whole.process_set_id, whole.ranks, whole.size()) == (0, [0, 1, 2], 3)
        assert whole.rank() == group.rank and whole.included() and group_of(whole) is group
        kept = group_of(shared)
        assert (kept is None) == (not mine)
        assert hvd.remove_process_set(same)
        assert kept is None or kept.closed
        assert shared.process_set_id is None
        assert not hvd.remove_process_set(shared)
        assert not hvd.remove_process_set(hvd.global_process_set)
        with pytest.raises(ValueError, match="number 1"):
            hvd.process_set_by_id(1)
        assert hvd.add_process_set(shared).process_set_id == 3

    run_threads(3, run)
    # Another world knows nothing of it.
    run_threads(3, lambda group: hvd.add_process_set([1, 2]))
    with pytest.raises(RuntimeError, match="init"):
        shared.included()


def test_process_set_with_bad_arguments_raises() -> None:
    for bad, error in (
        ([], ValueError),
        ([0, 0], ValueError),
        ([-1], ValueError),
        ([0.0], TypeError),
        (["0"], TypeError),
        (3, TypeError),
    ):
        with pytest.raises(error, match="ranks"):
            hvd.ProcessSet(bad)  # type: ignore[arg-type]

    def run(group: Group) -> None:
        with pytest.raises(ValueError, match="rank from 0 to 1"):
            hvd.add_process_set([0, 7])
        with pytest.raises(CollectiveMismatchError, match="ranks="):
            hvd.add_process_set([group.rank])
        hvd.init(process_sets=[hvd.ProcessSet([0]), [1]])
        first, second = (hvd.process_set_by_id(i) for i in (1, 2))
        with pytest.raises(CollectiveMismatchError, match="remove_process_set"):
            hvd.remove_process_set(first if group.rank else second)
        assert first.process_set_id == 1
        hvd.init(process_sets="dynamic")
        with pytest.raises(ValueError, match="rank 1 is not part of"):
            hvd.broadcast(torch.ones(1), 1, process_set=first)

    run_threads(2, run)


def every_function(rank: int) -> None:
    """Each of Horovod's functions among ranks 1 and 2 of three; each refuses rank 0."""
    pair = hvd.add_process_set([1, 2])
    mine = torch.full((2,), float(rank))
    # Adasum of parallel vectors is their average.
    average, two, both = torch.full((2,), 1.5), torch.full((2,), 2.0), torch.tensor([1.0, 2.0])
    sparse, some = mine.to_sparse(), {"process_set": pair}
    calls: list[tuple[Callable[[], Any], Any]] = [
        (lambda: hvd.allreduce(mine, **some), average),
        (lambda: hvd.allreduce(mine, op=hvd.Adasum, **some), average),
        (lambda: hvd.allreduce_async(mine, **some).wait(), average),
        (lambda: hvd.allreduce_(mine.clone(), **some), average),
        (lambda: hvd.allreduce_async_(mine.clone(), **some).wait(), average),
        (lambda: hvd.grouped_allreduce([mine], **some)[0], average),
        (lambda: hvd.grouped_allreduce_async([mine], **some).wait()[0], average),
        (lambda: hvd.grouped_allreduce_([mine.clone()], **some)[0], average),
        (lambda: hvd.allgather(mine, **some)[1:3], both),
        (lambda: hvd.allgather_async(mine, **some).wait()[1:3], both),
        (lambda: hvd.broadcast(mine, 2, **some), two),
        (lambda: hvd.broadcast_async(mine, 2, **some).wait(), two),
        (lambda: hvd.broadcast_(mine.clone(), 2, **some), two),
        (
            lambda: hvd.sparse_allreduce_async(sparse, "e", hvd.Average, **some)().to_dense(),
            average,
        ),
        (lambda: hvd.barrier(**some), None),
        (lambda: hvd.broadcast_object(rank, 2, **some), 2),
        (lambda: hvd.allgather_object(rank, **some), [1, 2]),
        (lambda: hvd.broadcast_parameters([mine.clone()], 2, pair), None),
    ]
    model = make_model(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank))
    for number, (call, want) in enumerate(calls):
        if rank == 0:
            with pytest.raises(ValueError, match=r"rank 0 is not part of .*ranks=\[1, 2\]"):
                call()
            continue
        answer = call()
        if isinstance(answer, torch.Tensor):
            assert torch.equal(answer, want), number
        else:
            assert answer == want, number
    if rank:
        hvd.broadcast_optimizer_state(optimizer, 2, process_set=pair)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.3)
    # The others' calls are not disturbed, nor is a set's use beside the global one's.
    work = [hvd.allreduce_async(torch.ones(9), name=f"w{i}", op=hvd.Sum) for i in range(3)]
    if rank:
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=pair).item() == 2.0
    assert [hvd.synchronize(each)[0].item() for each in work] == [3.0] * 3


def test_every_function_on_a_process_set_of_threads_is_right() -> None:
    run_threads(3, lambda group: every_function(group.rank))


def test_process_set_across_hosts_has_its_own_local_ranks() -> None:
    def run(group: Group) -> tuple[int, int, bool]:
        return hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()

    want = [(0, 2, True), (0, 2, True), (1, 2, True), (1, 2, True)]
    assert run_threads(4, run, local_size=2) == want

    def uneven(group: Group) -> tuple[int, int, int, bool]:
        group.hosts = (4, 9, 9, 4, 4)
        group.local_rank = (0, 0, 1, 1, 2)[group.rank]
        return group.local_rank, hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()

    assert run_threads(5, uneven) == [
        (0, 0, 2, False),
        (0, 1, 2, False),
        (1, 1, 2, False),
        (1, 0, 2, False),
        (2, 0, 1, False),
    ]
