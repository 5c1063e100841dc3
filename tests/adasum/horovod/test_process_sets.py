"""Process sets and process_set=, in threads and in real processes."""

from __future__ import annotations

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
        assert hvd.process_set_by_id(0) is hvd.global_process_set
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


def test_global_process_set_has_all_ranks() -> None:
    def run(group: Group) -> None:
        whole = hvd.global_process_set
        assert whole.ranks == [0, 1]
        assert (whole.process_set_id, whole.size(), whole.rank()) == (0, 2, group.rank)
        assert whole.included()
        assert group_of(whole) is group_of(None) is group
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=whole).item() == 2.0
        assert hvd.add_process_set(whole) is whole

    run_threads(2, run)


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
    calls = {
        "allreduce": lambda: hvd.allreduce(mine, process_set=pair),
        "allreduce adasum": lambda: hvd.allreduce(mine, op=hvd.Adasum, process_set=pair),
        "allreduce_async": lambda: hvd.allreduce_async(mine, process_set=pair).wait(),
        "allreduce_": lambda: hvd.allreduce_(mine.clone(), process_set=pair),
        "allreduce_async_": lambda: hvd.allreduce_async_(mine.clone(), process_set=pair).wait(),
        "grouped_allreduce": lambda: hvd.grouped_allreduce([mine], process_set=pair)[0],
        "grouped_allreduce_async": lambda: hvd.grouped_allreduce_async(
            [mine], process_set=pair
        ).wait()[0],
        "grouped_allreduce_": lambda: hvd.grouped_allreduce_([mine.clone()], process_set=pair)[0],
        "allgather": lambda: hvd.allgather(mine, process_set=pair)[1:3],
        "allgather_async": lambda: hvd.allgather_async(mine, process_set=pair).wait()[1:3],
        "broadcast": lambda: hvd.broadcast(mine, 2, process_set=pair),
        "broadcast_async": lambda: hvd.broadcast_async(mine, 2, process_set=pair).wait(),
        "broadcast_": lambda: hvd.broadcast_(mine.clone(), 2, process_set=pair),
        "barrier": lambda: hvd.barrier(process_set=pair),
        "broadcast_object": lambda: hvd.broadcast_object(rank, 2, process_set=pair),
        "allgather_object": lambda: hvd.allgather_object(rank, process_set=pair),
        "broadcast_parameters": lambda: hvd.broadcast_parameters([mine.clone()], 2, pair),
    }
    # Adasum of parallel vectors is their average.
    average, two = torch.full((2,), 1.5), torch.full((2,), 2.0)
    answers = {
        **dict.fromkeys([name for name in calls if "allreduce" in name], average),
        **dict.fromkeys(["allgather", "allgather_async"], torch.tensor([1.0, 2.0])),
        **dict.fromkeys(["broadcast", "broadcast_async", "broadcast_"], two),
        "barrier": None,
        "broadcast_object": 2,
        "allgather_object": [1, 2],
        "broadcast_parameters": None,
    }
    model = make_model(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank))
    for name, call in calls.items():
        if rank == 0:
            with pytest.raises(ValueError, match=r"rank 0 is not part of .*ranks=\[1, 2\]"):
                call()
            continue
        answer = call()
        if isinstance(answer, torch.Tensor):
            torch.testing.assert_close(answer, answers[name], rtol=0.0, atol=0.0)
        else:
            assert answer == answers[name], name
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
