"""gram, adasum_coefficients and weighted_sum on every backend, against float64 and each other.

`emulator` looks for stray and misaligned accesses and for races on the way.
"""

from __future__ import annotations

import itertools
import math
from contextlib import AbstractContextManager
from fractions import Fraction
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import kernels
from kernels.arithmetic import SPREAD_LIMIT
from kernels.gpu import launcher
from tests.kernels.cases import bits, misaligned, poisoned, random, rounding
from tests.kernels.conftest import ON_GPU, Backend
from tests.kernels.test_adasum_coefficients import assert_within_100_eps
from tests.kernels.trees import balanced, in_line, unweighted
from tests.ptx_emulator.driver import emulated

pytestmark = pytest.mark.parametrize(
    "backend", ["cpu", "cpu_torch", "emulator", ON_GPU], indirect=True
)

EPS = torch.finfo(torch.float64).eps
NUMEL = 1051
# Empty, of one element, cut inside a vector.
CUTS = (0, 0, 3, 4, 700, NUMEL)
slow = pytest.mark.slow
KINDS = [
    (torch.float16, 1), (torch.float32, 2), (torch.bfloat16, 3), (torch.float64, 5),
    (torch.float32, 8), (torch.float32, 9),
    *[pytest.param(dtype, count, marks=slow) for dtype, count in itertools.product(
        (torch.float16, torch.bfloat16, torch.float32, torch.float64), (2, 4, 6, 7, 8, 16, 17))],
]  # fmt: skip


def several(count: int, dtype: torch.dtype, backend: Backend, numel: int = NUMEL) -> list[Tensor]:
    return [random(numel, dtype, backend.device, 1000 * count + i) for i in range(count)]


def reach_of(matrices: Tensor) -> Tensor:
    """|g_i| |g_j|, which no sum of magnitudes exceeds."""
    lengths = matrices.diagonal(dim1=1, dim2=2).sqrt()
    return lengths[:, :, None] * lengths[:, None]


@pytest.mark.parametrize(("dtype", "count"), KINDS, ids=str)
def test_gram_wherever_tensors_start_and_segments_are_cut(backend, dtype, count):
    tensors = several(count, dtype, backend)
    out = poisoned((len(CUTS) - 1, count, count), torch.float64, backend.device)
    assert kernels.gram(tensors, CUTS, out=out) is out
    expected = kernels.gram_reference(tensors, CUTS)
    # A rounding for each term, and in float64 one for its product; as many in the reference.
    assert ((out - expected).abs() <= 2 * NUMEL * EPS * reach_of(expected)).all()
    assert torch.equal(out, out.mT)
    assert bits(kernels.gram(list(map(misaligned, tensors)), CUTS)) == bits(out)


def test_gram_of_more_chunks_than_a_set_adds_them_in_one_order(backend):
    """Of 73, and of one in the segment behind."""
    cuts = (0, 73 * 1024 - 500, 73 * 1024)
    tensors = several(2, torch.bfloat16, backend, cuts[-1])
    got = kernels.gram(tensors, cuts)
    expected = kernels.gram_reference(tensors, cuts)
    assert ((got - expected).abs() <= 2 * cuts[-1] * EPS * reach_of(expected)).all()
    if backend.slow:
        with emulated(resident=3, seed=77, races=False):
            assert bits(kernels.gram(tensors, cuts)) == bits(got)


@pytest.mark.parametrize("capability", [80, pytest.param(100, marks=slow)])
def test_gram_has_the_bits_of_sm_90_on_others(backend, capability):
    if not backend.slow:
        pytest.skip("what these have is that of the emulator")
    tensors = several(3, torch.float32, backend)
    expected = bits(kernels.gram(tensors, CUTS))
    with emulated(capability):
        assert bits(kernels.gram(tensors, CUTS)) == expected


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_segment(backend, value):
    tensors = several(3, torch.float32, backend)
    tensors[1][500] = value
    matrices = kernels.gram(tensors, CUTS)
    assert (matrices.isfinite().all(2).all(1).tolist()) == [True, True, True, False, True]
    spread = poisoned(5, torch.float64, backend.device)
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


def test_gram_of_squares_beyond_float32_keeps_them(backend):
    tensors = [random(40, torch.float32, backend.device, 1) * scale for scale in (1e-38, 1e37)]
    got, expected = kernels.gram(tensors), kernels.gram_reference(tensors)
    assert ((got - expected).abs() <= 40 * EPS * reach_of(expected)).all()
    assert got[0, 0, 0] > 0


@pytest.mark.parametrize(
    ("dtype", "count"),
    [(torch.float32, 3), (torch.float64, 3), (torch.float32, 9),
     *[pytest.param(dtype, count, marks=slow) for dtype, count in
       itertools.product((torch.float16, torch.float32), (2, 3, 8, 17, 33))]],
)  # fmt: skip
def test_precise_gram_is_double_double_where_vectors_may_cancel(backend, dtype, count):
    """In one of three segments; a vector of zeros cancels with nothing."""
    tensors, cuts = several(count, dtype, backend, 400), (0, 0, 300, 400)
    tensors[1][:300] = -tensors[0][:300] * (1 + 1e-6)
    tensors[-1][300:] = 0
    out = poisoned((3, count, count, 2), torch.float64, backend.device)
    kernels.gram(tensors, cuts, out=out, precise=True)
    sums = kernels.gram(tensors, cuts)
    assert not out[0].any() and not out[2, ..., 1].any()
    # The sums of products of float16 are exact in float64.
    assert out[1, ..., 1].any() == (dtype != torch.float16)
    assert bits(out[2, ..., 0]) == bits(sums[2])
    assert torch.equal(out, out.transpose(1, 2))
    values = [[Fraction(x) for x in tensor[:300].double().tolist()] for tensor in tensors]
    for i, j in [(0, 0), (0, 1), (1, 1), (0, count - 1), (count - 1, count - 1)]:
        terms = [x * y for x, y in zip(values[i], values[j], strict=True)]
        high, low = map(Fraction, out[1, i, j].tolist())
        # Each of 300 sums of double-double is off by 2**-103 at most.
        assert abs(high + low - sum(terms)) <= 300 * Fraction(2) ** -103 * sum(map(abs, terms))
        assert abs(low) <= abs(high) * Fraction(EPS)


def on_cpu() -> AbstractContextManager[object]:
    """Where launches are emulated, the CPU path again."""
    return mock.patch.object(launcher, "emulated", False)


@pytest.mark.parametrize("rows", [balanced, in_line])
@pytest.mark.parametrize("count", [1, 2, 3, 8, *[pytest.param(n, marks=slow) for n in (5, 9, 33)]])
def test_coefficients_are_those_of_decimals(backend, count, rows):
    """As the CPU has them, of the sum of two tables, of vectors some of which nearly cancel."""
    tensors = [one.cpu() for one in several(count, torch.float32, backend)]
    if count > 2:
        tensors[1] = -tensors[0] * (1 + 1e-3) + 1e-5 * tensors[2]
    matrices = kernels.gram_reference(tensors, CUTS)
    partials = torch.stack([0.3 * matrices, matrices - 0.3 * matrices])
    tree = rows(count)
    wanted_spread = poisoned(5, torch.float64, "cpu")
    with on_cpu():
        wanted = kernels.adasum_coefficients(partials, tree, spread=wanted_spread)
    spread = poisoned(5, torch.float64, backend.device)
    got = kernels.adasum_coefficients(partials.to(backend.device), tree, spread=spread)
    # Rounded once from double-double, in which cancelling loses 2**40 of 2**104.
    assert ((got.cpu() - wanted).abs() <= EPS * wanted.abs()).all()
    # What is divided is rounded before: two squares and a root.
    assert ((spread.cpu() - wanted_spread).abs() <= 8 * EPS * wanted_spread).all()


def test_coefficients_of_zero_vectors_are_one_and_weights_count(backend):
    """Of nothing, of what is too short to have a direction, and of what cancels to nothing."""
    x = random(50, torch.float32, backend.device, 1).double()
    tensors = [x, -x, 3 * x, 0 * x, x * 2.0**-300]
    matrices = kernels.gram(tensors)[None]
    # Of -x the first becomes 1 + 1/2 of itself, and so does the other: they still cancel.
    tree = [(0, 1, 1, 1), (2, 3, 1, 1), (0, 2, 2, 2), (0, 4, 4, 1)]
    got = kernels.adasum_coefficients(matrices, tree)
    assert got.tolist() == [[1.5, 1.5, 1.0, 1.0, 1.0]]
    parallel = [x, 2 * x, 4 * x]
    tree = [(0, 1, 1, 1), (0, 2, 2, 1)]
    total = kernels.weighted_sum(
        parallel, kernels.adasum_coefficients(kernels.gram(parallel)[None], tree)
    )
    # Weighted by ranks it is their mean.
    assert (total - 7 / 3 * x).abs().max() <= 4 * EPS * x.abs().max()
    equal = [(left, right, 3.0, 3.0) for left, right, _, _ in tree]
    matrices = kernels.gram(parallel)[None]
    one, other = (kernels.adasum_coefficients(matrices, t) for t in (equal, unweighted(tree)))
    assert bits(one) == bits(other)


def test_a_precise_result_that_is_nothing_has_no_coefficients(backend):
    """Beside one that is something, of vectors that cancel as far as float32 lets them."""
    x, y = (random(50, torch.float32, backend.device, seed) for seed in (1, 2))
    longer = y.clone()
    longer[7] *= 1 + 2.0**-20
    for last, nothing in ((-y, True), (-longer, False)):
        matrices = kernels.gram([x, y, -x, last], precise=True)
        assert (matrices[..., 1] != 0).any()
        found = kernels.adasum_coefficients(matrices[None], balanced(4))
        assert (found == 0).all() if nothing else (found != 0).all()
        # float64 sums do not tell.
        plain = kernels.gram([x, y, -x, last])
        assert (kernels.adasum_coefficients(plain[None], balanced(4)) != 0).all()


@pytest.mark.parametrize("count", [3, pytest.param(17, marks=slow)])
def test_precise_coefficients_are_those_of_decimals(backend, count):
    """Of vectors of which the first two cancel but for 1e-6 in one segment of three."""
    tensors, cuts = several(count, torch.float32, backend, 400), (0, 0, 300, 400)
    tensors[1][:300] = -tensors[0][:300] * (1 + 1e-6)
    wanted_spread = poisoned(3, torch.float64, "cpu")
    with on_cpu():
        pairs = kernels.gram([one.cpu() for one in tensors], cuts, precise=True)
        wanted = kernels.adasum_coefficients(pairs[None], balanced(count), spread=wanted_spread)
    partials, spread = pairs[None].to(backend.device), poisoned(3, torch.float64, backend.device)
    out = kernels.adasum_coefficients(partials, balanced(count), spread=spread)
    assert ((out.cpu() - wanted).abs() <= EPS * wanted.abs()).all()
    assert ((spread.cpu() - wanted_spread).abs() <= 8 * EPS * wanted_spread).all()


def test_precise_coefficients_of_parallel_vectors_are_their_shares(backend):
    """However their lengths differ; and of one that is zero as well, those of the others."""
    x = random(40, torch.float32, backend.device, 1)
    tree = [(0, 1, 1, 1), (0, 3, 2, 1), (0, 2, 3, 1)]
    matrices = kernels.gram([x, 2.0**20 * x, 0 * x, x], precise=True)
    got = kernels.adasum_coefficients(matrices[None], tree)
    shares = torch.tensor([[1 / 3, 1 / 3, 1.0, 1 / 3]], dtype=torch.float64)
    assert ((got.cpu() - shares).abs() <= EPS * shares).all()


@pytest.mark.parametrize(
    ("dtype", "count", "apart"),
    [(torch.float32, 3, 1e-6), *[pytest.param(dtype, 5, apart, marks=slow) for dtype, apart in
     itertools.product((torch.float16, torch.float32), (1e-2, 1e-4, 1e-7))]],
)  # fmt: skip
def test_adasum_of_opposed_vectors_is_within_100_eps(backend, dtype, count, apart):
    """Of ranks with two slices, one of which is cut by a segment."""
    if not backend.slow:
        pytest.skip("made on the CPU")
    base, *noise = [random(90, torch.float64, "cpu", i) for i in range(count + 1)]
    tensors = [((base + apart * one) * (-1) ** i).to(dtype) for i, one in enumerate(noise)]
    spread = assert_within_100_eps(tensors, balanced(count), (0, 70, 90), 2)
    assert dtype == torch.float16 or (spread.max() > SPREAD_LIMIT) == (apart < 1e-4)


WEIGHTED = [
    (torch.float16, 3), (torch.float32, 2), (torch.bfloat16, 9), (torch.float64, 1),
    *[pytest.param(dtype, count, marks=slow) for dtype, count in itertools.product(
        (torch.float16, torch.bfloat16, torch.float32, torch.float64), (1, 8, 16))],
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "count"), WEIGHTED, ids=str)
@pytest.mark.parametrize("aligned", [True, False])
def test_weighted_sum_rounds_once_and_reports(backend, dtype, count, aligned):
    tensors = several(count, dtype, backend)
    if not aligned:
        tensors[-1] = misaligned(tensors[-1])
    factors = random((5, count), torch.float64, backend.device, count)
    findings = [torch.zeros((), device=backend.device) for _ in range(2)]
    if dtype == torch.float64:
        findings[1] = findings[1].double()
    expected = kernels.weighted_sum_reference(tensors, factors, CUTS)
    magnitudes = kernels.weighted_sum_reference([one.abs() for one in tensors], factors.abs(), CUTS)
    # Written over one of what is summed.
    out = tensors[count // 2]
    kernels.weighted_sum(
        tensors, factors, CUTS, out=out, found_inf=findings[0], max_abs=findings[1]
    )
    # To the dtype once, which of bfloat16 is through float32, and a rounding for each product.
    bound = rounding(dtype) * expected.abs() * (1 + 2.0**-15) + count * EPS * magnitudes
    floor = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert ((out.double() - expected).abs() <= bound + floor).all()
    assert findings[0] == 0 and findings[1] == out.abs().max()
    kernels.weighted_sum([out], factors[:, :1] * math.inf, CUTS, found_inf=findings[0])
    assert findings[0] == 1


def test_weighted_sum_of_nothing_and_by_nothing(backend):
    x = torch.tensor([1.0, math.nan, -2.0], device=backend.device)
    zeros = torch.zeros(2, 1, dtype=torch.float64, device=backend.device)
    got = kernels.weighted_sum([x], zeros, (0, 2, 3))
    assert bits(got.nan_to_num(5.0)) == bits(torch.tensor([0.0, 5.0, -0.0]))
    nothing = torch.empty(0, device=backend.device)
    assert kernels.weighted_sum([nothing], zeros[:1]).numel() == 0
    assert kernels.gram([nothing, nothing]).tolist() == [[[0.0, 0.0], [0.0, 0.0]]]
    assert kernels.gram([nothing], (0,)).shape == (0, 1, 1)


def test_plans_take_other_tensors_and_what_tables_then_hold(backend):
    tensors, others = (several(count, torch.float32, backend) for count in (3, 4))
    plan = kernels.plan_gram(tensors, CUTS)
    matrices = plan().clone()
    factors = matrices[:, 0].contiguous()
    sums = kernels.plan_weighted_sum(tensors, factors, CUTS)
    first = bits(sums())
    plan.rebind(others[:3])
    assert bits(plan()) == bits(kernels.gram(others[:3], CUTS)) != bits(matrices)
    sums.rebind(others[:3])
    factors.fill_(1.0)
    assert first != bits(sums())
    assert torch.equal(sums(), kernels.weighted_sum(others[:3], factors, CUTS))
