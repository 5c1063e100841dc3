"""What the compiled kernels ask of memory: each byte once, in whole sectors, by whole warps.

A sector is 32 bytes, the least that memory gives. A warp that asks for single elements with gaps
between its threads moves the same bytes again and again, which no result would show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import kernels
from kernels.gpu import chunking
from kernels.gpu.launcher import Chip
from tests.kernels.cases import misaligned, random
from tests.ptx_emulator.driver import SMALL_CHIP, Emulator, emulated
from tests.ptx_emulator.memory import SECTOR

NUMEL = 1 << 14
THIRD = NUMEL // 3
# Tables, partials and coefficients are int64 and float64; tensors here never are.
CONTROL = 8


@pytest.fixture
def emulator() -> Iterator[Emulator]:
    with emulated(
        traffic=True, races=False, chip=SMALL_CHIP._replace(multiprocessors=16)
    ) as emulator:
        yield emulator


class Call(NamedTuple):
    """needs: bytes of tensors that must move."""

    run: Callable[[list[Tensor]], Any]
    needs: Callable[[list[Tensor]], int]


def _unpack(tensors: list[Tensor]) -> None:
    layout = kernels.layout_of(tensors)
    kernels.unpack(torch.zeros(layout.numel, dtype=layout.dtype), tensors)


def _whole(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


CALLS = {
    "pack": Call(kernels.pack, lambda t: 2 * _whole(t)),
    "unpack": Call(_unpack, lambda t: 2 * _whole(t)),
    "sum_n": Call(kernels.sum_n, lambda t: _whole(t) + t[0].nbytes),
    "scaled_add": Call(lambda t: kernels.scaled_add(*t[:2]), lambda t: 3 * t[0].nbytes),
    "dot_and_norms": Call(lambda t: kernels.dot_and_norms(*t[:2]), lambda t: 2 * t[0].nbytes),
    "adasum": Call(lambda t: kernels.adasum(*t[:2]), lambda t: 3 * t[0].nbytes),
    "combine": Call(
        lambda t: kernels.combine(*t[:2], torch.ones(1, 3).double()), lambda t: 3 * t[0].nbytes
    ),
    "gram": Call(kernels.gram, _whole),
    "weighted_sum": Call(
        lambda t: kernels.weighted_sum(t, torch.ones(1, 4).double()),
        lambda t: _whole(t) + t[0].nbytes,
    ),
}
DTYPES = (torch.float16, torch.float32)


def sectors(emulator: Emulator) -> int:
    """Bytes of the sectors that requests for tensors touched."""
    count = 0
    for launched in emulator.launches:
        assert launched.traffic is not None
        for counter in (launched.traffic.load_sectors, launched.traffic.store_sectors):
            count += counter.total() - counter[CONTROL]
    return count * SECTOR


def distinct(emulator: Emulator) -> int:
    """Bytes of all sectors that were read, and of those written, launch by launch."""
    found = [launched.traffic for launched in emulator.launches]
    return sum(traffic.distinct_loaded + traffic.distinct_stored for traffic in found if traffic)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_aligned_tensors_move_once(emulator, name, dtype):
    tensors = [random(NUMEL, dtype, "cpu", seed) for seed in range(4)]
    CALLS[name].run(tensors)
    assert len(emulator.launches) == 1
    assert sectors(emulator) == CALLS[name].needs(tensors)
    # Tables and partials: 64 bytes a tile of 2 KiB, in sectors of their own.
    assert distinct(emulator) <= CALLS[name].needs(tensors) * (1 + 128 / 2048)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "name", ["pack", "unpack", "sum_n", "scaled_add", "combine", "weighted_sum"]
)
@pytest.mark.parametrize("every", [True, False], ids=["all", "one"])
def test_misaligned_tensors_fill_the_sectors_they_touch(emulator, name, dtype, every):
    tensors = [random(NUMEL, dtype, "cpu", seed) for seed in range(4)]
    tensors = [misaligned(t) if every or i == 1 else t for i, t in enumerate(tensors)]
    CALLS[name].run(tensors)
    # A warp's 32 neighbouring elements lie in itemsize sectors, or one more off a boundary.
    bound = 1 + 1 / dtype.itemsize
    assert CALLS[name].needs(tensors) <= sectors(emulator) <= bound * CALLS[name].needs(tensors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unpacking_to_misaligned_tensors_stores_whole_lines(emulator, dtype):
    tensors = [misaligned(random(NUMEL, dtype, "cpu", seed)) for seed in range(4)]
    CALLS["unpack"].run(tensors)
    (launched,) = emulator.launches
    stored = launched.traffic.store_sectors[dtype.itemsize] * SECTOR
    # Of the first tile each warp's request touches one sector more, and of all the two ends do.
    requests = LEAST_TILE // (32 * dtype.itemsize)
    assert _whole(tensors) <= stored <= _whole(tensors) + len(tensors) * (requests + 2) * SECTOR


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_odd_segments_cost_their_own_edges(emulator, dtype):
    a, b = (random(NUMEL, dtype, "cpu", seed) for seed in (1, 2))
    kernels.adasum(a, b, (0, THIRD, NUMEL // 2 + 1, NUMEL))
    assert len(emulator.launches) == 1
    # Off a sector's boundary a warp's 512 bytes touch 17. Of the four edges of two odd boundaries
    # each of a, b, a and b again, and out touches at most two.
    bound = 3 * a.nbytes * (1 + 1 / 16) + 4 * 5 * 2 * SECTOR
    assert 3 * a.nbytes <= sectors(emulator) <= bound


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gram_of_twelve_reads_each_as_often_as_its_group_meets_others(emulator, dtype):
    """Of three groups each meets two. Programs side by side take the same chunk."""
    tensors = [random(NUMEL // 4, dtype, "cpu", seed) for seed in range(12)]
    kernels.gram(tensors)
    assert len(emulator.launches) == 1
    assert sectors(emulator) == 2 * _whole(tensors)


def test_precise_gram_of_what_does_not_cancel_reads_no_tensor_again(emulator):
    tensors = [random(NUMEL, torch.float32, "cpu", seed) for seed in range(2)]
    matrices = kernels.gram(tensors, (0, THIRD, NUMEL), precise=True)
    whole = sectors(emulator)
    emulator.launches.clear()
    assert not matrices[..., 1].any()
    kernels.gram(tensors, (0, THIRD, NUMEL))
    assert sectors(emulator) == whole


# An H200 as torch describes it.
H200 = Chip(132, 60 << 20, dependent_launch=True)
# As many elements as a program of 128 threads has in one vector a thread, in bytes.
LEAST_TILE = 2048
REGIMES = [
    pytest.param(numel, dtype, segments, marks=() if fast else pytest.mark.slow)
    for numel in (1 << 20, 1 << 21, 2_200_064, 3_900_032, 15 << 19, 1 << 23)
    for dtype in (torch.bfloat16, torch.float32, torch.float64)
    for segments in (1, 160)
    for fast in [(numel, dtype, segments) in ((2_200_064, torch.float32, 160),
                                              (3_900_032, torch.float32, 1))]
]  # fmt: skip


@pytest.mark.parametrize(("numel", "dtype", "segments"), REGIMES)
def test_traffic_of_adasum_grows_with_the_data(monkeypatch, numel, dtype, segments):
    """On an H200: 1.1 times the sectors of the data, and a row a chunk, of what L2 is asked for.

    Tiles are `scale` times smaller than there, and so are the tensors and L2. So there are as many
    chunks and programs, each takes the same steps, and what they ask of tables, partials and rows
    is the same; of the data they ask `scale` times less.
    """
    size = dtype.itemsize
    block, warps = chunking.tile_of(numel, size)
    scale = block * size // LEAST_TILE
    monkeypatch.setattr(chunking, "tile_of", lambda *_: (block // scale, warps))
    bounds = tuple(numel // scale * i // segments // 64 * 64 for i in range(segments))
    bounds = (*bounds, numel // scale)
    tiles = chunking._tiles(bounds, block // scale, chunking._MAX_CHUNKS)
    rows, _ = chunking.cut(bounds, block // scale, 16 // size, tiles)
    there, _ = chunking.cut(tuple(scale * at for at in bounds), block, 16 // size, tiles)
    assert (scale * rows[:, :2] == there[:, :2]).all()

    a, b = (random(numel // scale, dtype, "cpu", seed) for seed in (1, 2))
    chip = H200._replace(cache=H200.cache // scale)
    with emulated(traffic=True, races=False, chip=chip) as emulator:
        out = kernels.adasum(a, b, bounds)
    assert torch.isfinite(out).all()
    one = len(emulator.launches) == 1
    on_chip = len(rows) <= 4 * H200.multiprocessors or 2 * numel * size <= H200.cache // 2
    assert one == (tiles == 1 and on_chip)
    # One launch reads again all chunks but each program's last; the second of two reads all.
    again = rows[: len(rows) - emulator.launches[0].grid, 1].sum() if one else a.numel()
    data, control = 0, 0
    for launched in emulator.launches:
        traffic = launched.traffic
        assert traffic is not None
        data += traffic.load_sectors[16] + traffic.store_sectors[16]
        control += traffic.past_l1.total() - traffic.past_l1[16]
    assert data * SECTOR == (3 * a.numel() + 2 * again) * size
    # Of tables the first of a program's four warps asks L2, and the others L1, whose answers are no
    # traffic: with them it would be up to 61 requests a chunk and not 31. Most of those are for the
    # three numbers of its segment's row, which each warp reads past L1. A row lies in one sector.
    assert control <= 0.1 * scale * data + len(rows)


def test_tails_move_once(emulator):
    tensors = [random(NUMEL // 8 + odd, torch.float16, "cpu", odd) for odd in (1, 3, 5, 7)]
    kernels.pack(tensors)
    # A tensor's last elements are asked for once more, by each of four warps, and stored once more;
    # it and its slot end inside a sector.
    least = 2 * _whole(tensors)
    assert least <= sectors(emulator) <= least + len(tensors) * (4 + 1 + 2) * SECTOR
