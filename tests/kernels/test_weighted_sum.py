"""weighted_sum: n tensors blended in one pass, with float64 coefficients a segment."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kernels
from kernels.cpu import dispatch
from tests.kernels.cases import BLOCK, DTYPES, bits, misaligned, poisoned, random, rounding
from tests.kernels.cpu.cases import need_compiled

EPS = torch.finfo(torch.float64).eps
F64 = torch.float64


def several(count: int, numel: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    return [random(numel, dtype, "cpu", 100 * seed + i) for i in range(count)]


def assert_rounded_once(
    got: Tensor, tensors: list[Tensor], factors: Tensor, segments: tuple[int, ...]
) -> None:
    expected = kernels.weighted_sum_reference(tensors, factors, segments)
    sizes = kernels.weighted_sum_reference([one.abs() for one in tensors], factors.abs(), segments)
    # float64 rounds a product and a sum a tensor, in both; doubles become 16 bits by way of float.
    inner = 4 * len(tensors) * EPS * sizes
    float_too = torch.finfo(torch.float32).eps / 2
    once = (rounding(got.dtype) + (float_too if got.dtype.itemsize == 2 else 0.0)) * 1.01
    floor = torch.finfo(got.dtype).smallest_normal * torch.finfo(got.dtype).eps
    assert ((got.double() - expected).abs() <= once * expected.abs() + inner + floor).all()


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [*range(1, 18), 33])
def test_weighted_sum_of_segments_cut_anywhere(dtype: torch.dtype, count: int) -> None:
    numel, segments = 1511, (0, 0, 3, 4, 700, 700, 1511)
    tensors, factors = several(count, numel, dtype, count), random((6, count), F64, "cpu", 7)
    out = poisoned(numel, dtype, "cpu")
    assert kernels.weighted_sum(tensors, factors, segments, out=out) is out
    assert_rounded_once(out, tensors, factors, segments)
    shifted = kernels.weighted_sum([*map(misaligned, tensors)], factors, segments)
    assert bits(shifted) == bits(out)


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 7, 15, 16, 17, 511, 513, BLOCK + 1])
def test_weighted_sum_in_place_has_the_bits_of_one_that_is_not(
    dtype: torch.dtype, numel: int
) -> None:
    factors = random((1, 10), F64, "cpu", 1)
    expected = kernels.weighted_sum(several(10, numel, dtype), factors)
    for place in (0, 4, 9):
        tensors = several(10, numel, dtype)
        assert kernels.weighted_sum(tensors, factors, out=tensors[place]) is tensors[place]
        assert bits(tensors[place]) == bits(expected)


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_cancels_keeps_the_precision_of_float64(dtype: torch.dtype) -> None:
    a = random(1000, dtype, "cpu", 1)
    factors = torch.tensor([[1 + 2.0**-30, -1.0]], dtype=F64)
    got = kernels.weighted_sum([a, a], factors)
    # One rounding of a product that is added to -a exactly, and those of the output.
    floor = torch.finfo(dtype).smallest_normal
    expected = a.double() * 2.0**-30
    error = (got.double() - expected).abs()
    assert (error <= (rounding(dtype) * 1.01 + 2.0**-52 * 2.0**30) * expected.abs() + floor).all()


@pytest.mark.usefixtures("cpu_path")
def test_coefficients_outside_floats_range_are_exact() -> None:
    a = torch.full((40,), 1e-38)
    got = kernels.weighted_sum([a, a], torch.tensor([[1e40, -9e39]], dtype=F64))
    # Their difference is exact to float64, a tenth of each.
    expected = a.double() * 1e39
    assert ((got.double() - expected).abs() <= (rounding(torch.float32) + 40 * EPS) * 100).all()
    assert got.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_and_torchs_bits_are_equal(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whole vectors: torch rounds the product apart in what is left of them."""
    need_compiled()
    numel, segments = 1 << 12, (0, 1 << 10, 1 << 12)
    tensors, factors = several(9, numel, dtype), random((2, 9), F64, "cpu", 3)
    compiled = kernels.weighted_sum(tensors, factors, segments)
    monkeypatch.setattr(dispatch, "library", lambda: None)
    assert bits(kernels.weighted_sum(tensors, factors, segments)) == bits(compiled)


def test_bits_depend_on_no_number_of_threads() -> None:
    tensors, factors = several(5, 6 * BLOCK + 5, torch.float32), random((1, 5), F64, "cpu", 3)
    threads, seen = torch.get_num_threads(), set()
    try:
        for used in (1, 2, 3):
            torch.set_num_threads(used)
            seen.add(bits(kernels.weighted_sum(tensors, factors)))
    finally:
        torch.set_num_threads(threads)
    assert len(seen) == 1


def test_weighted_sum_bytes_are_all_that_is_read_and_written() -> None:
    tensors = several(3, 100, torch.float16)
    assert kernels.weighted_sum_bytes(tensors, (0, 10, 100)) == 4 * 200 + 48
