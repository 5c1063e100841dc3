"""Observers that take Gram matrices: norms and orthogonality without a look at a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import adasum
from adasum import AdasumReducer, orthogonality
from adasum.observer import ObservedGram
from adasum.orthogonality import Recorder, Row
from collectives import Group, Sum, calls, run_threads
from collectives.schedules.halving import balanced_tree
from tests.adasum.definition import tree
from tests.adasum.gradient_recorder.small import train

SHAPES = [(5, 7), (), (1000,), (0,), (3,)]
EPS = torch.finfo(torch.float64).eps


def vectors(rank: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """One a shape; the last is zero on rank 1."""
    generator = torch.Generator().manual_seed(rank)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    if rank == 1:
        drawn[-1].zero_()
    return [each.to(dtype) for each in drawn]


def reduce(
    group: Group, op: AdasumReducer, tensors: Sequence[Tensor], **options: Any
) -> ObservedGram | None:
    observed = op.observed()
    expected = group.reduces_by_tree(tensors, observed, **options)
    group.grouped_all_reduce(tensors, observed, **options)
    gram = observed.take_gram()
    assert expected == (gram is not None) and observed.take_gram() is None
    return gram


def check(gram: ObservedGram, size: int, dtype: torch.dtype, *, weighted: bool = True) -> None:
    """Products, norms and the results' norms are those of float64 arithmetic.

    A product is off by its terms' float64 sums, at most numel eps |a| |b|; of such vectors, which
    do not cancel, a tree's coefficients multiply that by no more than some n^2.
    """
    columns = [[vectors(r, dtype)[i].double().flatten() for r in range(size)] for i in range(5)]
    for i, column in enumerate(columns):
        stacked = torch.stack(column)
        lengths = stacked.norm(dim=1)
        bound = 1000 * EPS * lengths[:, None] * lengths
        assert ((gram.products[i] - stacked @ stacked.T).abs() <= bound).all()
        assert torch.allclose(gram.norms[i], lengths, rtol=1000 * EPS, atol=0)
        want = tree(column, weighted=weighted).norm().item()
        assert gram.result_norms[i].item() == pytest.approx(want, rel=1000 * size**2 * EPS)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_gram_matrices_are_those_of_all_ranks_and_change_no_bits(
    size: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shared:
        monkeypatch.setattr(calls, "plan_host_all_reduce", lambda *arguments: None)
    cases = [(op, d) for op in (adasum.Adasum, AdasumReducer(weighted=False)) for d in DTYPES]

    def run(group: Group) -> list[ObservedGram]:
        grams = []
        for op, dtype in cases:
            mine, plain = vectors(group.rank, dtype), vectors(group.rank, dtype)
            gram = reduce(group, op, mine, algorithm="direct")
            assert gram is not None
            grams.append(gram)
            group.grouped_all_reduce(plain, op, algorithm="direct")
            assert all(map(torch.equal, mine, plain))
        return grams

    results = run_threads(size, run)
    for number, (op, dtype) in enumerate(cases):
        check(results[0][number], size, dtype, weighted=op.weighted)
        for other in results:
            assert all(map(torch.equal, other[number][:3], results[0][number][:3]))


DTYPES = (torch.float32, torch.bfloat16)


def test_reductions_without_gram_matrices_say_so_and_hand_over_none() -> None:
    def run(group: Group) -> None:
        flat = group.topology.local_size == 1
        # On one level of nodes `rechd/direct` is `direct`.
        for algorithm in ("psgpu", "xring") if flat else ("xring", "rechd/direct"):
            assert reduce(group, adasum.Adasum, vectors(group.rank), algorithm=algorithm) is None
        # In shared memory all that make the balanced tree have one, also of little data.
        for algorithm in (None, "rd", "vhdd"):
            assert (
                reduce(group, adasum.Adasum, vectors(group.rank), algorithm=algorithm) is not None
            )
        doubles = vectors(group.rank, torch.float64)
        assert reduce(group, adasum.Adasum, doubles, algorithm="direct") is None
        # Two reductions, of which each has its own.
        mixed = [torch.ones(3), torch.ones(3, dtype=torch.bfloat16)]
        assert not group.reduces_by_tree(mixed, adasum.Adasum, algorithm="direct")
        assert not group.reduces_by_tree(mixed[:1], Sum, algorithm="direct")
        # On nodes, too, all vectors meet at once.
        whole, bounds = torch.ones(9), [0, 3, 9]
        assert group.reduces_by_tree(whole, adasum.Adasum, segments=bounds, algorithm="direct")

    run_threads(4, run, local_size=1)
    run_threads(4, run, local_size=2)

    def alone(group: Group) -> None:
        assert reduce(group, adasum.Adasum, vectors(0), algorithm="direct") is None

    run_threads(1, alone)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors had their norms taken, call by call."""
    found: list[int] = []
    norms = orthogonality.squared_norms
    monkeypatch.setattr(
        orthogonality, "squared_norms", lambda given: found.append(len(given)) or norms(given)
    )
    return found


def test_orthogonality_of_what_goes_by_direct_takes_no_norms(looks: list[int]) -> None:
    def run(group: Group) -> list[float]:
        large, small = torch.randn(100_000), torch.randn(7)
        # By itself, since float64 vectors have no Gram matrices.
        alone = torch.ones(3, dtype=torch.float64)
        return orthogonality.orthogonality([large, alone, small]).tolist()

    results = run_threads(3, run)
    # Of the float64 vectors and their results; test_orthogonality.py compares the values.
    assert looks == [1] * 6
    assert results[0][1] == pytest.approx(1 / 3, rel=100 * EPS)
    assert results[1] == results[0] == results[2]


@pytest.mark.parametrize("method", ["gradient", "delta"])
def test_recorder_has_the_same_rows_by_gram_matrices_without_a_norm_or_a_message(
    method: str, looks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:

    def run(group: Group, algorithm: str) -> list[Row]:
        recorder = Recorder(every=2)
        train(group, recorder, 4, op=adasum.Adasum, method=method, algorithm=algorithm)
        return recorder.rows

    by_gram = run_threads(4, lambda group: run(group, "direct"))
    assert not looks
    monkeypatch.setattr(calls, "plan_host_all_reduce", lambda runner, call: None)
    by_norms = run_threads(4, lambda group: run(group, "vhdd"))
    assert looks
    assert all(rows == by_gram[0] for rows in by_gram)
    for one, other in zip(by_gram[0], by_norms[0], strict=True):
        assert one[:2] == other[:2]
        # vhdd's result, whose norm the other is, is within the contract's 100 eps; so is training.
        bound = 400 * torch.finfo(torch.float32).eps
        assert one.ratio == pytest.approx(other.ratio, rel=bound)


def test_recorder_of_copies_has_adasums_ratio_of_unweighted_reductions() -> None:
    def run(group: Group) -> list[float]:
        found = []
        for copies in (False, True):
            recorder = Recorder(copies=copies)
            observed = AdasumReducer(weighted=False).observed()
            group.all_reduce(torch.ones(8) * (group.rank + 1), observed, algorithm="direct")
            gram = observed.take_gram()
            assert gram is not None and gram.tree != balanced_tree(3)
            recorder.after_gram(["a"], gram)
            found.append(recorder.rows[0].ratio)
        return found

    one, two, three = (torch.full((8,), float(rank + 1)) for rank in range(3))
    for found in run_threads(3, run):
        for ratio, weighted in zip(found, (False, True), strict=True):
            want = tree([one, two, three], weighted=weighted).square().sum().item() / (14 * 8)
            assert ratio == pytest.approx(want, rel=1000 * EPS)
