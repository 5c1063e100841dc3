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


def _signed(size: int, odd: float) -> Array:
    """The same numbers on every rank, times `odd` on every second one."""
    return np.outer(np.where(np.arange(size) % 2, odd, 1.0), _draw(size)[0])


def _common(size: int) -> Array:
    """Neither parallel nor orthogonal: as gradients are."""
    draw = _draw(size + 1)
    return draw[:1] + draw[1:]


def _spoilt(size: int, element: float) -> Array:
    """As `_common`, with an element that is not finite on one rank."""
    found = _common(size)
    found[size // 2, NUMEL // 2] = element
    return found


Kind = Callable[[int, torch.finfo], Array]
KINDS: dict[str, Kind] = {
    "parallel": lambda n, info: np.outer(1.0 + np.arange(n), _draw(n)[0]),
    # Each rank's numbers in elements of its own.
    "orthogonal": lambda n, info: _draw(n) * (np.arange(NUMEL) % n == np.arange(n)[:, None]),
    "opposed": lambda n, info: _signed(n, -3.0),
    "nearly cancelling": lambda n, info: _signed(n, -1.0) + 1e-3 * _draw(n),
    "common": lambda n, info: _common(n),
    # Lengths from 1 to 10^-4, and elements as uneven within each.
    "uneven": lambda n, info: (
        _common(n) * np.logspace(0, -4, n)[:, None] * np.logspace(-3, 0, NUMEL)
    ),
    "zeros between": lambda n, info: _common(n) * (np.arange(n) % 2 == 0)[:, None],
    "zeros": lambda n, info: np.zeros((n, NUMEL)),
    "of one rank": lambda n, info: _common(n) * (np.arange(n) == n // 2)[:, None],
    "nan": lambda n, info: _spoilt(n, np.nan),
    "inf": lambda n, info: _spoilt(n, -np.inf),
    # Or near the ends of a dtype that has none so small or so large.
    "tiny": lambda n, info: _common(n) * max(1e-38, 2 * info.smallest_normal),
    "huge": lambda n, info: _common(n) * min(1e19, info.max / 256),
    # A few dozen spacings of the dtype's subnormals.
    "denormal": lambda n, info: _common(n) * (32 * info.smallest_normal * info.eps),
}
# A zero vector is the identity, whichever rank has something.
EXACT = ("zeros", "of one rank")
# The other segments' answers stay within their bounds.
NOT_FINITE = ("nan", "inf")
# Their answers are as large as what goes in and lie among the normal numbers: the contract's bound
# is theirs. Those that cancel, or sink below the normal numbers, lose digits in any arithmetic.
WELL_CONDITIONED = ("parallel", "orthogonal", "common", "uneven", "zeros between", "huge")


def vectors(kind: str, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """One vector a rank, rounded to the dtype."""
    return [torch.from_numpy(row).to(dtype) for row in KINDS[kind](size, torch.finfo(dtype))]
