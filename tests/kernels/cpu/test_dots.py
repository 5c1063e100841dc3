"""Dot products on CPUs: lengths around blocks, ranges of elements, bits."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

import kernels
from tests.kernels.cases import BLOCK

pytestmark = pytest.mark.usefixtures("cpu_path")

EPS = torch.finfo(torch.float64).eps


def pair(numel: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(numel)
    a, b = (torch.randn(numel, generator=generator, dtype=torch.float64) for _ in range(2))
    return a.to(dtype), b.to(dtype)


def check_close(a: Tensor, b: Tensor, cuts: tuple[int, ...] | None = None) -> None:
    """Off by float64's roundings at most: of n products and n additions, in whatever order."""
    cuts = (0, a.numel()) if cuts is None else cuts
    rows = kernels.dot_and_norms(a, b, cuts).tolist()
    x, y = a.double().tolist(), b.double().tolist()
    for row, (low, high) in zip(rows, itertools.pairwise(cuts), strict=True):
        u, v = x[low:high], y[low:high]
        for got, left, right in zip(row, (u, u, v), (v, u, v), strict=True):
            products = [p * q for p, q in zip(left, right, strict=True)]
            reach = math.fsum(map(abs, products))
            assert abs(got - math.fsum(products)) <= 2 * (high - low) * EPS * reach


@pytest.mark.parametrize("dtype", sorted(kernels.DTYPES, key=str))
@pytest.mark.parametrize(
    "numel", [1, 7, 8, 9, 1023, 1024, 1033, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK + 1029]
)
def test_every_length(numel: int, dtype: torch.dtype) -> None:
    check_close(*pair(numel, dtype))


def test_long_and_short_segments_in_any_order() -> None:
    lengths = [0, 5, 0, 0, BLOCK, BLOCK + 77, 1, 3 * BLOCK + 1, 0, 3000, BLOCK, 0]
    cuts = (0, *itertools.accumulate(lengths))
    a, b = pair(cuts[-1])
    check_close(a, b, cuts)
    # A segment's answer is its own, whatever stands beside it.
    dots = kernels.dot_and_norms(a, b, cuts)
    for row, (low, high) in zip(dots, itertools.pairwise(cuts), strict=True):
        assert torch.equal(row, kernels.dot_and_norms(a[low:high], b[low:high])[0])


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e-20, 1.0, 1e19, 3e37])
def test_every_size_of_the_elements(scale: float) -> None:
    a, b = pair(BLOCK + 5)
    check_close(a * scale, b)
    check_close(a * scale, b * scale)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_is_seen(value: float) -> None:
    a, b = pair(4 * BLOCK + 100)
    for place in (3, BLOCK - 1, 4 * BLOCK + 99):
        x = a.clone()
        x[place] = value
        dots = kernels.dot_and_norms(x, b, (0, BLOCK, a.numel()))
        mine = int(place >= BLOCK)
        assert not dots[mine, :2].isfinite().any()
        assert dots[mine, 2].isfinite() and dots[1 - mine].isfinite().all()


@pytest.mark.parametrize("dtype", sorted(kernels.DTYPES, key=str))
def test_bits_depend_on_neither_place_nor_threads(dtype: torch.dtype, cpu_path: str) -> None:
    if cpu_path == "cpu_torch":
        pytest.skip("those of torch.dot depend on both")
    numel = 9 * BLOCK + 1029
    cuts = (0, 3, 2 * BLOCK + 1, numel)
    a, b = pair(numel, dtype)
    threads = torch.get_num_threads()
    seen = set()
    try:
        for place, count in itertools.product(range(0, 16, 3), (1, 2, 3)):
            torch.set_num_threads(count)
            x = torch.empty(numel + 16, dtype=dtype)[place : place + numel].copy_(a)
            y = torch.empty(numel + 16, dtype=dtype)[16 - place :][:numel].copy_(b)
            seen.add(tuple(kernels.dot_and_norms(x, y, cuts).view(-1).tolist()))
    finally:
        torch.set_num_threads(threads)
    assert len(seen) == 1
