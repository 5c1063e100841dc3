"""Sums over the ranks of a node in one launch each, on compiled code in the emulator."""

from __future__ import annotations

from functools import reduce

import pytest
import torch

pytest.importorskip("triton")

import kernels
from kernels.gpu import node_kernels
from kernels.gpu.node_kernels import Node
from kernels.gpu.node_slices import slice_of
from tests.kernels.cases import DTYPES, assert_close, bits, tolerance
from tests.kernels.gpu.node_memory import Ranks, interleave
from tests.ptx_emulator.driver import emulated


@pytest.fixture(autouse=True)
def _few_spins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the clock often: in the emulator's time a wait is short."""
    monkeypatch.setattr(node_kernels, "_SPINS", 16)


def expect_sum(ranks: Ranks, kinds: str, scale: float) -> None:
    """All ranks hold the bits of `sum_n`, near the float64 sum, and nothing beside it changed."""
    expected = bits(kernels.sum_n(ranks.vectors, scale=scale))
    exact = torch.stack([x.double() for x in ranks.vectors]).sum(0) * scale
    size = torch.stack([x.double().abs() for x in ranks.vectors]).sum(0) * scale
    for rank in range(ranks.size):
        for kind in kinds.split():
            got = ranks.held(rank) if kind == "two" else ranks.results[rank]
            assert bits(got) == expected
            assert_close(got, exact, size, tolerance(ranks.dtype, ranks.size))
        ranks.nodes[rank].check()
    ranks.check_guards()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_of_each_dtype_has_the_bits_of_sum_n_on_all_ranks(dtype):
    # Whole vectors and some elements behind them, on programs that have several tiles or none.
    sizes = [(2, 1037), (3, 2)] + [(3, 40), (2, 1), (2, 0)] * (dtype == torch.float32)
    with emulated() as emulator:
        for size, numel in sizes:
            ranks = Ranks(size, numel, dtype, seed=numel)
            ranks.fill()
            ranks.run(emulator, "two one", 1 / size)
            expect_sum(ranks, "two one", 1 / size)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_program_with_several_tiles_and_vectors_off_their_alignment(dtype, monkeypatch):
    monkeypatch.setattr(node_kernels, "MAX_PROGRAMS", 2)
    ranks = Ranks(2, 8200, dtype)
    ranks.fill()
    with emulated(races=dtype == torch.float16) as emulator:
        ranks.run(emulator, "two")
        assert {one.grid for one in emulator.launches} == {2}
        expect_sum(ranks, "two", 1.0)
        short = Ranks(2, 700, dtype)
        short.vectors = [torch.cat([x[:1], x])[1:] for x in short.vectors]
        short.run(emulator, "one")
        expect_sum(short, "one", 1.0)


def test_ranks_whose_tiles_do_not_fit_in_the_registers_have_the_bits_of_sum_n():
    ranks = Ranks(11, 440, torch.float32)
    ranks.fill()
    with emulated() as emulator:
        ranks.run(emulator, "two", 0.25)
    expect_sum(ranks, "two", 0.25)


@pytest.mark.parametrize(("size", "numel"), [(2, 1037), (3, 40), (3, 2)])
def test_slices_stay_with_their_ranks_until_they_are_gathered(size, numel):
    ranks = Ranks(size, numel, torch.bfloat16, seed=numel)
    ranks.fill()
    total = kernels.sum_n(ranks.vectors, scale=0.5)
    with emulated() as emulator:
        ranks.run(emulator, "scatter", 0.5)
        for rank, mine in enumerate(ranks.vectors):
            start, length = ranks.nodes[rank].slice(numel, 2)
            expected = mine.clone()
            expected[start : start + length] = total[start : start + length]
            assert bits(ranks.held(rank)) == bits(expected)
            # As what the nodes' slices together give.
            ranks.held(rank)[start : start + length] *= 2
        ranks.run(emulator, "gather")
        expect_sum(ranks, "two", 1.0)


@pytest.mark.parametrize(("size", "count"), [(2, 30), (4, 6), (8, 2)])
def test_launches_in_any_interleaving_give_the_sum(size, count):
    kinds = ("one one one", "fill two read fill two", "one fill two one", "fill scatter gather one")

    def make(batch: int, number: int) -> tuple[Ranks, str]:
        ranks = Ranks(size, 5 + 4 * size * (batch % 3), DTYPES[batch // 4 % 4], number)
        return ranks, kinds[batch % 4]

    def check(ranks: Ranks, wanted: str) -> None:
        wide = torch.float64 if ranks.dtype == torch.float64 else torch.float32
        total = reduce(torch.add, [x.to(wide) for x in ranks.vectors]).to(ranks.dtype)
        for rank in range(size):
            assert bits(ranks.results[rank]) == bits(total)
            assert "fill" not in wanted or bits(ranks.held(rank)) == bits(total)
            ranks.nodes[rank].check()
        ranks.check_guards()

    with emulated() as emulator:
        interleave(emulator, size, count, 60 // size, 150, make, check)


@pytest.mark.parametrize("absent", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_rank_that_never_comes_is_an_error_on_the_others_and_no_hang(absent):
    ranks = Ranks(3, 100, torch.float32, timeout=3e-6)
    ranks.fill()
    with emulated() as emulator:
        ranks.run(emulator, "two one", absent=(absent,))
        for rank in {0, 1, 2} - {absent}:
            with pytest.raises(TimeoutError, match=f"rank {rank} .*that rank {absent} came"):
                ranks.nodes[rank].check()
            assert bits(ranks.held(rank)) == bits(ranks.vectors[rank])
            # The launch behind did nothing.
            assert ranks.results[rank].isnan().all()
        # Who comes when the others have given up waits for them in vain.
        ranks.run(emulator, "two", absent={0, 1, 2} - {absent})
        others = ", ".join(str(rank) for rank in range(3) if rank != absent)
        with pytest.raises(TimeoutError, match=f"ranks {others} wrote"):
            ranks.nodes[absent].check()


def test_host_that_gives_up_ends_what_waits_and_what_is_behind():
    ranks = Ranks(2, 100, torch.float32)
    ranks.fill()
    ranks.nodes[0].give_up()
    with emulated() as emulator:
        # Within a look at the clock: in the emulator's time the 600 s would not pass.
        ranks.run(emulator, "two one", absent=(1,))
    with pytest.raises(TimeoutError, match="rank 0 gave up its launches"):
        ranks.nodes[0].check()
    assert bits(ranks.held(0)) == bits(ranks.vectors[0])
    assert ranks.results[0].isnan().all()


def test_each_rank_reads_its_slice_once_and_writes_it_to_all():
    ranks = Ranks(4, 4096, torch.bfloat16)
    ranks.fill()
    with emulated(traffic=True) as emulator:
        ranks.run(emulator, "two")
    assert len(emulator.launches) == 4
    share = 4096 * 2 // 4
    for launched in emulator.launches:
        assert launched.name == "_two_shot_kernel"
        traffic = launched.traffic
        # In sectors of 32 bytes, by accesses of 16 bytes a thread.
        assert traffic.load_sectors[16] == traffic.store_sectors[16] == 4 * share // 32
        # Beside them flags, tables and turns, a few sectors a program.
        assert traffic.distinct_loaded <= 4 * share + 32 * 8 * launched.grid
        assert traffic.distinct_stored <= 4 * share + 32 * launched.grid


def test_slices_are_whole_vectors_that_cover_all():
    for numel in (0, 1, 7, 64, 1001):
        for size in (1, 2, 3, 8):
            for itemsize in (2, 4, 8):
                slices = [slice_of(numel, itemsize, size, rank) for rank in range(size)]
                ends = [start + length for start, length in slices]
                assert [start for start, _ in slices] == [0, *ends[:-1]]
                assert ends[-1] == numel
                assert all(start * itemsize % 16 == 0 or length == 0 for start, length in slices)


def test_memory_that_no_kernel_can_take_is_a_value_error():
    device = torch.device("cpu")
    with pytest.raises(ValueError, match="got 2 and 2 on rank 2"):
        Node(2, [0, 16], [0, 16], device)
    with pytest.raises(ValueError, match="got 2 and 1 on rank"):
        Node(0, [0, 16], [0], device)
    with pytest.raises(ValueError, match="at most 32"):
        Node(0, [0] * 33, [0] * 33, device)
    with pytest.raises(ValueError, match="multiple of 16"):
        Node(0, [0, 24], [0, 16], device)
    ranks = Ranks(1, 4, torch.float32)
    with pytest.raises(ValueError, match="offset is 8"):
        ranks.nodes[0].bind_two_shot(4, torch.float32, 8)
    long = torch.empty(65537)
    with pytest.raises(ValueError, match="262148 bytes, a one-shot sum at most 262144"):
        ranks.nodes[0].bind_one_shot(long, long)
