"""The slices that the ranks of a node take of all their vectors."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple


class Slice(NamedTuple):
    """What one rank takes of all vectors.

    Attributes:
        start: Its first element.
        bounds: Of the segments that it has a part of, from there on.
        before: The first rank that has a part of the first of them.
        after: The last rank that has a part of the last of them.
    """

    start: int
    bounds: tuple[int, ...]
    before: int
    after: int


def slice_with(segments: tuple[int, ...], start: int, length: int, each: int) -> Slice:
    """Return a slice of `length` elements.

    Args:
        segments: Boundaries of all segments.
        start: Its first element.
        length: How many it has.
        each: How many the first slice has, and all but the last ones.
    """
    if length == 0:
        return Slice(start, (0, 0), 0, 0)
    # Empty segments at its ends are none of its own.
    first = bisect_right(segments, start) - 1
    last = bisect_left(segments, start + length)
    inner = (bound - start for bound in segments[first + 1 : last])
    holders = segments[first] // each, (segments[last] - 1) // each
    return Slice(start, (0, *inner, length), *holders)


def slice_of(numel: int, itemsize: int, size: int, rank: int) -> tuple[int, int]:
    """Return the (start, length) of a rank's slice: equal runs of whole vectors of 16 bytes.

    The last ranks' may be shorter, or empty.
    """
    vector = 16 // itemsize
    each = -(-numel // (size * vector)) * vector
    start = min(rank * each, numel)
    return start, min(each, numel - start)
