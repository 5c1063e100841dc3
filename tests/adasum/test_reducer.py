"""The Adasum reducer against a float64 tree, ranks as threads."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import collectives
from adasum import Adasum
from collectives import Needs, Operands
from collectives.reducers import Piece
from tests.adasum.definition import relative_error, tolerance, tree
from tests.ptx_emulator.driver import emulated

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
# 1003 is no multiple of any number of ranks, so pieces differ in size and cuts fall in segments;
# there is an empty segment, one of one element, and one longer than any piece.
BOUNDS = (0, 1, 1, 130, 900, 1003)


def _inputs(size: int, numel: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed + 31 * size)
    common = torch.randn(numel, generator=generator, dtype=torch.float64)
    # A common part makes the vectors neither parallel nor orthogonal: coefficients matter.
    return [
        (common + torch.randn(numel, generator=generator, dtype=torch.float64)).to(dtype)
        for _ in range(size)
    ]


def _reduce(
    vectors: list[Tensor], algorithm: str | None, bounds: tuple[int, ...] | None
) -> list[Tensor]:
    def run(group: collectives.Group) -> Tensor:
        mine = vectors[group.rank].clone()
        return group.all_reduce(mine, Adasum, algorithm=algorithm, segments=bounds)

    return collectives.run_threads(len(vectors), run)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("algorithm", ["vhdd", "rd"])
@pytest.mark.parametrize("size", range(1, 10))
def test_adasum_on_any_number_of_ranks_equals_the_float64_tree(
    size: int, algorithm: str, dtype: torch.dtype
) -> None:
    vectors = _inputs(size, BOUNDS[-1], dtype)
    results = _reduce(vectors, algorithm, BOUNDS)
    again = _reduce(vectors, algorithm, BOUNDS)
    want = tree(vectors, BOUNDS)
    assert relative_error(results[0], want) <= tolerance(dtype)
    for low, high in itertools.pairwise(BOUNDS):
        assert relative_error(results[0][low:high], want[low:high]) <= tolerance(dtype)
    for result in results + again:
        assert torch.equal(result, results[0])


def test_algorithm_is_direct_of_3_to_16_ranks_and_by_size_of_others() -> None:
    for size in range(2, 20):
        for nbytes, of_others in ((1024, "rd"), (1 << 24, "vhdd")):
            expected = "direct" if 3 <= size <= 16 else of_others
            assert Adasum.algorithm(nbytes, size) == expected
    assert Adasum.needs is Needs.ONE_TREE


def test_reduction_on_a_gpu_waits_for_no_other_program() -> None:
    """A cooperative launch beside NCCL's kernels could wait for them, and they for other ranks."""
    pytest.importorskip("triton")
    left, right = _inputs(2, 1003, torch.float32)
    pieces = [Piece((left, right), torch.empty_like(left), 0)]
    with emulated() as emulator:
        Adasum.reduce(Operands(pieces, 1003, BOUNDS, None))
        first = pieces[0].out.clone()
        Adasum.bind(Operands(pieces, 1003, BOUNDS, None))()
    assert [each.name for each in emulator.launches] == ["_dots_kernel", "_combine_kernel"] * 2
    assert torch.equal(first, pieces[0].out)
