"""adasum_coefficients: trees replayed on Gram matrices; test_direct.py has the whole way to Adasum.

Values are compared with those of 60 digits.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import kernels
from kernels.cpu.torch_fallback import tree_of
from tests.kernels.cases import DTYPES, bits, poisoned, random
from tests.kernels.conftest import Backend
from tests.kernels.trees import balanced, in_line, unweighted

F16, BF16, F32, F64 = DTYPES
slow = pytest.mark.slow
EPS = torch.finfo(F64).eps


def matrices_of(count: int, seed: int, segments: int = 1) -> Tensor:
    vectors = random((segments, count, 50), F64, "cpu", seed)
    return vectors @ vectors.mT


@pytest.mark.usefixtures("cpu_path")
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


@pytest.mark.usefixtures("cpu_path")
def test_precise_partials_that_are_exact_in_float64_give_the_same() -> None:
    rows, matrices = balanced(4), matrices_of(4, 3, segments=5)
    pairs = torch.stack([matrices, torch.zeros_like(matrices)], -1)
    found = []
    for partials in (matrices, pairs):
        spread = poisoned(5, F64, "cpu")
        factors = kernels.adasum_coefficients(partials[None], rows, spread=spread)
        found.append([bits(factors), bits(spread)])
    assert found[0] == found[1]


@pytest.mark.usefixtures("cpu_path")
def test_vectors_that_leave_nothing_have_an_infinite_spread() -> None:
    a = random(100, F32, "cpu", 1)
    spread = poisoned(1, F64, "cpu")
    got = kernels.adasum_coefficients(
        kernels.gram([a, -a, a])[None], [(0, 1, 1, 1), (0, 2, 2, 1)], spread=spread
    )
    # 1.5 a - 1.5 a is zero, the identity.
    assert got.tolist() == [[1.5, 1.5, 1.0]] and spread.item() == math.inf


@pytest.mark.usefixtures("cpu_path")
def test_plan_reads_what_partials_then_hold() -> None:
    given, rows, spread = matrices_of(3, 1, segments=5)[None], balanced(3), poisoned(5, F64, "cpu")
    plan = kernels.plan_adasum_coefficients(given, rows, spread=spread)
    for seed in (2, 3):
        given.copy_(matrices_of(3, seed, segments=5)[None])
        assert plan() is plan.out
        found, before = [bits(plan.out), bits(spread)], spread._version
        direct = kernels.adasum_coefficients(given, rows, spread=spread)
        assert [bits(direct), bits(spread)] == found and spread._version > before
    others = matrices_of(3, 4, segments=5)[None]
    plan.rebind([others])
    assert bits(plan()) == bits(kernels.adasum_coefficients(others, rows))


# Of segments that are empty, of one element and cut inside a vector.
SEGMENTS = (0, 0, 3, 4, 700, 1051)


def several(count: int, backend: Backend, numel: int = SEGMENTS[-1]) -> list[Tensor]:
    return [random(numel, F32, backend.device, 1000 * count + i) for i in range(count)]


@pytest.mark.parametrize("rows", [balanced, in_line])
@pytest.mark.parametrize("count", [1, 2, 3, 8, *[pytest.param(n, marks=slow) for n in (5, 9, 33)]])
def test_coefficients_are_those_of_decimals(backend, count, rows):
    """Of the sum of two tables, of vectors some of which nearly cancel."""
    tensors = [one.cpu() for one in several(count, backend)]
    if count > 2:
        tensors[1] = -tensors[0] * (1 + 1e-3) + 1e-5 * tensors[2]
    matrices = kernels.gram_reference(tensors, SEGMENTS)
    partials = torch.stack([0.3 * matrices, matrices - 0.3 * matrices])
    tree = rows(count)
    wanted, wanted_spread = tree_of(partials, tree)
    spread = poisoned(5, F64, backend.device)
    got = kernels.adasum_coefficients(partials.to(backend.device), tree, spread=spread)
    # Rounded once from double-double, in which cancelling loses 2**40 of 2**104.
    assert ((got.cpu() - wanted).abs() <= EPS * wanted.abs()).all()
    # What is divided is rounded before: two squares, a root and a sum of as many lengths.
    assert ((spread.cpu() - wanted_spread).abs() <= (8 + count) * EPS * wanted_spread).all()


def test_coefficients_of_zero_vectors_are_one_and_weights_count(backend):
    """Of nothing, of what is too short to have a direction, and of what cancels to nothing."""
    x = random(50, F32, backend.device, 1).double()
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
    x, y = (random(50, F32, backend.device, seed) for seed in (1, 2))
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
    tensors, cuts = several(count, backend, 400), (0, 0, 300, 400)
    tensors[1][:300] = -tensors[0][:300] * (1 + 1e-6)
    pairs = kernels.gram(tensors, cuts, precise=True).cpu()
    wanted, wanted_spread = tree_of(pairs[None], balanced(count))
    partials, spread = pairs[None].to(backend.device), poisoned(3, F64, backend.device)
    out = kernels.adasum_coefficients(partials, balanced(count), spread=spread)
    assert ((out.cpu() - wanted).abs() <= EPS * wanted.abs()).all()
    assert ((spread.cpu() - wanted_spread).abs() <= (8 + count) * EPS * wanted_spread).all()


def test_precise_coefficients_of_parallel_vectors_are_their_shares(backend):
    """However their lengths differ; and of one that is zero as well, those of the others."""
    x = random(40, F32, backend.device, 1)
    tree = [(0, 1, 1, 1), (0, 3, 2, 1), (0, 2, 3, 1)]
    matrices = kernels.gram([x, 2.0**20 * x, 0 * x, x], precise=True)
    got = kernels.adasum_coefficients(matrices[None], tree)
    shares = torch.tensor([[1 / 3, 1 / 3, 1.0, 1 / 3]], dtype=F64)
    assert ((got.cpu() - shares).abs() <= EPS * shares).all()
