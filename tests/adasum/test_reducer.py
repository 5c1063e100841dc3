"""The Adasum reducer against a float64 tree, ranks as threads."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import collectives
from adasum import Adasum
from adasum.pieces import clip
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


@pytest.mark.parametrize("numel", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_adasum_of_fewer_elements_than_ranks_equals_the_tree(size: int, numel: int) -> None:
    vectors = _inputs(size, numel, torch.float32)
    for algorithm in ("vhdd", "rd"):
        results = _reduce(vectors, algorithm, None)
        assert relative_error(results[0], tree(vectors)) <= tolerance(torch.float32)
        assert all(torch.equal(result, results[0]) for result in results)


def test_algorithm_is_direct_of_3_to_16_ranks_and_by_size_of_others() -> None:
    for size in range(2, 20):
        for nbytes, of_others in ((1024, "rd"), (1 << 24, "vhdd")):
            expected = "direct" if 3 <= size <= 16 else of_others
            assert Adasum.algorithm(nbytes, size) == expected
    assert Adasum.needs is Needs.ONE_TREE


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool], ids=str)
def test_adasum_of_other_dtypes_raises_and_names_them(dtype: torch.dtype) -> None:
    tensor = torch.ones(4).to(dtype)

    def run(group: collectives.Group) -> None:
        group.all_reduce(tensor, Adasum)

    with pytest.raises(TypeError, match=str(dtype)):
        collectives.run_threads(1, run)


def test_clip_of_pieces_returns_their_boundaries() -> None:
    assert clip((0, 4, 9), 0, 9) == (0, 2, (0, 4, 9))
    assert clip((0, 4, 9), 2, 4) == (0, 2, (0, 2, 4))
    assert clip((0, 4, 9), 4, 5) == (1, 2, (0, 5))
    assert clip((0, 4, 4, 9), 4, 2) == (2, 3, (0, 2))
    assert clip((0, 4, 4, 9), 3, 2) == (0, 3, (0, 1, 1, 2))
    assert clip((0, 10), 3, 4) == (0, 1, (0, 4))


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
