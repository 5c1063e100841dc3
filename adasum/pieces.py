"""Pieces of vectors, the segments that they touch, and sums of their tables."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from collectives import Operands


class ClippedPiece(NamedTuple):
    """A piece, the segments that it touches, and their boundaries within it."""

    parts: tuple[Tensor, ...]
    out: Tensor
    touched: slice
    segments: tuple[int, ...]


@lru_cache(maxsize=1024)
def clip(segments: tuple[int, ...], start: int, length: int) -> tuple[int, int, tuple[int, ...]]:
    """Return the segments that the piece [start, start + length) touches; length is at least 1.

    Returned as (first, last, boundaries): segments first..last-1 of the whole list, and their
    boundaries within the piece, (0, ..., length).
    """
    stop = start + length
    # bisect_right finds the last boundary at or before start, so empty segments there are skipped.
    first = bisect_right(segments, start) - 1
    last = bisect_left(segments, stop)
    inner = (boundary - start for boundary in segments[first + 1 : last])
    return first, last, (0, *inner, length)


def clipped(operands: Operands, segments: tuple[int, ...]) -> Iterator[ClippedPiece]:
    """Yield the pieces that have elements; the iterator waits for each piece."""
    for parts, out, start in operands.pieces:
        if out.numel():
            first, last, inside = clip(segments, start, out.numel())
            yield ClippedPiece(parts, out, slice(first, last), inside)


def segments_of(operands: Operands) -> tuple[int, ...]:
    """Return the boundaries of the whole buffer's segments."""
    return (0, operands.numel) if operands.segments is None else tuple(operands.segments)


def device_of(operands: Operands) -> torch.device:
    """Return the device of the pieces."""
    return next((piece.out.device for piece in operands.pieces), torch.device("cpu"))


def are_whole(operands: Operands, segments: tuple[int, ...]) -> bool:
    """Return whether this rank holds the whole of every segment that the pieces touch."""
    if operands.sum_partials is not None:
        return False
    for _, out, start in operands.pieces:
        if out.numel():
            first, last, _ = clip(segments, start, out.numel())
            if (segments[first], segments[last]) != (start, start + out.numel()):
                return False
    return True


def add_up(
    pieces: Sequence[ClippedPiece],
    tables: Sequence[Tensor],
    shape: tuple[int, ...],
    device: torch.device,
    *,
    precise: bool = False,
) -> Tensor:
    """Add up the pieces' rows in one float64 table of all segments; return it.

    precise: whether the last dimension holds pairs (high, low) that stand for their sum.
    """
    ends = [0, *(piece.touched.stop for piece in pieces)]
    if tables and [*(piece.touched.start for piece in pieces), shape[0]] == ends:
        # Pieces share no segment, and most often there is only one piece.
        return tables[0] if len(tables) == 1 else torch.cat([*tables])
    table = torch.zeros(shape, dtype=torch.float64, device=device)
    if len(tables) == 1:
        # As a pair, infinity plus zero would be NaN.
        table[pieces[0].touched] = tables[0]
        return table
    for piece, mine in zip(pieces, tables, strict=True):
        if precise:
            table[piece.touched] = _twofold_sum(table[piece.touched], mine)
        else:
            table[piece.touched] += mine
    return table


def _twofold_sum(left: Tensor, right: Tensor) -> Tensor:
    """Add pairs (high, low); low collects the rounding error of the highs (Knuth's TwoSum)."""
    (a, low), (b, other) = left.unbind(-1), right.unbind(-1)
    high = a + b
    error = (a - (high - (high - a))) + (b - (high - a))
    return torch.stack([high, low + other + error], -1)
