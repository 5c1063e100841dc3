"""adasum_coefficients: trees replayed on Gram matrices, and the whole way from these to Adasum."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import kernels
from tests.kernels.cases import DTYPES, bits, poisoned, random
from tests.kernels.trees import Rows, adasum_of, balanced, distance, in_line, length, unweighted

pytestmark = pytest.mark.usefixtures("cpu_path")

F32, F64 = torch.float32, torch.float64
EPS = torch.finfo(F64).eps
TREES = {"balanced": balanced, "in line": in_line}


def matrices_of(count: int, seed: int, segments: int = 1) -> Tensor:
    vectors = random((segments, count, 50), F64, "cpu", seed)
    return vectors @ vectors.mT


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("count", [*range(1, 18), 33])
def test_coefficients_are_the_formulas(tree: str, count: int) -> None:
    rows, matrices = TREES[tree](count), matrices_of(count, count, segments=7)
    for each in (rows, unweighted(rows)):
        out, spread = poisoned((7, count), F64, "cpu"), poisoned(7, F64, "cpu")
        assert kernels.adasum_coefficients(matrices[None], each, out=out, spread=spread) is out
        expected = kernels.adasum_coefficients_reference(matrices[None], each)
        # The reference rounds each of n^2 products of a dot, whose magnitudes are the spread times
        # a square that is not smaller than the others; each of n levels doubles it at most.
        bound = 8 * count**2 * EPS * count * spread[:, None]
        assert ((out - expected).abs() <= bound * (1 + expected.abs())).all()
        assert (spread >= 1 - 8 * EPS).all() and spread.isfinite().all()


@pytest.mark.parametrize("weights", [(1, 1), (3, 3), (1, 2), (5, 1), (0.5, 1e10)])
def test_coefficients_of_two_are_those_of_combine(weights: tuple[float, float]) -> None:
    a, b = (random(100, F32, "cpu", seed) for seed in (1, 2))
    matrices = kernels.gram([a, b])
    p, q = weights
    (dot, norm_a, norm_b), got = kernels.dot_and_norms(a, b)[0].tolist(), None
    got = kernels.adasum_coefficients(matrices[None], [(0, 1, p, q)])[0].tolist()
    expected = [1 - p / (p + q) * dot / norm_a, 1 - q / (p + q) * dot / norm_b]
    assert got == pytest.approx(expected, rel=8 * EPS)
    # The result may stand on the other side.
    swapped = kernels.adasum_coefficients(matrices[None], [(1, 0, q, p)])[0].tolist()
    assert swapped == got
    if p == q:
        unit = kernels.adasum_coefficients(matrices[None], [(0, 1, 1, 1)])
        assert unit[0].tolist() == got


def test_partials_are_added_in_their_order() -> None:
    parts = torch.stack([matrices_of(4, seed, segments=5) for seed in range(6)])
    whole = parts.sum(0, keepdim=True)
    rows = balanced(4)
    got = kernels.adasum_coefficients(parts, rows)
    expected = kernels.adasum_coefficients(whole, rows)
    assert ((got - expected).abs() <= 1e3 * EPS).all()
    # In double-double nothing of a large one that goes again is missed.
    large = torch.full_like(parts[:1], 2.0**60)
    around = torch.cat([large, parts, -large])
    assert ((kernels.adasum_coefficients(around, rows) - expected).abs() <= 1e3 * EPS).all()


def test_precise_partials_that_are_exact_in_float64_give_the_same() -> None:
    rows, matrices = balanced(4), matrices_of(4, 3, segments=5)
    pairs = torch.stack([matrices, torch.zeros_like(matrices)], -1)
    found = []
    for partials in (matrices, pairs):
        spread = poisoned(5, F64, "cpu")
        factors = kernels.adasum_coefficients(partials[None], rows, spread=spread)
        found.append([bits(factors), bits(spread)])
    assert found[0] == found[1]


def test_vectors_that_leave_nothing_have_an_infinite_spread() -> None:
    a = random(100, F32, "cpu", 1)
    spread = poisoned(1, F64, "cpu")
    got = kernels.adasum_coefficients(
        kernels.gram([a, -a, a])[None], [(0, 1, 1, 1), (0, 2, 2, 1)], spread=spread
    )
    # 1.5 a - 1.5 a is zero, the identity.
    assert got.tolist() == [[1.5, 1.5, 1.0]] and spread.item() == math.inf


def chain(
    tensors: Sequence[Tensor], rows: Rows, segments: tuple[int, ...], slices: int
) -> tuple[Tensor, Tensor]:
    """Adasum as ranks do it that have a slice each, and how far its vectors cancel."""
    count, numel = len(tensors), segments[-1]
    edges = [numel * i // slices for i in range(slices + 1)]

    tables, spread = [], poisoned(len(segments) - 1, F64, "cpu")
    for low, high in itertools.pairwise(edges):
        cut = [min(max(edge, low), high) - low for edge in segments]
        parts = [tensor[low:high] for tensor in tensors]
        tables.append(kernels.gram(parts, cut, precise=True))
    factors = kernels.adasum_coefficients(torch.stack(tables), rows, spread=spread)
    assert factors.shape == (len(segments) - 1, count)
    return kernels.weighted_sum(tensors, factors, segments), spread


def assert_within_100_eps(
    tensors: Sequence[Tensor], rows: Rows, segments: tuple[int, ...], slices: int = 3
) -> Tensor:
    got, spread = chain(tensors, rows, segments, slices)
    expected = adasum_of(tensors, rows, segments)
    info = torch.finfo(got.dtype)
    for low, high in itertools.pairwise(segments):
        # Numbers below the smallest normal one are rounded to its eps, as the contract's bound of
        # 100 eps of the length cannot see.
        floor = math.sqrt(high - low) * info.smallest_normal * info.eps
        bound = 100 * info.eps * length(expected[low:high]) + floor
        assert distance(got[low:high], expected[low:high]) <= bound
    return spread


CUTS = (0, 0, 1, 50, 50, 51, 90)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(
    "count",
    [
        # Around each power of two by default; all others at night.
        pytest.param(n, marks=pytest.mark.slow) if n in (10, 11, 12, 14, 15) else n
        for n in range(1, 18)
    ],
)
def test_adasum_of_any_number_is_within_100_eps(
    dtype: torch.dtype, weighted: bool, count: int
) -> None:
    for tree in (balanced, in_line):
        rows = tree(count) if weighted else unweighted(tree(count))
        tensors = [random(CUTS[-1], dtype, "cpu", 50 * count + i) for i in range(count)]
        if dtype == F64:
            # Single elements are parallel, and cancel: float64 is for pairs.
            assert_within_100_eps([one[:80] for one in tensors], rows, (0, 30, 30, 80))
        else:
            assert_within_100_eps(tensors, rows, CUTS)


@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("apart", [1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7])
@pytest.mark.parametrize("count", [2, 5, 8])
def test_adasum_of_opposed_vectors_is_within_100_eps(
    dtype: torch.dtype, weighted: bool, apart: float, count: int
) -> None:
    base = random(150, F64, "cpu", 1)
    noise = [random(150, F64, "cpu", 2 + i) for i in range(count)]
    opposed = [(base + apart * one) * (-1) ** i for i, one in enumerate(noise)]
    tensors = [one.to(dtype) for one in opposed]
    segments = (0, 70, 150)
    rows = balanced(count) if weighted else unweighted(balanced(count))
    spread = assert_within_100_eps(tensors, rows, segments)
    if dtype == F32 and not weighted and apart <= 1e-6:
        assert (spread > kernels.SPREAD_LIMIT).all()


def test_adasum_coefficients_bytes_are_the_matrices_and_the_rows() -> None:
    partials = torch.zeros(3, 5, 2, 2, dtype=F64)
    assert kernels.adasum_coefficients_bytes(partials) == 8 * (3 * 5 * 4 + 5 * 2)
