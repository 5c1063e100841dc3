"""Adasum of NaN, of Inf and of zeros."""

from __future__ import annotations

import math

import pytest
import torch

from adasum import Adasum
from collectives import Group, run_threads

# Two clean segments around one that is not, none of them a piece of any rank.
BOUNDS = (0, 70, 131, 203)
ALGORITHMS = ("vhdd", "rd", "direct", "xring", "psgpu", "rechd/vhdd")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SIZE = 4


def _vectors(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randn(BOUNDS[-1], generator=generator, dtype=torch.float64).to(dtype)
        for _ in range(SIZE)
    ]


def _reduced(vectors: list[torch.Tensor], algorithm: str) -> torch.Tensor:
    def run(group: Group) -> torch.Tensor:
        mine = vectors[group.rank].clone()
        group.all_reduce(mine, Adasum, algorithm=algorithm, segments=BOUNDS)
        return mine

    results = run_threads(SIZE, run, local_size=2)
    for result in results:
        assert torch.equal(result.view(torch.uint8), results[0].view(torch.uint8))
    return results[0]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_adasum_with_a_non_finite_segment_keeps_the_others_bits(
    algorithm: str, poison: float
) -> None:
    for dtype in FLOATS:
        vectors = _vectors(dtype)
        clean = _reduced(vectors, algorithm)
        vectors[2][100] = poison
        poisoned = _reduced(vectors, algorithm)
        assert not poisoned[70:131].isfinite().all()
        assert poisoned[100].isnan() or poisoned[100].isinf()
        for low, high in ((0, 70), (131, 203)):
            assert torch.equal(
                poisoned[low:high].view(torch.uint8), clean[low:high].view(torch.uint8)
            )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_zeros_of_both_signs_are_kept(algorithm: str) -> None:
    for dtype in FLOATS:
        zeros = [torch.zeros(203, dtype=dtype) for _ in range(SIZE)]
        assert not _reduced(zeros, algorithm).any()
        if "/" in algorithm:
            continue
        # Zero is the identity, whichever rank is the one that has something.
        for rank in range(SIZE):
            vectors = [zero.clone() for zero in zeros]
            vectors[rank] = _vectors(dtype)[rank]
            assert torch.equal(_reduced(vectors, algorithm), vectors[rank])
