"""What is compiled for other architectures, beside what is for sm_90."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import kernels
from kernels.gpu import launcher
from tests.kernels.cases import bits, misaligned, random, relative_l2
from tests.ptx_emulator.driver import emulated

NUMEL = 2051
CUTS = (0, 700, 704, 2048, NUMEL)


def elementwise(dtype: torch.dtype) -> list[Tensor]:
    """The answer of every function without dot products, its scalar and its vector way."""
    a, b = (random(NUMEL, dtype, "cpu", seed) for seed in (1, 2))
    found = torch.zeros(())
    c = misaligned(b)
    packed = kernels.pack([a, c], scale=0.3, found_inf=found)
    dots = kernels.dot_and_norms_reference(a, b, CUTS)
    return [
        packed,
        *kernels.unpack(packed, [torch.empty_like(a), torch.empty_like(b)], scale=3.0),
        kernels.sum_n([a, b, a]),
        kernels.sum_n([a, b, a, c, a], order="tree", accumulate=dtype),
        kernels.sum_n([a, c], dtype=torch.float32, found_inf=found),
        kernels.scaled_add(a, b, alpha=0.3, beta=-7.0),
        kernels.combine(a, c, dots, CUTS, found_inf=found),
        found,
    ]


def projected(dtype: torch.dtype) -> list[Tensor]:
    """Dot products, and what is made of them in one launch and in two."""
    a, b = (random(NUMEL, dtype, "cpu", seed) for seed in (1, 2))
    return [
        kernels.dot_and_norms(a, b, CUTS),
        kernels.adasum(a[:1024], b[:1024], (0, 8, 512, 1024)),
        kernels.adasum(a, b, CUTS),
    ]


def blended(dtype: torch.dtype) -> list[Tensor]:
    """Gram matrices, for whose five tensors sm_120 has options of its own, and a blend of them."""
    tensors = [random(NUMEL, dtype, "cpu", seed) for seed in range(5)]
    factors = random((len(CUTS) - 1, 5), torch.float64, "cpu", 9)
    return [kernels.gram(tensors, CUTS), kernels.weighted_sum(tensors, factors, CUTS)]


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        (80, torch.bfloat16),
        (100, torch.float32),
        pytest.param(80, torch.float32, marks=pytest.mark.slow),
        pytest.param(100, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(100, torch.float16, marks=pytest.mark.slow),
        pytest.param(120, torch.float32, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_bits_of_sm_90(capability, dtype):
    with emulated(90):
        expected, exact = [*elementwise(dtype), *blended(dtype)], projected(dtype)
    with emulated(capability) as emulator:
        assert launcher.chip_of(torch.device("cpu")).capability == capability
        got, close = [*elementwise(dtype), *blended(dtype)], projected(dtype)
    assert len(emulator.launches) == 12
    assert list(map(bits, got)) == list(map(bits, expected))
    if capability == 80:
        assert list(map(bits, close)) == list(map(bits, exact))
    # From sm_100 on two float32 are added at once, in another order: see docs/bits.md.
    for mine, theirs in zip(close, exact, strict=True):
        assert relative_l2(mine, theirs.double()) <= torch.finfo(dtype).eps
