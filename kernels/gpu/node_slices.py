"""The ranks' slices of their node's vectors."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple


class Slice(NamedTuple):
    """One rank's slice of all vectors.

    Attributes:
        start: The slice's first element.
        bounds: Boundaries of the segments in the slice, relative to `start`.
        before: The first rank with a part of the slice's first segment.
        after: The last rank with a part of the slice's last segment.
    """

    start: int
    bounds: tuple[int, ...]
    before: int
    after: int


def slice_with(segments: tuple[int, ...], start: int, length: int, each: int) -> Slice:
    """Return a slice of `length` elements.

    Args:
        segments: Boundaries of all segments.
        start: The slice's first element.
        length: The slice's number of elements.
        each: The number of elements of all slices except the last ones, which may be shorter.
    """
    if length == 0:
        return Slice(start, (0, 0), 0, 0)
    # Empty segments at the slice's ends do not belong to it.
    first = bisect_right(segments, start) - 1
    last = bisect_left(segments, start + length)
    inner = (bound - start for bound in segments[first + 1 : last])
    holders = segments[first] // each, (segments[last] - 1) // each
    return Slice(start, (0, *inner, length), *holders)


def slice_of(numel: int, itemsize: int, size: int, rank: int) -> tuple[int, int]:
    """Return the (start, length) of a rank's slice: equal runs of whole vectors of 16 bytes.

    The last ranks' slices may be shorter, or empty.
    """
    vector = 16 // itemsize
    each = -(-numel // (size * vector)) * vector
    start = min(rank * each, numel)
    return start, min(each, numel - start)
