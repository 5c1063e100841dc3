"""NaN, Inf, overflow, and segments of zeros."""

from __future__ import annotations

import math

import pytest
import torch

from adasum import Adasum
from collectives import Average, Group, Sum, run_threads

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


def _reduced(vectors: list[torch.Tensor], algorithm: str, op: object = Adasum) -> torch.Tensor:
    def run(group: Group) -> torch.Tensor:
        mine = vectors[group.rank].clone()
        group.all_reduce(mine, op, algorithm=algorithm, segments=BOUNDS)
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


@pytest.mark.parametrize("algorithm", ["xring", "rechd", "rd", "pscpu"])
def test_sums_with_non_finite_values_keep_them_in_their_elements(algorithm: str) -> None:
    for op in (Sum, Average):
        for dtype in FLOATS:
            vectors = _vectors(dtype)
            clean = _reduced(vectors, algorithm, op)
            vectors[1][7], vectors[2][9], vectors[3][11] = math.nan, math.inf, -math.inf
            vectors[0][13], vectors[3][13] = math.inf, -math.inf
            found = _reduced(vectors, algorithm, op)
            assert found[7].isnan() and found[13].isnan()
            assert found[9] == math.inf and found[11] == -math.inf
            kept = [i for i in range(BOUNDS[-1]) if i not in (7, 9, 11, 13)]
            assert torch.equal(found[kept], clean[kept])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_float16_average_overflows_only_where_the_result_does(algorithm: str) -> None:
    top = torch.finfo(torch.float16).max
    # Equal vectors: the average, which no step may pass on its way.
    equal = [torch.full((203,), top, dtype=torch.float16) for _ in range(SIZE)]
    assert torch.equal(_reduced(equal, algorithm), equal[0])
    # Orthogonal ones add up: past the top in the first segment, in elements of their own elsewhere.
    signs = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])
    vectors = [torch.zeros(203, dtype=torch.float16) for _ in range(SIZE)]
    for rank, vector in enumerate(vectors):
        vector[:4] = 3e4 * signs[rank]
        vector[80 + rank] = top
        vector[140:] = 1.0
    found = _reduced(vectors, algorithm)
    assert found[131:].eq(0).sum() == 9 and found[140:].eq(1).all()
    if "/" in algorithm:
        # Within a node the average: halves, so that the sum of two is within the range.
        assert found.isfinite().all() and found[0] == 6e4
        assert found[80:84].tolist() == [top / 2] * 4
        return
    if algorithm in ("xring", "psgpu"):
        # In a line the sum of three is past the top already, and Inf has no projection.
        assert not found[:70].isfinite().any()
    else:
        assert found[0] == math.inf and not found[1:4].any()
    assert found[80:84].tolist() == [top] * 4


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
