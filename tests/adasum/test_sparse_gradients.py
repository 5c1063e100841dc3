"""The optimizer on sparse gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import adasum as hvd
import collectives
from adasum import DistributedOptimizer
from tests.adasum.definition import relative_error, trajectory_tolerance
from tests.adasum.jobs import OPS

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
