"""dot_and_norms, combine and adasum against float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import kernels
from kernels.gpu import chunking
from tests.kernels.cases import (
    DTYPES,
    bits,
    cuts,
    misaligned,
    poisoned,
    random,
    relative_l2,
    rounding,
)

NUMEL = 5003


def bound_of(dtype, numel):
    """Relative L2 bound on adasum.

    One rounding of the result. Each dot product is off by at most (1 + log2 n + 16) float32 eps
    of |a||b| - at most 32 products a thread, then a tree - and reaches a coefficient halved, then
    one rounding a coefficient, a product and a sum. A result is at least half as long as its
    longer operand when the dot is not negative, and not below |a + b| else: factor 4 covers both.
    """
    wide = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    return rounding(dtype) * 1.01 + 4 * (20 + math.log2(max(2, numel))) * wide


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", range(4))
def test_dots_of_segments_cut_anywhere(backend, dtype, which):
    segments = list(cuts(NUMEL))[which]
    a, b = (random(NUMEL, dtype, backend.device, seed) for seed in (3, 4))
    dots = kernels.dot_and_norms(a, b, segments)
    expected = kernels.dot_and_norms_reference(a, b, segments)
    assert dots.dtype == torch.float64 and dots.shape == expected.shape
    wide = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    # |a||b| bounds the sum of magnitudes; 32 additions a thread and a tree of log2 n.
    norms = expected[:, 1:].sqrt()
    scale = torch.stack([norms[:, 0] * norms[:, 1], *expected[:, 1:].unbind(1)], 1)
    assert ((dots - expected).abs() <= (33 + math.log2(NUMEL)) * wide * scale).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("which", "target"),
    [
        # test_dots_of_segments_cut_anywhere has the others.
        pytest.param(which, target, marks=() if which == 3 or start else pytest.mark.slow)
        for which, target in itertools.product(range(4), ["new", "a", "b", "misaligned"])
        for start in [(which, target) == (0, "new")]
    ],
)
def test_adasum(backend, dtype, which, target):
    segments = list(cuts(NUMEL))[which]
    a, b = (random(NUMEL, dtype, backend.device, seed) for seed in (5, 6))
    expected = kernels.adasum_reference(a, b, segments)
    out = poisoned(NUMEL, dtype, backend.device)
    out = {"new": out, "a": a, "b": b, "misaligned": misaligned(out)}[target]
    assert kernels.adasum(a, b, segments, out=out) is out
    assert relative_l2(out, expected) <= bound_of(dtype, NUMEL)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_tile_of_any_length(backend, dtype):
    for numel in (0, 1, 7, 8, 1000, 1024):
        a, b = (random(numel, dtype, backend.device, numel + seed) for seed in (0, 1))
        got, expected = kernels.adasum(a, b), kernels.adasum_reference(a, b)
        # A single element is parallel to any other: a sum of halves that may cancel.
        scale = max((a.double().norm() + b.double().norm()).item(), 1e-300)
        error = (got.double() - expected).norm().item() / scale
        assert error <= bound_of(dtype, numel)
        assert bits(kernels.adasum(misaligned(a), b)) == bits(got)


def test_more_chunks_than_one_partial_block(backend, monkeypatch):
    numel = 257 * 16384
    if backend.slow:
        # As many chunks, at a size that a test can afford; no other test has this one's plan.
        numel = 257 * 512 - 4
        monkeypatch.setattr(chunking, "tile_of", lambda numel, itemsize: (512, 4))
    a, b = (random(numel, torch.float32, backend.device, seed) for seed in (7, 8))
    got, expected = kernels.adasum(a, b), kernels.adasum_reference(a, b)
    assert relative_l2(got, expected) <= bound_of(torch.float32, numel)


def test_chunks_of_several_tiles(backend, monkeypatch):
    # As for more than 32 Mi elements, at a size that a test can afford.
    monkeypatch.setattr(chunking, "_MAX_CHUNKS", 4)
    numel = 20_011
    a, b = (random(numel, torch.float32, backend.device, seed) for seed in (7, 8))
    segments = (0, 6001, numel)
    got, expected = kernels.adasum(a, b, segments), kernels.adasum_reference(a, b, segments)
    assert relative_l2(got, expected) <= bound_of(torch.float32, numel)


def test_combine_uses_the_dots_it_is_given(backend):
    a, b = (random((10, 10), torch.float32, backend.device, seed) for seed in (1, 2))
    dots = torch.tensor([[1.0, 2.0, 4.0], [0.5, 1.0, 0.0]], dtype=torch.float64)
    dots = dots.to(backend.device)
    got = kernels.combine(a, b, dots, (0, 30, 100))
    x, y = a.double().view(-1), b.double().view(-1)
    # Rows give coefficients (0.75, 0.875) and (0.75, 1: a zero norm).
    expected = torch.cat([0.75 * x[:30] + 0.875 * y[:30], 0.75 * x[30:] + y[30:]]).view(10, 10)
    assert got.shape == (10, 10)
    assert relative_l2(got, expected) <= 4 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("small", [1e-45, 1e-38, 1e-30])
@pytest.mark.parametrize("large", [1e-38, 1.0, 1e19, 1e38])
def test_magnitudes_whose_squares_leave_float32(backend, small, large):
    numel = 3000
    a = (random(numel, torch.float64, backend.device, 1) * small).float()
    b = (random(numel, torch.float64, backend.device, 2) * large).clamp(-3e38, 3e38).float()
    got, expected = kernels.adasum(a, b), kernels.adasum_reference(a, b)
    error = (got.double() - expected).norm().item()
    # Subnormal results are rounded to their spacing of 2**-149, twice.
    floor = math.sqrt(numel) * 2.0**-148
    bound = bound_of(torch.float32, numel)
    assert error <= bound * expected.norm().item() + floor


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "poison", [math.nan, math.inf, pytest.param(-math.inf, marks=pytest.mark.slow)]
)
def test_nan_and_inf_stay_in_their_segment(backend, dtype, poison):
    segments = (0, 1100, 1300, 2400)
    a, b = (random(2400, dtype, backend.device, seed) for seed in (1, 2))
    clean = kernels.adasum(a, b, segments)
    a[1200] = poison
    got = kernels.adasum(a, b, segments)
    assert not got[1100:1300].isfinite().any()
    assert bits(got[:1100]) == bits(clean[:1100])
    assert bits(got[1300:]) == bits(clean[1300:])
    a.fill_(math.nan)
    assert kernels.adasum(a, b, segments).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_twice(backend, dtype):
    numel = 6_000 if backend.slow else 50_000
    a, b = (random(numel, dtype, backend.device, seed) for seed in (1, 2))
    segments = (0, 10, numel // 5 * 4, numel)
    first = kernels.dot_and_norms(a, b, segments), kernels.adasum(a, b, segments)
    for _ in range(1 if backend.slow else 3):
        again = kernels.dot_and_norms(a, b, segments), kernels.adasum(a, b, segments)
        assert [bits(tensor) for tensor in again] == [bits(tensor) for tensor in first]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_of_combine_do_not_depend_on_where_tensors_start(backend, dtype):
    a, b = (random(4096, dtype, backend.device, seed) for seed in (1, 2))
    dots = kernels.dot_and_norms(a, b)
    expected = bits(kernels.combine(a, b, dots))
    assert bits(kernels.combine(misaligned(a), b, dots)) == expected
    assert bits(kernels.combine(a, b, dots, out=misaligned(a))) == expected


def test_no_segments_at_all(backend):
    empty = torch.empty(0, device=backend.device)
    assert kernels.dot_and_norms(empty, empty, (0,)).shape == (0, 3)
    assert torch.equal(kernels.dot_and_norms(empty, empty).cpu(), torch.zeros(1, 3).double())
    assert kernels.adasum(empty, empty, (0, 0, 0)).shape == (0,)
