"""gram and weighted_sum on every backend, against float64 and exact sums.

`emulator` looks for stray and misaligned accesses and for races on the way.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import kernels
from kernels.cpu import dispatch
from tests.kernels.cases import BLOCK, DTYPES, bits, misaligned, poisoned, random, rounding
from tests.kernels.conftest import Backend
from tests.kernels.cpu.cases import need_compiled
from tests.kernels.trees import balanced
from tests.ptx_emulator.driver import emulated

F16, BF16, F32, F64 = DTYPES
EPS = torch.finfo(F64).eps
NUMEL = 1051
# Empty, of one element, cut inside a vector.
CUTS = (0, 0, 3, 4, 700, NUMEL)
ON_CPU = Backend("cpu")
slow = pytest.mark.slow
KINDS = [
    (F16, 1), (F32, 2), (BF16, 3), (F64, 5), (F32, 8), (F32, 9),
    *[pytest.param(dtype, count, marks=slow)
      for dtype, count in itertools.product(DTYPES, (2, 4, 6, 7, 8, 16, 17))],
]  # fmt: skip


def several(count: int, dtype: torch.dtype, backend: Backend, numel: int = NUMEL) -> list[Tensor]:
    return [random(numel, dtype, backend.device, 1000 * count + i) for i in range(count)]


def reach_of(matrices: Tensor) -> Tensor:
    """|g_i| |g_j|, which no sum of magnitudes exceeds."""
    lengths = matrices.diagonal(dim1=1, dim2=2).sqrt()
    return lengths[:, :, None] * lengths[:, None]


def assert_gram(got: Tensor, tensors: list[Tensor], segments: tuple[int, ...] | None) -> None:
    expected = kernels.gram_reference(tensors, segments)
    # A rounding for each term, and in float64 one for its product; as many in the reference.
    bound = 2 * tensors[0].numel() * EPS * reach_of(expected)
    assert ((got - expected).abs() <= bound).all()
    assert torch.equal(got, got.mT)


@pytest.mark.parametrize(("dtype", "count"), KINDS, ids=str)
def test_gram_wherever_tensors_start_and_segments_are_cut(backend, dtype, count):
    tensors = several(count, dtype, backend)
    out = poisoned((len(CUTS) - 1, count, count), F64, backend.device)
    assert kernels.gram(tensors, CUTS, out=out) is out
    assert_gram(out, tensors, CUTS)
    assert bits(kernels.gram(list(map(misaligned, tensors)), CUTS)) == bits(out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [*range(1, 18), 33])
def test_gram_of_any_number_and_length_on_a_cpu(cpu_path, dtype, count):
    segments = (0, 0, 3, 4, 700, 700, NUMEL)
    tensors = several(count, dtype, ON_CPU)
    got = kernels.gram(tensors, segments)
    assert_gram(got, tensors, segments)
    assert not got[0].any() and not got[4].any()
    assert_gram(kernels.gram(list(map(misaligned, tensors)), segments), tensors, segments)
    for numel in (0, 1, 7, 8, 15, 16, 17, 511, 513, BLOCK - 1, 2 * BLOCK + 517):
        tensors = several(count, dtype, ON_CPU, numel)
        assert_gram(kernels.gram(tensors), tensors, None)


def test_gram_of_more_chunks_than_a_set_adds_them_in_one_order(backend):
    """Of 73, and of one in the segment behind."""
    cuts = (0, 73 * 1024 - 500, 73 * 1024)
    tensors = several(2, BF16, backend, cuts[-1])
    got = kernels.gram(tensors, cuts)
    assert_gram(got, tensors, cuts)
    if backend.slow:
        with emulated(resident=3, seed=77, races=False):
            assert bits(kernels.gram(tensors, cuts)) == bits(got)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_in_its_segment(backend, value):
    tensors = several(3, F32, backend)
    tensors[1][500] = value
    matrices = kernels.gram(tensors, CUTS)
    assert (matrices.isfinite().all(2).all(1).tolist()) == [True, True, True, False, True]
    # The rows of the others, too.
    assert matrices[3].isfinite().tolist() == [[i != 1 != j for i in range(3)] for j in range(3)]
    spread = poisoned(5, F64, backend.device)
    found = kernels.adasum_coefficients(matrices[None], balanced(3), spread=spread)
    assert found.isnan().all(1).tolist() == [False, False, False, True, False]
    assert spread.isnan().tolist() == [False, False, False, True, False]
    assert torch.equal(found.isnan().any(1), found.isnan().all(1))
    precise = kernels.gram(tensors, CUTS, precise=True)
    # In double-double are the segments of three and of one.
    assert precise.isfinite().flatten(1).all(1).tolist() == [True, True, True, False, True]
    assert bits(precise[3:, ..., 0]) == bits(matrices[3:]) and not precise[3:, ..., 1].any()
    sums = kernels.weighted_sum(tensors, found, CUTS)
    assert sums.isfinite().tolist() == [not 4 <= i < 700 for i in range(NUMEL)]


@pytest.mark.parametrize(
    ("dtype", "count"),
    [(F16, 2), (BF16, 3), (F32, 3), (F64, 3), (F32, 9),
     *[pytest.param(dtype, count, marks=slow) for dtype, count in
       itertools.product((F16, F32), (2, 3, 8, 17, 33))]],
)  # fmt: skip
def test_precise_gram_is_double_double_where_vectors_may_cancel(backend, dtype, count):
    """In one of three segments; a vector of zeros cancels with nothing."""
    tensors, cuts = several(count, dtype, backend, 400), (0, 0, 300, 400)
    tensors[1][:300] = -tensors[0][:300] * (1 + 1e-6)
    if count > 2:
        # Equal vectors share the products of the first of them.
        tensors[2][:300] = tensors[0][:300]
    tensors[-1][300:] = 0
    out = poisoned((3, count, count, 2), F64, backend.device)
    kernels.gram(tensors, cuts, out=out, precise=True)
    sums = kernels.gram(tensors, cuts)
    assert not out[0].any() and not out[2, ..., 1].any()
    # The sums of products of 16 bits are exact in float64.
    assert out[1, ..., 1].any() == (dtype.itemsize > 2)
    assert bits(out[2, ..., 0]) == bits(sums[2])
    assert torch.equal(out, out.transpose(1, 2))
    values = [[Fraction(x) for x in tensor[:300].double().tolist()] for tensor in tensors]
    for i, j in itertools.combinations_with_replacement(
        sorted({0, 1, min(2, count - 1), count - 1}), 2
    ):
        terms = [x * y for x, y in zip(values[i], values[j], strict=True)]
        high, low = map(Fraction, out[1, i, j].tolist())
        # Each of 300 sums of double-double is off by 2**-103 at most.
        assert abs(high + low - sum(terms)) <= 300 * Fraction(2) ** -103 * sum(map(abs, terms))
        assert abs(low) <= abs(high) * Fraction(EPS)


@pytest.mark.parametrize("count", [1, 2, 5, 8, 17])
def test_segments_are_precise_where_vectors_may_cancel(cpu_path, count):
    """Not of zero vectors, of nothing and of NaN; of few elements, and of too small an angle."""
    segments = (0, 100, 100, 200, 200 + max(2, count - 1), 400, 500, 600)
    tensors = several(count, F32, ON_CPU, 600)
    for one in tensors[:-1]:
        one[:100] = 0
    # The directions of two that are apart by d have the least eigenvalue d^2 / 2.
    limit = math.sqrt(2 * count / kernels.SPREAD_LIMIT)
    for low, apart in ((400, 2 * limit), (500, limit / 2)):
        noise = random(100, F32, "cpu", 7)
        tensors[-1][low : low + 100] = -2 * (tensors[0][low : low + 100] + apart * noise)
    tensors[-1][300] = math.nan
    out, sums = kernels.gram(tensors, segments, precise=True), kernels.gram(tensors, segments)
    expected = torch.tensor([False, False, False, count > 2, False, False, count > 1])
    assert torch.equal(out[..., 1].flatten(1).any(1), expected)
    assert bits(out[~expected][..., 0]) == bits(sums[~expected])
    difference = (out.sum(-1) - sums).abs()[expected]
    assert (difference <= 200 * EPS * reach_of(sums)[expected]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 11])
def test_bits_depend_on_neither_place_nor_threads_nor_neighbours(cpu_path, dtype, count):
    if cpu_path == "cpu_torch":
        pytest.skip("those of torch's products depend on all")
    numel = 5 * BLOCK + 1029
    cuts = (0, 3, 2 * BLOCK + 1, numel)
    tensors = several(count, dtype, ON_CPU, numel)
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
def test_gram_of_two_has_the_bits_of_dot_and_norms(cpu_path, dtype):
    if cpu_path == "cpu_torch":
        pytest.skip("torch multiplies matrices in another order than vectors")
    segments = (0, 5, 5, 3 * BLOCK, 4 * BLOCK + 100)
    a, b = several(2, dtype, ON_CPU, segments[-1])
    dots = kernels.dot_and_norms(a, b, segments)
    matrices = kernels.gram([a, b], segments)
    rows = torch.stack([matrices[:, 0, 1], matrices[:, 0, 0], matrices[:, 1, 1]], 1)
    assert bits(rows) == bits(dots)


def assert_rounded_once(
    got: Tensor, tensors: list[Tensor], factors: Tensor, segments: tuple[int, ...] | None
) -> None:
    expected = kernels.weighted_sum_reference(tensors, factors, segments)
    sizes = kernels.weighted_sum_reference([one.abs() for one in tensors], factors.abs(), segments)
    # float64 rounds a product and a sum a tensor, in both; doubles become 16 bits by way of float.
    inner = 4 * len(tensors) * EPS * sizes
    float_too = torch.finfo(F32).eps / 2
    once = (rounding(got.dtype) + (float_too if got.dtype.itemsize == 2 else 0.0)) * 1.01
    floor = torch.finfo(got.dtype).smallest_normal * torch.finfo(got.dtype).eps
    assert ((got.double() - expected).abs() <= once * expected.abs() + inner + floor).all()


WEIGHTED = [
    (F16, 3), (F32, 2), (BF16, 9), (F64, 1),
    *[pytest.param(dtype, count, marks=slow)
      for dtype, count in itertools.product(DTYPES, (1, 8, 16))],
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "count"), WEIGHTED, ids=str)
@pytest.mark.parametrize("aligned", [True, False])
def test_weighted_sum_in_place_rounds_once(backend, dtype, count, aligned):
    tensors = several(count, dtype, backend)
    if not aligned:
        tensors[-1] = misaligned(tensors[-1])
    factors = random((5, count), F64, backend.device, count)
    written = [one.clone() for one in tensors]
    kernels.weighted_sum(written, factors, CUTS, out=written[count // 2])
    assert_rounded_once(written[count // 2], tensors, factors, CUTS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [*range(1, 18), 33])
def test_weighted_sum_of_any_number_on_a_cpu(cpu_path, dtype, count):
    segments = (0, 0, 3, 4, 700, 700, NUMEL)
    tensors, factors = several(count, dtype, ON_CPU), random((6, count), F64, "cpu", 7)
    out = poisoned(NUMEL, dtype, "cpu")
    assert kernels.weighted_sum(tensors, factors, segments, out=out) is out
    assert_rounded_once(out, tensors, factors, segments)
    shifted = kernels.weighted_sum([*map(misaligned, tensors)], factors, segments)
    assert bits(shifted) == bits(out)
    for place in {0, count // 2, count - 1}:
        written = [one.clone() for one in tensors]
        kernels.weighted_sum(written, factors, segments, out=written[place])
        assert bits(written[place]) == bits(out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_and_torchs_weighted_sums_have_equal_bits(dtype, monkeypatch):
    """Of whole vectors, whatever the threads; torch rounds the product apart in what is left."""
    need_compiled()
    numel, segments = 1 << 16, (0, 1 << 10, 1 << 16)
    tensors, factors = several(9, dtype, ON_CPU, numel), random((2, 9), F64, "cpu", 3)
    threads, seen = torch.get_num_threads(), set()
    try:
        for used in (1, 2, 3):
            torch.set_num_threads(used)
            seen.add(bits(kernels.weighted_sum(tensors, factors, segments)))
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setattr(dispatch, "library", lambda: None)
    assert seen == {bits(kernels.weighted_sum(tensors, factors, segments))}


def test_weighted_sum_of_nothing_and_by_nothing(backend):
    x = torch.tensor([1.0, math.nan, -2.0], device=backend.device)
    zeros = torch.zeros(2, 1, dtype=F64, device=backend.device)
    got = kernels.weighted_sum([x], zeros, (0, 2, 3))
    assert bits(got.nan_to_num(5.0)) == bits(torch.tensor([0.0, 5.0, -0.0]))
    nothing = torch.empty(0, device=backend.device)
    assert kernels.weighted_sum([nothing], zeros[:1]).numel() == 0
    assert kernels.gram([nothing, nothing]).tolist() == [[[0.0, 0.0], [0.0, 0.0]]]
    assert kernels.gram([nothing], (0,)).shape == (0, 1, 1)


def test_plans_read_what_tensors_and_coefficients_then_hold(backend):
    given = several(3, F32, backend)
    factors = random((5, 3), F64, backend.device, 9)
    blend, precise = (
        kernels.plan_weighted_sum(given, factors, CUTS),
        kernels.plan_gram(given, CUTS, precise=True),
    )
    assert not precise()[4, ..., 1].any()
    blend()
    factors.mul_(3.0)
    given[2].copy_(given[0])
    assert bits(blend()) == bits(kernels.weighted_sum(given, factors, CUTS))
    assert bits(precise()) == bits(kernels.gram(given, CUTS, precise=True))
    assert precise.out[4, ..., 1].any()


def test_bytes_are_all_that_is_read_and_written():
    tensors, cuts = several(3, F16, ON_CPU, 100), (0, 10, 100)
    assert kernels.gram_bytes(tensors) == 3 * 200 + 72
    assert kernels.gram_bytes(tensors, cuts, precise=True) == 3 * 200 + 2 * 144
    assert kernels.weighted_sum_bytes(tensors, cuts) == 4 * 200 + 48
    partials = torch.zeros(3, 5, 2, 2, dtype=F64)
    assert kernels.adasum_coefficients_bytes(partials) == 8 * (3 * 5 * 4 + 5 * 2)
