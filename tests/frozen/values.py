"""Inputs that are the same with every version of torch and numpy, and hashes of results."""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Sequence

import numpy as np
import torch

# splitmix64's constants (Steele, Lea and Flood, OOPSLA 2014).
_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
SPECIAL = (math.nan, math.inf, -math.inf, -0.0, 1e-7, 6e4)


def _bits(numel: int, key: str) -> np.ndarray:
    """Counters, mixed: no random generator, whose stream could change with its library."""
    start = np.uint64(zlib.crc32(key.encode()) << 32)
    # Wrapping at 2^64 is what is meant.
    with np.errstate(over="ignore"):
        z = (np.arange(1, numel + 1, dtype=np.uint64) + start) * np.uint64(_GAMMA)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(_FIRST)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(_SECOND)
        return z ^ (z >> np.uint64(31))


def _reals(bits: np.ndarray) -> np.ndarray:
    """24-bit significands, both signs, times 2^-4 to 2^3: exact in float32."""
    significand = (bits >> np.uint64(40)).astype(np.float64) / 2.0**23 - 1.0
    return np.ldexp(significand, (bits & np.uint64(7)).astype(np.int64) - 4)


def values(numel: int, dtype: torch.dtype, key: str, special: bool = False) -> torch.Tensor:
    """Numbers that follow from `key`; `special` puts NaN, infinities and so on among them."""
    if dtype.is_complex:
        real = values(2 * numel, torch.empty(0, dtype=dtype).real.dtype, key, special)
        return torch.view_as_complex(real.view(numel, 2))
    bits = _bits(numel, key)
    if dtype == torch.bool:
        return torch.from_numpy((bits & np.uint64(1)).astype(bool))
    if not dtype.is_floating_point:
        lowest = 0 if dtype == torch.uint8 else -100
        numbers = (bits % np.uint64(201)).astype(np.int64) + lowest
        return torch.from_numpy(numbers).to(dtype)
    reals = _reals(bits)
    if special:
        chosen = bits >> np.uint64(8) & np.uint64(31)
        for code, number in enumerate(SPECIAL):
            reals[chosen == code] = number
    return torch.from_numpy(reals).to(dtype)


def digest(tensors: Sequence[torch.Tensor]) -> str:
    """The first 32 bits of a hash of dtypes, shapes and bits; every NaN counts as the same one."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if real.is_floating_point():
            real = torch.where(torch.isnan(real), torch.full((), math.nan, dtype=real.dtype), real)
        # numpy has no bfloat16.
        bits = real.view(torch.int16) if real.dtype == torch.bfloat16 else real
        found.update(bits.numpy().tobytes())
    return found.hexdigest()[:8]
