"""Adasum over the ranks of a node in one launch each, on compiled code in the emulator."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import kernels
from collectives.schedules.schedule import split_bounds
from kernels.gpu import node_adasum, node_kernels
from kernels.gpu.node_slices import slice_of
from tests.kernels.cases import bits, random, rounding
from tests.kernels.gpu.node_memory import Ranks, interleave
from tests.kernels.trees import adasum_of, balanced, distance, length
from tests.ptx_emulator.driver import emulated

slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def _few_spins_and_poisoned_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the clock often, as in the emulator's time a wait is short; new memory is NaN."""
    monkeypatch.setattr(node_kernels, "_SPINS", 16)
    plain = torch.empty

    def poisoned(*shape: Any, **options: Any) -> Tensor:
        made: Tensor = plain(*shape, **options)
        made.view(-1).view(torch.uint8).fill_(0xFF)
        return made

    monkeypatch.setattr(node_adasum.torch, "empty", poisoned)


def direct(ranks: Ranks) -> Tensor:
    """What `direct` makes of the vectors, launch by launch, with the node's slices."""
    segments, numel, size = ranks.segments, ranks.numel, ranks.size
    tables = torch.zeros(size, len(segments) - 1, size, size, 2, dtype=torch.float64)
    pieces = []
    for rank in range(size):
        start, count = slice_of(numel, ranks.dtype.itemsize, size, rank)
        edges = [min(max(edge - start, 0), count) for edge in segments]
        parts = [x[start : start + count] for x in ranks.vectors]
        first = max(k for k, edge in enumerate(edges) if edge == 0)
        last = min(k for k, edge in enumerate(edges) if edge == count)
        if count:
            cut = tuple(edges[first : last + 1])
            tables[rank, first:last] = kernels.gram(parts, cut, precise=True)
            pieces.append((parts, slice(first, last), cut))
    found = kernels.adasum_coefficients(tables, ranks.tree)
    return torch.cat([kernels.weighted_sum(x, found[rows], cut) for x, rows, cut in pieces])


def expect_adasum(ranks: Ranks, got: list[Tensor]) -> None:
    """All ranks hold the same bits, in each segment near the tree evaluated with 120 digits."""
    assert len({bits(one) for one in got}) == 1
    for low, high in itertools.pairwise(ranks.segments):
        vectors, mine = [x[low:high] for x in ranks.vectors], got[0][low:high]
        if not all(x.isfinite().all() for x in vectors):
            assert mine.isnan().all()
        elif high > low:
            exact = adasum_of(vectors, ranks.tree, (0, high - low))
            # One rounding, which of bfloat16 is through float32. Coefficients are off by what
            # float64 leaves of the spread, 2**-53 times 2**15 at most.
            floor = torch.finfo(ranks.dtype).smallest_normal * torch.finfo(ranks.dtype).eps
            bound = rounding(ranks.dtype) * 1.001 * length(exact) + floor * (high - low)
            assert distance(mine, exact) <= bound
    for node in ranks.nodes:
        node.check()
    ranks.check_guards()


def held(ranks: Ranks) -> list[Tensor]:
    return [ranks.held(rank) for rank in range(ranks.size)]


# Segments cut by slices and not, empty ones, of one element; several programs and one.
CASES = [
    (2, 2064, torch.float32, (0, 0, 3, 700, 700, 701, 1900, 2064, 2064)),
    # Two programs a rank, which share a segment with those of the other.
    (2, 2064, torch.float32, None),
    *[pytest.param(*case, marks=slow) for case in (
        (3, 1000, torch.float16, None),
        (2, 5, torch.bfloat16, (0, 2, 5)),
        (4, 1024, torch.bfloat16, (0, 100, 900, 1023, 1024)),
        (4, 1, torch.float32, None),
        (5, 333, torch.float32, (0, 1, 2, 300, 333)),
        (6, 96, torch.float16, None),
        (7, 200, torch.bfloat16, (0, 90, 200)),
        (8, 1024, torch.float16, (0, 3, 700, 1024)),
        (8, 333, torch.float32, None),
        (3, 12000, torch.float32, (0, 4001, 4003, 12000)),
    )],
]  # fmt: skip


@pytest.mark.parametrize(("size", "numel", "dtype", "segments"), CASES, ids=str)
def test_adasum_has_the_bits_of_direct_on_all_ranks(size, numel, dtype, segments):
    ranks = Ranks(size, numel, dtype, numel, segments=segments)
    with emulated() as emulator:
        ranks.run(emulator, "fill adasum")
        expect_adasum(ranks, held(ranks))
        assert bits(ranks.held(0)) == bits(direct(ranks))


def test_slices_stay_with_their_ranks_until_they_are_gathered():
    ranks = Ranks(2, 333, torch.float16, 3, segments=(0, 1, 2, 300, 333))
    expected = direct(ranks)
    with emulated() as emulator:
        ranks.run(emulator, "fill join")
        for rank, node in enumerate(ranks.nodes):
            start, length = node.slice(333, 2)
            mine = ranks.vectors[rank].clone()
            mine[start : start + length] = expected[start : start + length]
            assert bits(ranks.held(rank)) == bits(mine)
        ranks.run(emulator, "gather read fill")
        expect_adasum(ranks, ranks.results)
        assert bits(ranks.results[0]) == bits(expected)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [pytest.param(2, torch.float32, marks=slow), pytest.param(3, torch.float16, marks=slow),
     pytest.param(4, torch.bfloat16, marks=slow), pytest.param(8, torch.float32, marks=slow)],
    ids=str,
)  # fmt: skip
def test_vectors_that_are_zero_or_nan_or_cancel_have_the_answer_of_direct(size, dtype):
    """In segments of their own, some of which slices cut; and again in a launch behind that."""
    ranks = Ranks(size, 640, dtype, 5, segments=(0, 60, 300, 301, 380, 460, 550, 640))
    x, y = ranks.vectors[:2]
    y[:60] = 0
    # But for 1e-3 of noise, or a bit, and equal but for one's length.
    y[60:300] = -x[60:300] * (1 + 1e-3 * random(240, torch.float32, "cpu", 9)).to(dtype)
    y[301] = math.nan
    for one in ranks.vectors:
        one[380:460] = 0
    for k, one in enumerate(ranks.vectors):
        one[460:550] = x[460:550] * 2.0**k
    with emulated() as emulator:
        for _ in range(2):
            ranks.run(emulator, "fill adasum")
            expect_adasum(ranks, held(ranks))
            assert bits(ranks.held(0)) == bits(direct(ranks))


def test_no_element_and_one_rank_are_no_launch():
    with emulated() as emulator:
        Ranks(2, 0, torch.float32).nodes[0].bind_adasum(0, torch.float32, balanced(2))()
        Ranks(1, 8, torch.float32).nodes[0].bind_adasum(8, torch.float32, [])()
    assert not emulator.launches


def test_launches_in_any_interleaving_give_the_answer():
    kinds = ("fill adasum read", "fill adasum fill adasum read", "one fill adasum read fill two")
    dtypes = (torch.float32, torch.float16, torch.bfloat16)

    def make(batch: int, number: int) -> tuple[Ranks, str]:
        # Of one segment a rank has one program, of several some.
        numel = 5 + 8 * (batch % 3)
        cuts = (0, numel) if batch % 2 else (0, 2, numel // 2, numel - 1, numel)
        ranks = Ranks(2, numel, dtypes[batch // 6 % 3], number, segments=cuts)
        return ranks, kinds[batch % 3]

    def check(ranks: Ranks, _: str) -> None:
        expect_adasum(ranks, ranks.results)

    with emulated() as emulator:
        interleave(emulator, 2, 6, 2, 300, make, check)


@pytest.mark.parametrize(("size", "absent"), [(2, 1), pytest.param(3, 0, marks=slow)])
def test_rank_that_never_comes_is_an_error_on_the_others_and_no_hang(size, absent):
    ranks = Ranks(size, 100, torch.float32, timeout=3e-6, segments=(0, 30, 60, 100))
    ranks.fill()
    others = {*range(size)} - {absent}
    with emulated() as emulator:
        ranks.run(emulator, "adasum read", absent=(absent,))
        for rank in others:
            with pytest.raises(TimeoutError, match=rf"rank {rank} .*that rank {absent} came"):
                ranks.nodes[rank].check()
            assert bits(ranks.held(rank)) == bits(ranks.vectors[rank])
        # Who comes when the others have given up waits for them in vain.
        ranks.run(emulator, "adasum", absent=others)
        with pytest.raises(TimeoutError, match=f"{', '.join(map(str, others))} did its part"):
            ranks.nodes[absent].check()


def test_each_rank_reads_its_slice_once_from_the_peers_and_once_from_copies():
    ranks = Ranks(2, 4096, torch.float32)
    ranks.fill()
    with emulated(traffic=True) as emulator:
        ranks.run(emulator, "adasum")
    share = 4096 * 4 // 2
    for launched in emulator.launches:
        assert launched.name == "_adasum_kernel"
        traffic = launched.traffic
        # In sectors of 32 bytes, by accesses of 16 bytes a thread: two slices, one of which is
        # copied, and the result to both ranks. Beside them the matrices.
        matrices = 64 * launched.grid
        assert 0 <= traffic.load_sectors[16] - 4 * share // 32 <= matrices
        assert 0 <= traffic.store_sectors[16] - 3 * share // 32 <= matrices
        assert traffic.distinct_stored <= 3 * share + 32 * matrices


def test_slices_are_those_of_direct_where_they_begin_at_16_bytes():
    for size in range(2, 9):
        for itemsize in (2, 4):
            for vectors in (1, 3, 40):
                numel = vectors * size * 16 // itemsize
                starts = [slice_of(numel, itemsize, size, rank)[0] for rank in range(size)]
                assert [*starts, numel] == split_bounds(numel, size)


def test_call_that_no_kernel_can_take_is_an_error():
    node, joined = Ranks(2, 4, torch.float32).nodes[0], balanced(2)
    for dtype in (torch.float64, torch.int32):
        with pytest.raises(TypeError, match=f"float16, bfloat16 and float32, got {dtype}"):
            node.bind_adasum(4, dtype, joined)
    with pytest.raises(ValueError, match="at most 8 ranks, got 9"):
        Ranks(9, 4, torch.float32).nodes[0].bind_adasum(4, torch.float32, balanced(9))
    with pytest.raises(ValueError, match="offset is 8"):
        node.bind_adasum(4, torch.float32, joined, offset=8)
    with pytest.raises(ValueError, match="segments must start at 0 and end at the 4"):
        node.bind_adasum(4, torch.float32, joined, (0, 3))
    with pytest.raises(ValueError, match="tree must join 2 vectors into one by 1 rows"):
        node.bind_adasum(4, torch.float32, [])
