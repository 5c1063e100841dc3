"""Nearly equal pieces of a buffer."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

from collectives import validation


def split_bounds(numel: int, pieces: int) -> list[int]:
    """Return the `pieces + 1` boundaries of consecutive pieces of `numel` elements.

    Sizes differ by at most one, the larger pieces come first, and pieces may be empty.

    Raises:
        TypeError: An argument is not an int.
        ValueError: `numel` is negative, or `pieces` less than 1.

    Examples:
        >>> collectives.split_bounds(10, 4)
        [0, 3, 6, 8, 10]
    """
    validation.integer("numel", numel, 0)
    validation.integer("pieces", pieces, 1)
    base, longer = divmod(numel, pieces)
    return [i * base + min(i, longer) for i in range(pieces + 1)]


def piece_bounds(numel: int, pieces: int, index: int) -> tuple[int, int]:
    """Return the boundaries of one piece of `split_bounds`; the arguments are not checked."""
    base, longer = divmod(numel, pieces)
    start = index * base + min(index, longer)
    return start, start + base + (index < longer)


def segment_bounds(segments: Sequence[int], pieces: int) -> list[int]:
    """Return the boundaries of `split_bounds`, each moved to the nearest boundary of a segment.

    segments: Element boundaries (0, ..., numel), not descending. Pieces may be empty.
    """
    bounds = []
    for ideal in split_bounds(segments[-1], pieces):
        above = bisect_left(segments, ideal)
        below = max(above - 1, 0)
        nearer = ideal - segments[below] < segments[above] - ideal
        bounds.append(segments[below if nearer else above])
    return bounds


class Ranges:
    """Half-open (start, stop), each once; a look-up costs a logarithm."""

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        self._ranges = {*ranges}
        self._starts = sorted(start for start, _ in self._ranges)
        self._stops = sorted(stop for _, stop in self._ranges)

    def __contains__(self, one: tuple[int, int]) -> bool:
        return one in self._ranges

    def overlapping(self, start: int, stop: int) -> int:
        """Return how many have a number in common with [start, stop)."""
        # Those that begin before its end, less those that have ended before it begins.
        return bisect_left(self._starts, stop) - bisect_right(self._stops, start)
