"""Sparse all-reduces, and sparse gradients in the optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import adasum as hvd
import collectives
from adasum import DistributedOptimizer
from adasum.sparse import sparse_all_reduce_async
from collectives import Group, default_group, run_threads
from tests.adasum.definition import relative_error, trajectory_tolerance
from tests.adasum.jobs import OPS


def draw(rank: int, shape: tuple[int, ...], sparse_dim: int, dtype: torch.dtype) -> Tensor:
    """3 * rank entries, some of them twice; small integers, whose sums are exact."""
    generator = torch.Generator().manual_seed(7 + rank)
    count = 3 * rank
    indices = [torch.randint(n, (count,), generator=generator) for n in shape[:sparse_dim]]
    values = torch.randint(-8, 9, (count, *shape[sparse_dim:]), generator=generator).to(dtype)
    where = torch.stack(indices) if indices else torch.empty(0, count).long()
    return torch.sparse_coo_tensor(where, 12 * values, shape, check_invariants=True)


CASES = [
    ((9, 4), 1, torch.float32),
    ((9, 4), 2, torch.float64),
    ((6,), 1, torch.int64),
    ((3, 4, 5), 2, torch.float16),
    ((3, 4, 5), 1, torch.bfloat16),
    ((1, 1), 2, torch.float32),
]


def every_case(rank: int) -> list[bytes]:
    size = hvd.size()
    group = default_group()
    said = []
    for shape, sparse_dim, dtype in CASES:
        total = sum(draw(r, shape, sparse_dim, dtype).to_dense().double() for r in range(size))
        mine = draw(rank, shape, sparse_dim, dtype)
        for op in (hvd.Sum, hvd.Average):
            if op is hvd.Average and not dtype.is_floating_point:
                continue
            handle = sparse_all_reduce_async(group, mine, op, "embedding")
            answer = handle.wait()
            assert handle.is_completed()
            assert answer.is_coalesced() and answer.dtype == dtype and answer.shape == shape
            assert answer.sparse_dim() == sparse_dim
            # Built as coalesced: what torch itself makes of the entries must be no other tensor.
            again = torch.sparse_coo_tensor(answer.indices(), answer.values(), shape).coalesce()
            assert torch.equal(again.indices(), answer.indices())
            assert torch.equal(again.values(), answer.values())
            # 12 divides by 2 and 3 and 4, so only the last rounding is left.
            want = (total / size if op is hvd.Average else total).to(dtype)
            assert torch.equal(answer.to_dense(), want)
            said.append(answer.values().contiguous().view(torch.uint8).numpy().tobytes())
        assert torch.equal(mine.to_dense(), draw(rank, shape, sparse_dim, dtype).to_dense())
    # No entries anywhere.
    none = torch.sparse_coo_tensor(size=(5, 2))
    assert sparse_all_reduce_async(group, none, hvd.Sum).wait().to_dense().abs().sum() == 0.0
    return said


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_sparse_all_reduce_on_threads_equals_the_dense_sum(size: int) -> None:
    first, *others = run_threads(size, lambda group: every_case(group.rank))
    assert all(other == first for other in others)


def test_sparse_all_reduce_in_any_order_of_arrival_adds_in_rank_order() -> None:
    """1e8 + 1 - 1e8 is 0 or 1 by the order; and a second run gives the same bits."""

    def run(group: Group) -> float:
        value = [1e8, 1.0, -1e8][group.rank]
        tensor = torch.sparse_coo_tensor([[3]], [value], (5,))
        return sparse_all_reduce_async(group, tensor, hvd.Sum).wait()[3].item()

    assert run_threads(3, run) == [float(torch.tensor(1e8) + 1.0) - 1e8] * 3


def test_sparse_allreduce_async_on_a_process_set_reduces_over_its_ranks() -> None:
    def run(group: Group) -> None:
        some = hvd.add_process_set([0, 2])
        tensor = torch.sparse_coo_tensor([[group.rank]], [1.0 + group.rank], (3,))
        if group.rank == 1:
            with pytest.raises(ValueError, match="rank 1 is not part"):
                hvd.sparse_allreduce_async(tensor, "e", hvd.Sum, some)
            return
        handle = hvd.sparse_allreduce_async(tensor, name="e", op=hvd.Average, process_set=some)
        assert handle().to_dense().tolist() == [0.5, 0.0, 1.5]

    run_threads(3, run)


def test_sparse_all_reduce_with_bad_arguments_raises() -> None:
    def run(group: Group) -> None:
        entry = torch.sparse_coo_tensor([[0]], [1.0], (3 + group.rank,))
        with pytest.raises(TypeError, match=r"sparse COO tensor, got torch\.strided"):
            sparse_all_reduce_async(group, torch.ones(2))
        with pytest.raises(NotImplementedError, match="Adasum of sparse"):
            sparse_all_reduce_async(group, entry, hvd.Adasum)
        with pytest.raises(hvd.CollectiveMismatchError, match=r"e \(3,\).*e \(4,\)"):
            sparse_all_reduce_async(group, entry, hvd.Sum, "e").wait()

    run_threads(2, run)


STEPS = 4


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("predivide", [1.0, 4.0])
def test_optimizer_with_sparse_gradients_equals_dense_ones(size: int, predivide: float) -> None:
    """Gathered or made dense, they train the same table."""

    def run(group: collectives.Group, op: Any, way: str) -> torch.Tensor:
        weights = torch.randn(7, 3, generator=torch.Generator().manual_seed(0)).double()
        table = torch.nn.Embedding.from_pretrained(weights, freeze=False, sparse=way != "dense")
        optimizer = DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=0.5),
            op=op,
            sparse_as_dense=way == "as dense",
            gradient_predivide_factor=predivide if op is hvd.Average else 1.0,
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            # One rank has no gradient in the last step.
            if step < STEPS - 1 or group.rank:
                table(torch.tensor([group.rank, 2, 2, step])).square().sum().backward()
            optimizer.step()
            if way == "sparse" and op is not hvd.Adasum:
                assert table.weight.grad.is_sparse
        return table.weight.detach().clone()

    for op in OPS.values():
        answers = {
            way: collectives.run_threads(size, lambda group, op=op, way=way: run(group, op, way))
            for way in ("dense", "as dense", "sparse")
        }
        for way, results in answers.items():
            assert all(torch.equal(result, results[0]) for result in results), (op, way)
            error = relative_error(results[0], answers["dense"][0])
            assert error <= trajectory_tolerance(STEPS), (op, way)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("by_closure", [False, True])
def test_sparse_as_dense_with_sparse_adam_steps_by_sparse_gradients(
    size: int, by_closure: bool
) -> None:
    """As without sparse_as_dense: rows without a gradient on any rank keep value and moments."""

    def run(group: collectives.Group, op: Any, as_dense: bool) -> torch.Tensor:
        weights = torch.randn(7, 3, generator=torch.Generator().manual_seed(0)).double()
        table = torch.nn.Embedding.from_pretrained(weights, freeze=False, sparse=True)
        optimizer = DistributedOptimizer(
            torch.optim.SparseAdam(list(table.parameters()), lr=0.1),
            op=op,
            sparse_as_dense=as_dense,
        )
        for step in range(STEPS):

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = table(torch.tensor([group.rank, 3, 3, 3 + step % 2])).square().sum()
                loss.backward()
                return loss

            if by_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
            assert table.weight.grad.is_sparse
        assert torch.equal(table.weight[5:], weights[5:])
        return table.weight.detach().clone()

    for op in OPS.values():
        ways = [
            collectives.run_threads(size, lambda group, op=op, each=each: run(group, op, each))
            for each in (False, True)
        ]
        assert all(torch.equal(each, ways[1][0]) for each in ways[1])
        assert relative_error(ways[1][0], ways[0][0]) <= trajectory_tolerance(STEPS), op


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("by_closure", [False, True])
def test_sparse_as_dense_with_an_optimizer_that_refuses_sparse_steps(
    size: int, by_closure: bool
) -> None:
    """On one rank, too."""

    def run(group: collectives.Group, op: Any, sparse: bool) -> torch.Tensor:
        weights = torch.randn(7, 3, generator=torch.Generator().manual_seed(0)).double()
        table = torch.nn.Embedding.from_pretrained(weights, freeze=False, sparse=sparse)
        optimizer = DistributedOptimizer(
            torch.optim.Adam(table.parameters()), op=op, sparse_as_dense=True
        )

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = table(torch.tensor([group.rank, 2])).square().sum()
            loss.backward()
            return loss

        for _ in range(STEPS):
            if by_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        return table.weight.detach().clone()

    for op in OPS.values():
        dense, sparse = (
            collectives.run_threads(size, lambda group, op=op, each=each: run(group, op, each))
            for each in (False, True)
        )
        assert relative_error(sparse[0], dense[0]) <= trajectory_tolerance(STEPS), op


def test_sparse_gradient_that_one_rank_lacks_at_first_names_sparse_as_dense() -> None:
    def reduce(rank: int) -> None:
        table = torch.nn.Embedding.from_pretrained(torch.ones(4, 2), freeze=False, sparse=True)
        optimizer: Any = DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1))
        if rank == 0:
            table(torch.tensor([1])).sum().backward()
        optimizer.synchronize()

    def run(group: collectives.Group) -> None:
        with pytest.raises(hvd.CollectiveMismatchError, match="without one needs sparse_as_dense"):
            reduce(group.rank)

    collectives.run_threads(2, run)
