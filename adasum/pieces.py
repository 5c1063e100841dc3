"""Pieces of vectors and the segments that they touch, whose tables are added up."""

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

    The answer is (first, last, boundaries): segments first..last-1 of the whole list, and their
    boundaries within the piece, (0, ..., length).
    """
    stop = start + length
    # bisect_right finds the last boundary at or before start, so empty segments there are skipped.
    first = bisect_right(segments, start) - 1
    last = bisect_left(segments, stop)
    inner = (boundary - start for boundary in segments[first + 1 : last])
    return first, last, (0, *inner, length)


def clipped(operands: Operands, segments: tuple[int, ...]) -> Iterator[ClippedPiece]:
    """Yield the pieces that have elements; taking one waits for it."""
    for parts, out, start in operands.pieces:
        if out.numel():
            first, last, inside = clip(segments, start, out.numel())
            yield ClippedPiece(parts, out, slice(first, last), inside)


def segments_of(operands: Operands) -> tuple[int, ...]:
    """Return the boundaries of the whole buffer's segments."""
    return (0, operands.numel) if operands.segments is None else tuple(operands.segments)


def device_of(operands: Operands) -> torch.device:
    """Return where the pieces are."""
    return next((piece.out.device for piece in operands.pieces), torch.device("cpu"))


def are_whole(operands: Operands, segments: tuple[int, ...]) -> bool:
    """Return whether this rank holds all of every segment that the pieces touch."""
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
    """Return the float64 table of all segments, `shape`, the sum of the pieces' rows.

    precise: whether the last dimension holds sums of two, high and low.
    """
    ends = [0, *(piece.touched.stop for piece in pieces)]
    if tables and [*(piece.touched.start for piece in pieces), shape[0]] == ends:
        # No two pieces share a segment, and most often there is only one piece.
        return tables[0] if len(tables) == 1 else torch.cat([*tables])
    table = torch.zeros(shape, dtype=torch.float64, device=device)
    if len(tables) == 1:
        # Adding infinity to zero in two parts would make it NaN.
        table[pieces[0].touched] = tables[0]
        return table
    for piece, mine in zip(pieces, tables, strict=True):
        if precise:
            table[piece.touched] = _twofold_sum(table[piece.touched], mine)
        else:
            table[piece.touched] += mine
    return table


def _twofold_sum(left: Tensor, right: Tensor) -> Tensor:
    """Add sums of two: high + low with the error of the high parts' sum (Knuth's TwoSum)."""
    (a, low), (b, other) = left.unbind(-1), right.unbind(-1)
    high = a + b
    error = (a - (high - (high - a))) + (b - (high - a))
    return torch.stack([high, low + other + error], -1)
