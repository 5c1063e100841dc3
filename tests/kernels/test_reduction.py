"""sum_n and scaled_add against float64."""

from __future__ import annotations

import pytest
import torch

import kernels
from tests.kernels.cases import DTYPES, assert_close, bits, misaligned, poisoned, random, tolerance

# The last is more than one block of the CPU path and many tiles of the other.
SIZES = [0, 1, 7, 1024, 70001]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_sum_n(backend, dtype, numel, count):
    numel = min(numel, 5001) if backend.interpreted else numel
    tensors = [random(numel, dtype, backend.device, i) for i in range(count)]
    out = poisoned(numel, dtype, backend.device)
    assert kernels.sum_n(tensors, out=out, scale=0.7) is out
    magnitude = kernels.sum_n_reference([tensor.abs() for tensor in tensors], scale=0.7)
    bound = tolerance(dtype, backend.interpreted, count)
    assert_close(out, kernels.sum_n_reference(tensors, scale=0.7), magnitude, bound)
    assert bits(kernels.sum_n([misaligned(t) for t in tensors], scale=0.7)) == bits(out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", range(4))
def test_sum_n_into_each_input(backend, dtype, place):
    numel = 3001 if backend.interpreted else 66001
    tensors = [random(numel, dtype, backend.device, 10 + i) for i in range(4)]
    expected = kernels.sum_n(tensors)
    assert bits(kernels.sum_n(tensors, out=tensors[place])) == bits(expected)


def test_sum_n_of_zero_dim(backend):
    tensors = [random((), torch.float32, backend.device, i) for i in range(3)]
    assert kernels.sum_n(tensors).shape == ()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("target", ["new", "a", "b", "misaligned"])
def test_scaled_add(backend, dtype, numel, target):
    numel = min(numel, 5001) if backend.interpreted else numel
    a, b = (random(numel, dtype, backend.device, seed) for seed in (1, 2))
    expected = kernels.scaled_add_reference(a, b, alpha=0.7, beta=-1.3)
    magnitude = kernels.scaled_add_reference(a.abs(), b.abs(), alpha=0.7, beta=1.3)
    out = poisoned(numel, dtype, backend.device)
    out = {"new": out, "a": a, "b": b, "misaligned": misaligned(out)}[target]
    kernels.scaled_add(a, b, alpha=0.7, beta=-1.3, out=out)
    assert_close(out, expected, magnitude, tolerance(dtype, backend.interpreted, 2))


def test_scaled_add_with_factors_beyond_float32(backend):
    a = random(1000, torch.float32, backend.device, 1) * 1e-30
    b = random(1000, torch.float32, backend.device, 2) * 1e20
    got = kernels.scaled_add(a, b, alpha=1e50, beta=1e-3)
    expected = kernels.scaled_add_reference(a, b, alpha=1e50, beta=1e-3)
    magnitude = kernels.scaled_add_reference(a.abs(), b.abs(), alpha=1e50, beta=1e-3)
    assert_close(got, expected, magnitude, tolerance(torch.float32, backend.interpreted, 2))
