"""Sparse all-reduces, and sparse gradients in the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import adasum as hvd
from adasum import DistributedOptimizer
from adasum.sparse import sparse_all_reduce_async
from collectives import Group, default_group, run_threads
from tests.adasum.definition import relative_error, trajectory_tolerance
from tests.adasum.jobs import OPS, on_ranks


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


@on_ranks(2)
def test_sparse_all_reduce_with_bad_arguments_raises(group: Group) -> None:
    entry = torch.sparse_coo_tensor([[0]], [1.0], (3 + group.rank,))
    with pytest.raises(TypeError, match=r"sparse COO tensor, got torch\.strided"):
        sparse_all_reduce_async(group, torch.ones(2))
    with pytest.raises(NotImplementedError, match="Adasum of sparse"):
        sparse_all_reduce_async(group, entry, hvd.Adasum)
    with pytest.raises(hvd.CollectiveMismatchError, match=r"e \(3,\).*e \(4,\)"):
        sparse_all_reduce_async(group, entry, hvd.Sum, "e").wait()


STEPS = 4


WEIGHTS = torch.randn(7, 3, generator=torch.Generator().manual_seed(0)).double()
Rows = Callable[[int, int], list[int]]


def trained(
    group: Group, make: Any, rows: Rows, *, sparse: bool, by_closure: bool = False, **options: Any
) -> Tensor:
    """Train a table by the rows that each rank looks up in each step, if there are any."""
    table = torch.nn.Embedding.from_pretrained(WEIGHTS.clone(), freeze=False, sparse=sparse)
    optimizer: Any = DistributedOptimizer(make(list(table.parameters())), **options)

    def closure(step: int) -> Any:
        optimizer.zero_grad()
        wanted = rows(group.rank, step)
        loss = table(torch.tensor(wanted, dtype=torch.int64)).square().sum()
        if wanted:
            loss.backward()
        return loss

    for step in range(STEPS):
        if by_closure:
            optimizer.step(partial(closure, step))
        else:
            closure(step)
            optimizer.step()
        # Made dense they are for optimizers that take no others.
        if sparse and "sparse_as_dense" not in options and options["op"] is not hvd.Adasum:
            assert table.weight.grad.is_sparse
    return table.weight.detach().clone()


def compare(
    size: int, make: Any, rows: Rows, ways: list[dict[str, Any]], ops: Any = OPS, **options: Any
) -> None:
    """All ranks end with the same table, and by each way with nearly that of the first."""
    for op in map(OPS.get, ops):
        answers = []
        for way in ways:
            run = partial(trained, make=make, rows=rows, op=op, **way, **options)
            results = run_threads(size, run)
            assert all(torch.equal(result, results[0]) for result in results), (op, way)
            answers.append(results[0])
        for answer in answers[1:]:
            assert relative_error(answer, answers[0]) <= trajectory_tolerance(STEPS), op


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("predivide", [1.0, 4.0])
def test_optimizer_with_sparse_gradients_equals_dense_ones(size: int, predivide: float) -> None:
    """Gathered or made dense, they train the same table; one rank has none in the last step."""
    options = {} if predivide == 1.0 else {"gradient_predivide_factor": predivide}
    ways = [{"sparse": False}, {"sparse": False, **options}]
    ways += [{"sparse": True, "sparse_as_dense": True, **options}, {"sparse": True, **options}]

    def rows(rank: int, step: int) -> list[int]:
        return [rank, 2, 2, step] if step < STEPS - 1 or rank else []

    compare(size, partial(torch.optim.SGD, lr=0.5), rows, ways, ["Average"] if options else OPS)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("by_closure", [False, True])
def test_sparse_as_dense_with_sparse_adam_steps_by_sparse_gradients(
    size: int, by_closure: bool
) -> None:
    """As without it: rows without a gradient on any rank keep value and moments."""
    make, ways = partial(torch.optim.SparseAdam, lr=0.1), [{}, {"sparse_as_dense": True}]

    def rows(rank: int, step: int) -> list[int]:
        return [rank, 3, 3, 3 + step % 2]

    compare(size, make, rows, ways, sparse=True, by_closure=by_closure)
    for op in OPS.values():
        run = partial(trained, make=make, rows=rows, op=op, sparse=True, sparse_as_dense=True)
        assert torch.equal(run_threads(size, run)[0][5:], WEIGHTS[5:])


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("by_closure", [False, True])
def test_sparse_as_dense_with_an_optimizer_that_refuses_sparse_steps(
    size: int, by_closure: bool
) -> None:
    ways = [{"sparse": False}, {"sparse": True}]
    options = {"by_closure": by_closure, "sparse_as_dense": True}
    compare(size, torch.optim.Adam, lambda rank, step: [rank, 2], ways, **options)


@on_ranks(2)
def test_sparse_gradient_that_one_rank_lacks_at_first_names_sparse_as_dense(group: Group) -> None:
    def step() -> None:
        rows = [1] if group.rank == 0 else []
        trained(group, partial(torch.optim.SGD, lr=0.1), lambda *_: rows, sparse=True, op=hvd.Sum)

    with pytest.raises(hvd.CollectiveMismatchError, match="without one needs sparse_as_dense"):
        step()
