"""gram, adasum_coefficients and weighted_sum against float64, and their chain against fractions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kernels
from tests.kernels.cases import DTYPES, misaligned, poisoned, random

pytestmark = pytest.mark.usefixtures("cpu_path")

EPS = torch.finfo(torch.float64).eps
Rows = list[tuple[int, int, int, int]]


def balanced(count: int) -> Rows:
    """The contract's tree: of no power of two the first pairs fold, then adjacent ones pair."""
    power = 1 << (count.bit_length() - 1)
    extra, rows, weights = count - power, [], dict.fromkeys(range(count), 1)

    def join(left: int, right: int) -> int:
        rows.append((left, right, weights[left], weights[right]))
        weights[left] += weights[right]
        return left

    standing = [join(2 * i, 2 * i + 1) for i in range(extra)] + list(range(2 * extra, count))
    while len(standing) > 1:
        standing = [join(*pair) for pair in zip(standing[::2], standing[1::2], strict=True)]
    return rows


def in_line(count: int) -> Rows:
    return [(0, i, i, 1) for i in range(1, count)]


def unweighted(rows: Rows) -> Rows:
    return [(left, right, 1, 1) for left, right, _, _ in rows]


def several(count: int, numel: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    return [random(numel, dtype, "cpu", 100 * seed + i) for i in range(count)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [*range(1, 18), 33])
def test_gram_of_segments_cut_anywhere(dtype: torch.dtype, count: int) -> None:
    numel = 1511 if count < 18 else 700
    tensors, segments = several(count, numel, dtype, count), (0, 0, 3, 4, 700, numel)
    got = kernels.gram(tensors, segments)
    expected = kernels.gram_reference(tensors, segments)
    assert got.dtype == torch.float64 and got.shape == (5, count, count)
    assert torch.equal(got, got.mT) and not got[0].any()
    # Each of the products and sums of one entry rounds once, in both.
    lengths = expected.diagonal(dim1=1, dim2=2).sqrt()
    reach = lengths[:, :, None] * lengths[:, None]
    assert ((got - expected).abs() <= 2 * numel * EPS * reach).all()
    out = poisoned((5, count, count), torch.float64, "cpu")
    assert kernels.gram(list(map(misaligned, tensors)), segments, out=out) is out
    if dtype != torch.float64:
        assert ((out - got).abs() <= 2 * numel * EPS * reach).all()
