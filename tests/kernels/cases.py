"""Inputs, tolerances and comparisons that the kernel tests share."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator

import torch
from torch import Tensor

# Elements whose dot products compiled code adds up on their own: lengths around it are worth a try.
BLOCK = 8192
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SPECIAL = torch.tensor(
    [math.nan, math.inf, -math.inf, 0.0, -0.0, -0.0, 1e-45, -1e-40, 6e-8, 65504.0, 3e38, 1e300],
    dtype=torch.float64,
)


def rounding(dtype: torch.dtype) -> float:
    """Relative error of one rounding to `dtype`."""
    return torch.finfo(dtype).eps / 2


def tolerance(dtype: torch.dtype, terms: int = 1) -> float:
    """Bound on error / sum of magnitudes for `terms` products summed wide and rounded once.

    One rounding to the dtype, and in the wide dtype one a product, one a scalar and one an
    addition: (3 terms + 1) of eps/2, doubled for second-order terms.
    """
    wide = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    return rounding(dtype) * 1.01 + (3 * terms + 1) * wide


def random(shape: int | tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """Normal values, fresh for every seed."""
    generator = torch.Generator().manual_seed(seed)
    size = (shape,) if isinstance(shape, int) else shape
    values = torch.randn(size, generator=generator, dtype=torch.float64)
    return values.to(dtype).to(device)


def poisoned(shape: int | tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Memory that no kernel has written: NaN."""
    return torch.full((shape,) if isinstance(shape, int) else shape, math.nan, dtype=dtype).to(
        device
    )


def misaligned(tensor: Tensor) -> Tensor:
    """The same values in a contiguous view that starts one element off any 16-byte boundary."""
    base = poisoned(tensor.numel() + 1, tensor.dtype, str(tensor.device))
    view = base[1:].view(tensor.shape)
    return view.copy_(tensor)


def reserved(nbytes: int) -> Tensor:
    """uint8 tensor over address space that no memory stands behind until it is touched."""
    # Python before 3.13 has no name for Linux's flag.
    unreserved = getattr(mmap, "MAP_NORESERVE", 0x4000)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | unreserved
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=torch.uint8)


def assert_close(actual: Tensor, expected: Tensor, scale: Tensor, bound: float) -> None:
    """|actual - expected| <= bound * scale + the spacing of subnormals, element by element."""
    assert actual.shape == expected.shape
    error = (actual.double() - expected).abs()
    floor = torch.finfo(actual.dtype).smallest_normal * torch.finfo(actual.dtype).eps
    excess = error - (bound * scale.abs() + floor)
    assert not error.isnan().any(), "NaN in the result"
    assert (excess <= 0).all(), f"error exceeds its bound by {excess.max().item():.3g}"


def relative_l2(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| in float64."""
    return ((actual.double() - expected).norm() / expected.norm()).item()


def bits(tensor: Tensor) -> bytes:
    """The raw bytes, so that equal NaNs are equal and 0 differs from -0."""
    return tensor.contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes()


def canonical(tensor: Tensor) -> bytes:
    """The bits, with one NaN for all: which one comes out is up to the processor."""
    return bits(torch.where(tensor.isnan(), torch.full_like(tensor, math.nan), tensor))


def cuts(numel: int) -> Iterator[tuple[int, ...] | None]:
    """Segment lists for one buffer: none, one, empty ones, cuts anywhere, a cut at every tile."""
    yield None
    yield (0, numel)
    yield (0, 0, numel // 3, numel // 3, numel // 3, numel - 1, numel, numel)
    yield tuple(sorted({0, 1, 5, 16, 1000, 1024, 1031, numel // 2 + 1, numel}))
