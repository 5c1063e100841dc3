"""sum_n and scaled_add against float64."""

from __future__ import annotations

import itertools

import pytest
import torch

import kernels
from tests.kernels.cases import DTYPES, assert_close, bits, misaligned, poisoned, random, tolerance
from tests.kernels.conftest import Backend

# The last is more than one block of the CPU path and many tiles of the other.
SIZES = [0, 1, 7, 1024, 70001]
# Fast are those triples among which each pair of dtypes is in each pair of places.
THREE = [
    pytest.param(*triple, marks=() if sum(map(DTYPES.index, triple)) % 4 == 0 else pytest.mark.slow)
    for triple in itertools.product(DTYPES, repeat=3)
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_sum_n(backend, dtype, numel, count):
    numel = min(numel, 5001) if backend.slow else numel
    tensors = [random(numel, dtype, backend.device, i) for i in range(count)]
    out = poisoned(numel, dtype, backend.device)
    assert kernels.sum_n(tensors, out=out, scale=0.7) is out
    magnitude = kernels.sum_n_reference([tensor.abs() for tensor in tensors], scale=0.7)
    bound = tolerance(dtype, count)
    assert_close(out, kernels.sum_n_reference(tensors, scale=0.7), magnitude, bound)
    assert bits(kernels.sum_n([misaligned(t) for t in tensors], scale=0.7)) == bits(out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", range(4))
def test_sum_n_into_each_input(backend, dtype, place):
    numel = 3001 if backend.slow else 66001
    tensors = [random(numel, dtype, backend.device, 10 + i) for i in range(4)]
    expected = kernels.sum_n(tensors)
    assert bits(kernels.sum_n(tensors, out=tensors[place])) == bits(expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("target", ["new", "a", "b", "misaligned"])
def test_scaled_add(backend, dtype, numel, target):
    numel = min(numel, 5001) if backend.slow else numel
    a, b = (random(numel, dtype, backend.device, seed) for seed in (1, 2))
    expected = kernels.scaled_add_reference(a, b, alpha=0.7, beta=-1.3)
    magnitude = kernels.scaled_add_reference(a.abs(), b.abs(), alpha=0.7, beta=1.3)
    out = poisoned(numel, dtype, backend.device)
    out = {"new": out, "a": a, "b": b, "misaligned": misaligned(out)}[target]
    moved = bits(kernels.scaled_add(a, misaligned(b), alpha=0.7, beta=-1.3))
    kernels.scaled_add(a, b, alpha=0.7, beta=-1.3, out=out)
    assert_close(out, expected, magnitude, tolerance(dtype, 2))
    assert bits(out) == moved


def test_scaled_add_with_factors_beyond_float32(backend):
    a = random(1000, torch.float32, backend.device, 1) * 1e-30
    b = random(1000, torch.float32, backend.device, 2) * 1e20
    got = kernels.scaled_add(a, b, alpha=1e50, beta=1e-3)
    expected = kernels.scaled_add_reference(a, b, alpha=1e50, beta=1e-3)
    magnitude = kernels.scaled_add_reference(a.abs(), b.abs(), alpha=1e50, beta=1e-3)
    assert_close(got, expected, magnitude, tolerance(torch.float32, 2))


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("move", [False, True])
def test_sum_n_into_another_dtype(backend, source, target, move):
    numel = 3001 if backend.slow else 140_001
    tensors = [random(numel, source, backend.device, seed) for seed in range(3)]
    if move:
        tensors = [misaligned(tensor) for tensor in tensors]
    out = poisoned(numel, target, backend.device)
    kernels.sum_n(tensors, out=out, scale=0.3)
    magnitude = kernels.sum_n_reference([tensor.abs() for tensor in tensors], scale=0.3)
    bound = _bound(source, target, backend, 3)
    assert_close(out, kernels.sum_n_reference(tensors, scale=0.3), magnitude, bound)
    assert bits(kernels.sum_n(tensors, dtype=target, scale=0.3)) == bits(out)


@pytest.mark.parametrize(("left", "right", "target"), THREE)
def test_scaled_add_of_three_dtypes(backend, left, right, target):
    numel = 1003 if backend.slow else 140_001
    a, b = random(numel, left, backend.device, 1), random(numel, right, backend.device, 2)
    out = poisoned(numel, target, backend.device)
    kernels.scaled_add(a, b, alpha=0.7, beta=-1.3, out=out)
    expected = kernels.scaled_add_reference(a, b, alpha=0.7, beta=-1.3)
    magnitude = kernels.scaled_add_reference(a.abs(), b.abs(), alpha=0.7, beta=1.3)
    wide = torch.float64 if torch.float64 in (left, right) else left
    assert_close(out, expected, magnitude, _bound(wide, target, backend, 2))


@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("move", [False, True])
def test_float64_becomes_other_dtypes_as_in_torch(backend, target, move):
    # Near the middle of two neighbours, and apart by less than float32 sees.
    x = 1 + torch.finfo(target).eps * (torch.arange(1027, dtype=torch.float64) + 0.5)
    x[::2] += 2.0**-50
    expected = bits(x.to(target))
    x = x.to(backend.device)
    x = misaligned(x) if move else x
    zeros = torch.zeros_like(x)
    assert bits(kernels.sum_n([x, zeros], dtype=target)) == expected
    assert bits(kernels.scaled_add(x, zeros, dtype=target)) == expected
    layout = kernels.layout_of([x], dtype=target)
    assert bits(kernels.pack([x], layout=layout)[:1027]) == expected
    outs = [torch.empty(1027, dtype=target, device=backend.device)]
    layout = kernels.layout_of(outs, dtype=torch.float64)
    buffer = torch.zeros(layout.numel, dtype=torch.float64, device=backend.device)
    buffer[:1027] = x
    assert bits(kernels.unpack(buffer, outs, layout=layout)[0]) == expected


def _bound(source: torch.dtype, target: torch.dtype, backend: Backend, terms: int) -> float:
    """As `tolerance` of `target`; float64 on its way to another dtype passes through float32."""
    if source == torch.float64 and target != torch.float64:
        return tolerance(target, terms) + torch.finfo(torch.float32).eps
    return tolerance(target, terms)
