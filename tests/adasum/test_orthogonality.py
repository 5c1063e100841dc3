"""The ratio that tells how orthogonal ranks' gradients are. Ranks are threads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import adasum
import collectives
from adasum.orthogonality import Recorder, Row, orthogonality
from tests.adasum.definition import OPTIMIZERS, loss_of, make_model, tolerance, tree
from tests.adasum.jobs import wrapped

# One per layer: 0-d, matrix, more than a cache line, and none of them a multiple of a slot.
SHAPES = [(), (3, 5), (1000,), (7,)]


def gradients(rank: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """A layer is zero on rank 1 alone, and the last one on every rank."""
    generator = torch.Generator().manual_seed(rank)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    if rank == 1:
        tensors[1].zero_()
    tensors[3].zero_()
    return [tensor.to(dtype) for tensor in tensors]


def definition(size: int, of: Callable[[int], Sequence[Tensor]]) -> list[float]:
    """|Adasum|^2 / sum of |g|^2 a layer, from the formula in float64."""
    ratios = []
    for column in zip(*(of(rank) for rank in range(size)), strict=True):
        vectors = [tensor.double().reshape(-1) for tensor in column]
        total = sum(vector.square().sum().item() for vector in vectors)
        answer = tree(vectors).square().sum().item()
        ratios.append(answer / total if total else math.nan)
    return ratios


def assert_close(got: Sequence[float], want: Sequence[float], dtype: torch.dtype) -> None:
    # The answer's relative error twice, since it is squared; everything else is float64.
    assert list(got) == pytest.approx(list(want), rel=2 * tolerance(dtype), nan_ok=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_orthogonality_of_random_tensors_equals_the_definition(
    size: int, dtype: torch.dtype
) -> None:
    def run(group: collectives.Group) -> Tensor:
        mine = gradients(group.rank, dtype)
        ratios = orthogonality(mine)
        assert all(map(torch.equal, mine, gradients(group.rank, dtype)))
        return ratios

    results = collectives.run_threads(size, run)
    assert_close(results[0].tolist(), definition(size, lambda r: gradients(r, dtype)), dtype)
    assert all(torch.equal(result[:3], results[0][:3]) for result in results)
    assert all(math.isnan(result[3]) for result in results)
    assert results[0].dtype == torch.float64


def test_orthogonality_on_another_group_or_of_no_tensor_works() -> None:
    def run(group: collectives.Group) -> tuple[int, tuple[int, ...]]:
        return len(orthogonality([])), tuple(orthogonality([torch.ones(2)], group).shape)

    assert collectives.run_threads(2, run) == [(0, (1,))] * 2


def test_orthogonality_of_other_dtypes_raises_before_anything_is_sent() -> None:
    def run(group: collectives.Group) -> float:
        with pytest.raises(TypeError, match="int64"):
            orthogonality([torch.ones(2, dtype=torch.int64)])
        return orthogonality([torch.ones(2)]).item()

    assert collectives.run_threads(2, run) == [0.5, 0.5]


def test_recorder_under_two_levels_divides_by_the_square_of_the_local_size() -> None:
    def run(group: collectives.Group) -> list[float]:
        recorder = Recorder()
        tensors = [torch.eye(4)[group.rank], torch.ones(3)]
        token = recorder.before_reduction(["orthogonal", "equal"], tensors)
        group.grouped_all_reduce(tensors, adasum.Adasum, algorithm="rechd/vhdd")
        recorder.after_reduction(token, tensors)
        return [row.ratio for row in recorder.rows]

    for ratios in collectives.run_threads(4, run, local_size=2):
        assert_close(ratios, [1 / 4, 1 / 4], torch.float32)


def of_step(rank: int, method: str) -> list[Tensor]:
    """Return what this rank sends in its first step: gradients, or the step's differences."""
    model = make_model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    loss_of(model, rank, 0).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    optimizer.step()
    differences = [p.detach() - old for p, old in zip(model.parameters(), before, strict=True)]
    return gradients if method == "gradient" else differences


@pytest.mark.parametrize(
    ("op", "method", "copies"),
    [
        (adasum.Adasum, "gradient", False),
        (adasum.Adasum, "delta", False),
        (adasum.Adasum, "delta", True),
        (adasum.Average, "gradient", True),
    ],
)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_recorder_set_on_an_optimizer_records_its_reductions(
    size: int, op: collectives.Reducer, method: str, copies: bool
) -> None:
    def run(group: collectives.Group) -> list[Row]:
        model = make_model()
        optimizer = wrapped(
            model, "adamw", op=op, groups=2, **{"method": method} if op is adasum.Adasum else {}
        )
        recorder = Recorder(every=2, copies=copies)
        optimizer.set_observer(recorder)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, group.rank, step).backward()
            optimizer.step()
        return recorder.rows

    results = collectives.run_threads(size, run)
    assert all(rows == results[0] for rows in results)
    assert [row.step for row in results[0]] == [0] * 4 + [2] * 4
    first = {row.name: row.ratio for row in results[0][:4]}
    names = [name for name, _ in make_model().named_parameters()]
    want = definition(size, lambda rank: of_step(rank, method))
    assert_close([first[name] for name in names], want, torch.float64)
