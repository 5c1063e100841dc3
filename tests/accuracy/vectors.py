"""The vectors that are reduced: kinds of them by name, one vector a rank, in each dtype."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

Array = np.ndarray
NUMEL = 203


def _draw(size: int) -> Array:
    """[size, NUMEL] normal numbers, the same in every run."""
    return np.random.default_rng(size).standard_normal((size, NUMEL))


def _parallel(size: int) -> Array:
    return np.outer(1.0 + np.arange(size), _draw(size)[0])


def _orthogonal(size: int) -> Array:
    """Each rank's numbers in elements of its own."""
    vectors = _draw(size)
    owner = np.arange(NUMEL) % size
    return np.where(owner[None] == np.arange(size)[:, None], vectors, 0.0)


def _opposed(size: int) -> Array:
    """Neighbours point in opposite ways, with lengths 1 and 3."""
    signs = np.where(np.arange(size) % 2, -3.0, 1.0)
    return np.outer(signs, _draw(size)[0])


def _nearly_cancelling(size: int) -> Array:
    """b = -a but for a thousandth."""
    draw = _draw(size)
    signs = np.where(np.arange(size) % 2, -1.0, 1.0)
    return np.outer(signs, draw[0]) + 1e-3 * draw


def _common(size: int) -> Array:
    """Neither parallel nor orthogonal: as gradients are."""
    draw = _draw(size + 1)
    return draw[:1] + draw[1:]


def _uneven(size: int) -> Array:
    """Lengths from 1 to 10^-4, and elements as uneven within each."""
    lengths = np.logspace(0, -4, size)
    return _common(size) * lengths[:, None] * np.logspace(-3, 0, NUMEL)[None]


def _zeros_between(size: int) -> Array:
    vectors = _common(size)
    vectors[1::2] = 0.0
    return vectors


def _tiny(dtype: torch.dtype) -> float:
    """1e-38, or near the smallest normal number of a dtype that has none so small."""
    return max(1e-38, 2 * torch.finfo(dtype).smallest_normal)


def _huge(dtype: torch.dtype) -> float:
    """1e19, or a 256th of the largest number of a dtype that has none so large."""
    return min(1e19, torch.finfo(dtype).max / 256)


def _denormal(dtype: torch.dtype) -> float:
    """A few dozen spacings of the dtype's subnormals."""
    return 32 * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


Kind = Callable[[int, torch.dtype], Array]
KINDS: dict[str, Kind] = {
    "parallel": lambda size, dtype: _parallel(size),
    "orthogonal": lambda size, dtype: _orthogonal(size),
    "opposed": lambda size, dtype: _opposed(size),
    "nearly cancelling": lambda size, dtype: _nearly_cancelling(size),
    "common": lambda size, dtype: _common(size),
    "uneven": lambda size, dtype: _uneven(size),
    "zeros between": lambda size, dtype: _zeros_between(size),
    "tiny": lambda size, dtype: _common(size) * _tiny(dtype),
    "huge": lambda size, dtype: _common(size) * _huge(dtype),
    "denormal": lambda size, dtype: _common(size) * _denormal(dtype),
}
# Their answers are as large as what goes in and lie among the normal numbers: the contract's bound
# is theirs. Those that cancel, or sink below the normal numbers, lose digits in any arithmetic.
WELL_CONDITIONED = ("parallel", "orthogonal", "common", "uneven", "zeros between", "huge")


def vectors(kind: str, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """One vector a rank, rounded to the dtype."""
    return [torch.from_numpy(row).to(dtype) for row in KINDS[kind](size, dtype)]
