"""Adasum of vectors that nearly cancel, and of float64 ones whose squares leave float64."""

from __future__ import annotations

import math

import pytest
import torch

import kernels
from kernels.arithmetic import CANCELLED
from tests.kernels.cases import DTYPES, bits, cuts, misaligned, poisoned, random, relative_l2
from tests.kernels.conftest import Backend
from tests.kernels.trees import adasum_of, balanced, distance, dot, exactly, length

NUMEL = 2011
EPS = torch.finfo(torch.float32).eps


def opposed(dtype: torch.dtype, device: str, apart: float) -> tuple[torch.Tensor, torch.Tensor]:
    """a, and b = -a (1 + apart) with as much noise again, both rounded to the dtype."""
    wide = random(NUMEL, torch.float64, device, 1)
    noise = random(NUMEL, torch.float64, device, 2)
    return wide.to(dtype), (-wide * (1 + apart) + apart * noise).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("apart", [1e-1, 1e-3, 1e-5, 1e-6])
def test_combine_of_nearly_opposed_vectors_is_as_exact_as_a_float64_blend(
    backend: Backend, dtype: torch.dtype, apart: float
) -> None:
    a, b = opposed(dtype, backend.device, apart)
    segments = list(cuts(NUMEL))[2]
    dots = kernels.dot_and_norms_reference(a, b, segments)
    expected = kernels.combine_reference(a, b, dots, segments)
    for left, right in ((a, b), (misaligned(a), b)):
        out = poisoned(NUMEL, dtype, backend.device)
        kernels.combine(left, right, dots, segments, out=out)
        # Above CANCELLED of the summands: float32's rounding of two coefficients, two products and
        # a sum. Below it they are kept; one rounding to float32 and one to the dtype are left.
        bound = torch.finfo(dtype).eps + (math.sqrt(2 / CANCELLED) + 1) * EPS
        assert relative_l2(out, expected) <= bound <= 100 * torch.finfo(dtype).eps
        assert torch.equal(kernels.combine(left, right, dots, segments), out)


def test_adasum_of_exactly_opposed_vectors_leaves_nothing(backend: Backend) -> None:
    """A rounding error would have a direction, which the next pair of a tree would take."""
    for dtype in DTYPES:
        for numel in (1, 7, NUMEL):
            a = random(NUMEL, dtype, backend.device, 3)[:numel].clone()
            assert not kernels.adasum(misaligned(a), -a).any()
            assert not kernels.combine(a, -a, kernels.dot_and_norms(a, -a)).any()


def assert_within_what_cancels(got: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """|got - v| <= 100 eps (|alpha a| + |beta b|), as promised of float64: of every single pair.

    Of orthogonal vectors the right side is 100 sqrt(2) eps |v|.
    """
    x, y = exactly(a), exactly(b)
    product, reach = float(dot(x, y)), 0.0
    for vector in (x, y):
        reach += abs(1 - product / (2 * length(vector) ** 2)) * length(vector)
    error = distance(got, adasum_of([a, b], balanced(2), (0, a.numel())))
    assert error <= 100 * torch.finfo(torch.float64).eps * reach


@pytest.mark.parametrize("apart", [1.0, 1e-1, 1e-3, 1e-5, 1e-7])
def test_adasum_of_opposed_float64_vectors_is_within_what_cancels(
    backend: Backend, apart: float
) -> None:
    a, b = opposed(torch.float64, backend.device, apart)
    if backend.slow:
        a, b = a[:300], b[:300]
    assert_within_what_cancels(kernels.adasum(a, b), a, b)
    dots = kernels.dot_and_norms(a, b)
    assert_within_what_cancels(kernels.combine(a, b, dots), a, b)
    # The float64 reference loses as much: it is no oracle here.
    assert_within_what_cancels(kernels.adasum_reference(a, b), a, b)


def test_vectors_that_cancel_and_overflow_are_infinite_and_found(backend: Backend) -> None:
    """1.75 a + 1.5 b is far beyond float32, and what a product loses must not make it NaN."""
    a = torch.full((64,), 3e38, device=backend.device)
    dots = torch.tensor([[-1.5, 1.0, 1.5]], dtype=torch.float64, device=backend.device)
    found = torch.zeros(1, device=backend.device)
    got = kernels.combine(a, a, dots, found_inf=found)
    assert (got == math.inf).all() and found.item() == 1.0


@pytest.mark.parametrize("factor", [1.0, 0.1, -0.3, 1e-10])
@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 7.0)])
def test_float64_whose_squares_leave_it_is_nan_and_found(
    backend: Backend, factor: float, weights: tuple[float, float]
) -> None:
    """A squared norm beyond DBL_MAX would give finite numbers, and wrong ones."""
    a = torch.cat([random(100, torch.float64, backend.device, 5) * scale for scale in (1, 1e154)])
    b, segments = a * factor, (0, 100, 200)
    found = torch.zeros(1, device=backend.device)
    got = kernels.adasum(a, b, segments, weights=weights, found_inf=found)
    assert got[100:].isnan().all() and found.item() == 1.0
    assert got[:100].isfinite().all()
    assert kernels.adasum_reference(a, b, segments, weights=weights)[100:].isnan().all()
    assert bits(got[:100]) == bits(kernels.adasum(a[:100], b[:100], weights=weights))
    # The largest that is not: 100 squares of it are a tenth of DBL_MAX.
    small = a[100:] / a[100:].abs().max() * 1e152
    got, expected = (
        function(small, small * factor, weights=weights)
        for function in (kernels.adasum, kernels.adasum_reference)
    )
    assert relative_l2(got, expected) <= 100 * torch.finfo(torch.float64).eps
