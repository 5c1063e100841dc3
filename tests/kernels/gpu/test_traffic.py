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
@pytest.mark.parametrize("name", ["pack", "unpack", "sum_n", "scaled_add", "combine"])
@pytest.mark.parametrize("every", [True, False], ids=["all", "one"])
def test_misaligned_tensors_fill_the_sectors_they_touch(emulator, name, dtype, every):
    tensors = [random(NUMEL, dtype, "cpu", seed) for seed in range(4)]
    tensors = [misaligned(t) if every or i == 1 else t for i, t in enumerate(tensors)]
    CALLS[name].run(tensors)
    # A warp's 32 neighbouring elements lie in itemsize sectors, or one more off a boundary.
    bound = 1 + 1 / dtype.itemsize
    assert CALLS[name].needs(tensors) <= sectors(emulator) <= bound * CALLS[name].needs(tensors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_odd_segments_fill_the_sectors_they_touch(emulator, dtype):
    a, b = (random(NUMEL, dtype, "cpu", seed) for seed in (1, 2))
    kernels.adasum(a, b, (0, THIRD, NUMEL // 2 + 1, NUMEL))
    assert [launched.grid for launched in emulator.launches] == [emulator.launches[0].grid] * 2
    bound = 1 + 1 / dtype.itemsize
    # Two launches: a and b are read twice.
    assert 5 * a.nbytes <= sectors(emulator) <= bound * 5 * a.nbytes


def test_tails_move_once(emulator):
    tensors = [random(NUMEL // 8 + odd, torch.float16, "cpu", odd) for odd in (1, 3, 5, 7)]
    kernels.pack(tensors)
    # A tensor's last elements are asked for once more, by each of four warps, and stored once more;
    # it and its slot end inside a sector.
    least = 2 * _whole(tensors)
    assert least <= sectors(emulator) <= least + len(tensors) * (4 + 1 + 2) * SECTOR
