"""The weights of Adasum's two operands: runtime scalars of combine, adasum and their plans."""

from __future__ import annotations

import itertools
import math
import sys

import pytest
import torch

import kernels
from kernels.arithmetic import TINY
from tests.kernels.cases import DTYPES, bits, poisoned, random, relative_l2, rounding
from tests.kernels.conftest import Backend

NUMEL = 1500
CUTS = (0, 7, 7, 1000, NUMEL)
LARGEST = sys.float_info.max
UNEQUAL = [(2.0, 1.0), (1.0, 16.0), (3, 5), (0.25, 0.5)]


def rows_at_the_edges() -> torch.Tensor:
    """Dot products and norms around every branch and limit of the coefficient's formula."""
    # The last finite one is infinite when it is doubled.
    norms = [0.0, TINY / 2, math.nextafter(TINY, 0), TINY, 1.0, 3.0, 1.7e308, math.inf, math.nan]
    dots = [0.0, -0.0, 1.0, -7.3, 5e-324, 1e-310, 1e300, math.inf, math.nan]
    rows = [(d, a, b) for (d, a), b in zip(itertools.product(dots, norms), itertools.cycle(norms))]
    # No vectors have these rows, by which their blend would cancel and be made in another way.
    kept = [(d, a, b) for d, a, b in rows if not d * d > a * b]
    return torch.tensor(kept, dtype=torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_weights_give_the_unweighted_formula_bit_for_bit(
    backend: Backend, dtype: torch.dtype
) -> None:
    """The formula as it stands in the paper, in Python's float64, as scalars of scaled_add."""
    rows = rows_at_the_edges()
    if backend.slow and dtype != torch.float32:
        # The coefficients are float64's, whatever the tensors are.
        rows = rows[::4].contiguous()
    bounds = tuple(range(0, 8 * len(rows) + 1, 8))
    a, b = (random(bounds[-1], dtype, backend.device, seed) for seed in (1, 2))
    expected = torch.empty_like(a)
    for (d, *norms), low, high in zip(rows.tolist(), bounds, bounds[1:], strict=False):
        alpha, beta = (
            1.0 if n < TINY else 1.0 - d / (2.0 * n) if n <= LARGEST / 2 else math.nan
            for n in norms
        )
        kernels.scaled_add(a[low:high], b[low:high], alpha=alpha, beta=beta, out=expected[low:high])
    for n in (1, 17, 1.7e308) if backend.slow else (1, 1.0, 3, 17, 1e-300, 1.7e308):
        got = kernels.combine(a, b, rows.to(backend.device), bounds, weights=(n, n))
        assert got.isnan().equal(expected.isnan())
        # One NaN is as good as another.
        assert bits(got.nan_to_num(nan=0.5)) == bits(expected.nan_to_num(nan=0.5))


@pytest.mark.parametrize(
    ("weights", "dtype"),
    [
        pytest.param(weights, dtype, marks=() if (row + column) % 2 == 0 else pytest.mark.slow)
        for row, weights in enumerate(UNEQUAL)
        for column, dtype in enumerate(DTYPES)
    ],
)
def test_weights_agree_with_float64(
    backend: Backend, weights: tuple[float, float], dtype: torch.dtype
) -> None:
    a, b = (random(NUMEL, dtype, backend.device, seed) for seed in (3, 4))
    expected = kernels.adasum_reference(a, b, CUTS, weights=weights)
    out = poisoned(NUMEL, dtype, backend.device)
    assert kernels.adasum(a, b, CUTS, weights=weights, out=out) is out
    wide = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    # As `bound_of` of test_projection.py, but that a dot product's error reaches a coefficient
    # whole where it was halved.
    bound = rounding(dtype) * 1.01 + 8 * (20 + math.log2(NUMEL)) * wide
    assert relative_l2(out, expected) <= bound
    two = kernels.combine(a, b, kernels.dot_and_norms(a, b, CUTS), CUTS, weights=weights)
    assert bits(two) == bits(out)
    assert bits(kernels.plan_adasum(a, b, CUTS)(weights)) == bits(out)
    plan = kernels.plan_combine(a, b, kernels.dot_and_norms(a, b, CUTS), CUTS)
    plain = bits(plan())
    assert bits(plan(weights)) == bits(out) != plain == bits(kernels.adasum(a, b, CUTS))


@pytest.mark.parametrize(
    "weights", [*UNEQUAL, (1.0, 1.0), (1.0, 1e9), (1e-308, 1e308), (1.7e308, 1.7e308)]
)
def test_parallel_vectors_give_the_weighted_mean_and_orthogonal_ones_the_sum(
    backend: Backend, weights: tuple[float, float]
) -> None:
    x = random(NUMEL, torch.float64, backend.device, 5)
    share = 1.0 / (1.0 + weights[1] / weights[0])
    mean = share * 1.5 + (1.0 - share) * 4.0
    # Coefficients are below 3 here, and each of them is rounded a few times.
    eps = torch.finfo(torch.float64).eps
    got = kernels.adasum(1.5 * x, 4.0 * x, weights=weights)
    assert relative_l2(got, mean * x) <= 40 * eps
    left, right = x.clone(), x.clone()
    left[700:], right[:700] = 0, 0
    assert torch.equal(kernels.adasum(left, right, weights=weights), x)
    zero = torch.zeros_like(x)
    assert torch.equal(kernels.adasum(x, zero, weights=weights), x)
    assert torch.equal(kernels.adasum(zero, x, weights=weights), x)


def test_weights_that_cannot_be_used_are_refused_before_a_write() -> None:
    a, b = torch.ones(4), torch.ones(4)
    dots, out = kernels.dot_and_norms(a, b), torch.full((4,), math.nan)
    plans = kernels.plan_adasum(a, b, out=out), kernels.plan_combine(a, b, dots, out=out)
    for call in (
        lambda: kernels.adasum(a, b, weights=(0, 1), out=out),
        lambda: kernels.combine(a, b, dots, weights=(0, 1), out=out),
        lambda: kernels.adasum_reference(a, b, weights=(0, 1)),
        lambda: kernels.combine_reference(a, b, dots, weights=(0, 1)),
        *(lambda plan=plan: plan((0, 1)) for plan in plans),
    ):
        with pytest.raises(ValueError, match="weights must be positive and finite"):
            call()
    assert out.isnan().all()
