"""Cutting a buffer into nearly equal pieces."""

from __future__ import annotations


def split_bounds(numel: int, pieces: int) -> list[int]:
    """Boundaries of `pieces` consecutive pieces of `numel` elements: `pieces + 1` offsets.

    Sizes differ by at most one, the larger pieces come first, and pieces may be empty.
    Raises ValueError for a negative `numel` or fewer than one piece.
    """
    if numel < 0:
        raise ValueError(f"numel must not be negative, got {numel}")
    if pieces < 1:
        raise ValueError(f"pieces must be at least 1, got {pieces}")
    base, longer = divmod(numel, pieces)
    return [i * base + min(i, longer) for i in range(pieces + 1)]
