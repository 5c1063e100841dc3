"""gram: the dot products of all pairs, in float64 and in double-double."""

from __future__ import annotations

import itertools
import math
from decimal import Decimal

import pytest
import torch
from torch import Tensor

import kernels
from tests.kernels.cases import BLOCK, DTYPES, bits, misaligned, poisoned, random
from tests.kernels.trees import dot, exactly

pytestmark = pytest.mark.usefixtures("cpu_path")

EPS = torch.finfo(torch.float64).eps


def several(count: int, numel: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    return [random(numel, dtype, "cpu", 100 * seed + i) for i in range(count)]


def reach_of(matrices: Tensor) -> Tensor:
    """|g_i| |g_j|, which bounds the sum of the magnitudes of their products."""
    lengths = matrices.diagonal(dim1=1, dim2=2).sqrt()
    return lengths[:, :, None] * lengths[:, None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [*range(1, 18), 33])
def test_gram_of_segments_cut_anywhere(dtype: torch.dtype, count: int) -> None:
    numel = 1511 if count < 18 else 700
    tensors, segments = several(count, numel, dtype, count), (0, 0, 3, 4, 700, 700, numel)
    expected = kernels.gram_reference(tensors, segments)
    # Each of the products and sums of one entry rounds once, in both.
    bound = 2 * numel * EPS * reach_of(expected)
    out = poisoned((6, count, count), torch.float64, "cpu")
    assert kernels.gram(tensors, segments, out=out) is out
    assert ((out - expected).abs() <= bound).all()
    assert torch.equal(out, out.mT) and not out[0].any() and not out[4].any()
    again = kernels.gram([*map(misaligned, tensors)], segments)
    assert ((again - expected).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 7, 8, 15, 16, 17, 511, 513, BLOCK - 1, 2 * BLOCK + 517])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_gram_of_every_length(dtype: torch.dtype, numel: int, count: int) -> None:
    tensors = several(count, numel, dtype, numel)
    expected = kernels.gram_reference(tensors)
    bound = 2 * numel * EPS * reach_of(expected)
    assert ((kernels.gram(tensors) - expected).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_precise_gram_is_exact_to_double_double(dtype: torch.dtype, count: int) -> None:
    numel, segments = 700, (0, 0, 1, 3, 600, 700)
    tensors = several(count, numel, dtype, count)
    if count > 1:
        # Sums that cancel, which float64 has few bits of, of vectors that do.
        tensors[-1][3:300] = -tensors[0][3:300]
        tensors[-1][300:600] = tensors[0][300:600]
        tensors[1] = tensors[0].clone()
    out = poisoned((5, count, count, 2), torch.float64, "cpu")
    assert kernels.gram(tensors, segments, precise=True, out=out) is out
    assert torch.equal(out, out.transpose(1, 2))
    for matrix, low, high in zip(out, segments[:-1], segments[1:], strict=True):
        parts = [exactly(tensor[low:high]) for tensor in tensors]
        for i, j in itertools.combinations_with_replacement(range(count), 2):
            pair = exactly(matrix[i, j])
            minus = [*pair, dot(parts[i], parts[j]).copy_negate()]
            magnitudes = float(
                dot([x.copy_abs() for x in parts[i]], [y.copy_abs() for y in parts[j]])
            )
            # A sum of two doubles has 2**-106 of its own, and each addition may lose twice that.
            # One vector alone cancels with none.
            bits = 104 if count > 1 else 52
            assert abs(float(dot(minus, [Decimal(1)] * 3))) <= 2.0**-bits * numel * magnitudes
            assert matrix[i, j, 0] == matrix[i, j].sum()


@pytest.mark.parametrize("count", [1, 2, 5, 8, 17])
def test_segments_are_precise_where_vectors_may_cancel(count: int) -> None:
    """Not of zero vectors, of nothing and of NaN; of few elements, and of too small an angle."""
    segments = (0, 100, 100, 200, 200 + max(2, count - 1), 400, 500, 600)
    tensors = several(count, 600, torch.float32)
    for one in tensors[:-1]:
        one[:100] = 0
    # The directions of two that are apart by d have the least eigenvalue d^2 / 2.
    limit = math.sqrt(2 * count / kernels.SPREAD_LIMIT)
    for low, apart in ((400, 2 * limit), (500, limit / 2)):
        noise = random(100, torch.float32, "cpu", 7)
        tensors[-1][low : low + 100] = -2 * (tensors[0][low : low + 100] + apart * noise)
    tensors[-1][300] = math.nan
    out, sums = kernels.gram(tensors, segments, precise=True), kernels.gram(tensors, segments)
    expected = torch.tensor([False, False, False, count > 2, False, False, count > 1])
    assert torch.equal(out[..., 1].flatten(1).any(1), expected)
    assert bits(out[~expected][..., 0]) == bits(sums[~expected])
    difference = (out.sum(-1) - sums).abs()[expected]
    assert (difference <= 200 * EPS * reach_of(sums)[expected]).all()


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_a_matrix_is_right_beside_whatever_is_left(dtype: torch.dtype) -> None:
    """c^T G c of combinations that cancel as far as they can, by the least eigenvectors."""
    for apart in (1.0, 1e-2, 1e-4, 1e-6):
        base, *noise = (random(300, torch.float64, "cpu", seed) for seed in range(6))
        tensors = [(base + apart * one).to(dtype) for one in noise]
        matrix = kernels.gram(tensors, precise=True)[0]
        lengths = matrix[..., 0].diagonal().sqrt()
        found = torch.linalg.eigh(matrix[..., 0] / lengths / lengths[:, None])[1] / lengths[:, None]
        for factors in found.T:
            c, rows = exactly(factors), [exactly(tensor) for tensor in tensors]
            vector = [dot(c, column) for column in zip(*rows, strict=True)]
            ones = [Decimal(1)] * 2
            table = [[dot(exactly(pair), ones) for pair in row] for row in matrix]
            got, expected = dot(c, [dot(row, c) for row in table]), dot(vector, vector)
            reach = float((factors.abs() * lengths).sum()) ** 2
            bound = 2.0**-22 * float(expected) + 2.0**-100 * reach
            assert abs(float(got - expected)) <= bound


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_in_its_segment_and_its_rows(
    dtype: torch.dtype, precise: bool, poison: float
) -> None:
    segments = (0, 1100, 1300, 2400)
    tensors = several(5, 2400, dtype)
    clean = kernels.gram(tensors, segments, precise=precise)
    tensors[3][1200] = poison
    got = kernels.gram(tensors, segments, precise=precise)
    for segment in (0, 2):
        assert bits(got[segment]) == bits(clean[segment])
    found = got[1].sum(-1) if precise else got[1]
    finite = found.isfinite()
    assert not finite[3].any() and not finite[:, 3].any() and finite.sum() == 16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 11])
def test_bits_depend_on_neither_place_nor_threads_nor_neighbours(
    dtype: torch.dtype, count: int, cpu_path: str
) -> None:
    if cpu_path == "cpu_torch":
        pytest.skip("those of torch's products depend on all")
    numel = 5 * BLOCK + 1029
    cuts = (0, 3, 2 * BLOCK + 1, numel)
    tensors = several(count, numel, dtype)
    threads, seen = torch.get_num_threads(), set()
    try:
        for place, used in itertools.product((0, 3, 8), (1, 2, 3)):
            torch.set_num_threads(used)
            moved = [torch.empty(numel + 32, dtype=dtype)[place + i :][:numel] for i in range(2)]
            moved = [moved[i % 2].copy_(one) if i < 2 else one for i, one in enumerate(tensors)]
            seen.add((False, bits(kernels.gram(moved, cuts))))
            if count < 4:
                # With one that equals another, so that it is precise.
                seen.add((True, bits(kernels.gram([*moved, tensors[0]], cuts, precise=True))))
    finally:
        torch.set_num_threads(threads)
    assert len(seen) == (2 if count < 4 else 1)
    alone = kernels.gram([one[3 : cuts[2]] for one in tensors])
    assert bits(alone[0]) == bits(kernels.gram(tensors, cuts)[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gram_of_two_has_the_bits_of_dot_and_norms(dtype: torch.dtype, cpu_path: str) -> None:
    if cpu_path == "cpu_torch":
        pytest.skip("torch multiplies matrices in another order than vectors")
    segments = (0, 5, 5, 3 * BLOCK, 4 * BLOCK + 100)
    a, b = several(2, segments[-1], dtype)
    dots = kernels.dot_and_norms(a, b, segments)
    matrices = kernels.gram([a, b], segments)
    rows = torch.stack([matrices[:, 0, 1], matrices[:, 0, 0], matrices[:, 1, 1]], 1)
    assert bits(rows) == bits(dots)


def test_gram_bytes_are_the_tensors_and_the_matrices() -> None:
    tensors = several(3, 100, torch.float16)
    assert kernels.gram_bytes(tensors) == 3 * 200 + 72
    assert kernels.gram_bytes(tensors, (0, 10, 100), precise=True) == 3 * 200 + 2 * 144
