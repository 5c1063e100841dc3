"""What all rows share: sizes, fresh random inputs, and the copy that is the roof."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from bench.kernels.timing import DEVICE, Call
from bench.shapes import Shape

KIB, MIB = 1 << 10, 1 << 20
# Powers of four.
SIZES = {
    "cuda": [64 * KIB << 2 * k for k in range(8)],
    "cpu": [64 * KIB << 2 * k for k in range(6)],
}[DEVICE]
# For rows that are about something else than size.
FEW_SIZES = {"cuda": [MIB, 64 * MIB, 1024 * MIB], "cpu": [256 * KIB, 16 * MIB]}[DEVICE]

# Of planned runs: where the checks of a direct call take most of its time.
PLAN_SIZES = [4 * KIB, 64 * KIB, MIB]
PLANNED = "planned"
# Rows on a GPU alone: the host's time counts there as it does on a CPU anyway. Fresh addresses are
# those of tensors that were in no call before.
WALL, FRESH = "wall clock", "fresh addresses"
# More lists than the library keeps tables of.
FRESH_SETS = 600
# A model's worth of segments that fit on a chip together, on 16-byte boundaries.
MANY, MANY_NUMEL = 160, 13_104
# Far beyond any cache: H200 has 60 MB of L2; two of these are four times a server core's L3.
LARGE = {"cuda": 1 << 30, "cpu": 1 << 26}


@functools.cache
def _generator() -> torch.Generator:
    # Not made at import: on CUDA it would start the device for whoever reads a table.
    return torch.Generator(DEVICE).manual_seed(0)


def normal(
    shape: Shape | int, dtype: torch.dtype = torch.float32, misaligned: bool = False
) -> Tensor:
    """Return normal values, new in each call, contiguous; misaligned: one element off 16 bytes."""
    size = (shape,) if isinstance(shape, int) else shape
    values = torch.randn(size, generator=_generator(), device=DEVICE)
    if not misaligned:
        return values.to(dtype)
    base = torch.empty(values.numel() + 1, dtype=dtype, device=DEVICE)
    return base[1:].view(size).copy_(values)


def size_label(nbytes: int) -> str:
    """Return the size in the largest unit: 64 KiB, 16 MiB, 1 GiB."""
    for unit, name in ((1 << 30, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"


def copy_roof(traffic: int) -> tuple[Call, int]:
    """Return a copy to time beside a kernel that moves `traffic` bytes, and the bytes it moves.

    On CUDA it is always the large one. On the CPU it moves as much as the kernel, up to the large
    one, so that a kernel whose data stay in a cache is compared with that cache.
    """
    size = LARGE[DEVICE]
    if DEVICE == "cpu":
        size = max(4096, min(size, traffic // 2 // 4 * 4))
    return _copy(size), 2 * size


def read_roof() -> tuple[Call, int]:
    """Return a sum, which reads and hardly writes, for kernels that do the same, and its bytes."""
    return _sum(LARGE[DEVICE]), LARGE[DEVICE]


@functools.lru_cache(maxsize=1)
def _sum(size: int) -> Call:
    source, total = torch.rand(size // 4, device=DEVICE), torch.empty((), device=DEVICE)
    return lambda: torch.sum(source, 0, out=total)


@functools.lru_cache(maxsize=1)
def _copy(size: int) -> Call:
    source = torch.rand(size // 4, device=DEVICE)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)
