"""Inputs that the rows share: fresh random values, sizes, labels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bench.kernels.timing import DEVICE
from bench.shapes import Shape

KIB, MIB = 1 << 10, 1 << 20
# Powers of four.
SIZES = {
    "cuda": [64 * KIB << 2 * k for k in range(8)],
    "cpu": [64 * KIB << 2 * k for k in range(6)],
}[DEVICE]
# Where a row is about something else than size.
FEW_SIZES = {"cuda": [MIB, 64 * MIB, 1024 * MIB], "cpu": [256 * KIB, 16 * MIB]}[DEVICE]

_generator = torch.Generator(DEVICE).manual_seed(0)


def normal(
    shape: Shape | int, dtype: torch.dtype = torch.float32, misaligned: bool = False
) -> Tensor:
    """Normal values, never the same twice; contiguous, and one element off 16 bytes on request."""
    size = (shape,) if isinstance(shape, int) else shape
    values = torch.randn(size, generator=_generator, device=DEVICE)
    if not misaligned:
        return values.to(dtype)
    base = torch.empty(values.numel() + 1, dtype=dtype, device=DEVICE)
    return base[1:].view(size).copy_(values)


def count_of(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def size_label(nbytes: int) -> str:
    """64 KiB, 16 MiB, 1 GiB."""
    for unit, name in ((1 << 30, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"


def short(dtype: torch.dtype) -> str:
    """fp16, bf16, fp32, fp64."""
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
