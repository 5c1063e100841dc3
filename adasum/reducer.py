"""Adasum as a reducer: per-segment dot products over the ranks that hold the two operands.

Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation", arXiv 2006.02924,
algorithm 1 (vector halving, distance doubling).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

import kernels
from collectives import Operands, Reducer

__all__ = ["Adasum", "AdasumReducer"]

# Below this a message costs its latency: log2 n exchanges of the whole vector (rd), or none where
# ranks share a board, beat the 2 log2 n exchanges and log2 n small sums of vhdd.
_SMALL_BYTES = 256 * 1024


@lru_cache(maxsize=1024)
def _clip(segments: tuple[int, ...], start: int, length: int) -> tuple[int, int, tuple[int, ...]]:
    """The segments that the piece [start, start + length) touches.

    Returns (first, last, boundaries): segments first..last-1 of the whole list, and their
    boundaries relative to the piece, cut to it: (0, ..., length). `length` must be at least 1.
    """
    stop = start + length
    # bisect_right finds the last boundary at or before start, so empty segments there are skipped.
    first = bisect_right(segments, start) - 1
    last = bisect_left(segments, stop)
    inner = (boundary - start for boundary in segments[first + 1 : last])
    return first, last, _the_same((0, *inner, length))


@lru_cache(maxsize=1024)
def _the_same(cuts: tuple[int, ...]) -> tuple[int, ...]:
    """One tuple for equal ones: the kernels know segments that they have checked by identity."""
    return cuts


@lru_cache(maxsize=1024)
def _holds_whole(segments: tuple[int, ...], start: int, length: int) -> bool:
    """Whether the piece cuts no segment."""
    return {start, start + length} <= {*segments}


class _Clipped(NamedTuple):
    """A piece, the segments that it touches, and their boundaries within it."""

    parts: tuple[Tensor, ...]
    out: Tensor
    rows: slice
    cuts: tuple[int, ...]


def _table(
    pieces: Sequence[_Clipped], rows: Sequence[Tensor], count: int, device: torch.device
) -> Tensor:
    """The `count` segments' sums of the pieces' rows: of one shape, wherever those were cut."""
    ends = [0, *(piece.rows.stop for piece in pieces)]
    if rows and [*(piece.rows.start for piece in pieces), count] == ends:
        # Each row is one piece's: most often they are all of a single one.
        return rows[0] if len(rows) == 1 else torch.cat([*rows])
    dots = torch.zeros(count, 3, dtype=torch.float64, device=device)
    for piece, mine in zip(pieces, rows, strict=True):
        dots[piece.rows] += mine
    return dots


class AdasumReducer(Reducer):
    """adasum(a, b) = (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b, per segment.

    Dtypes: float16, bfloat16, float32, float64; dot products and norms are float64. Symmetric but
    not associative: the order of the ranks is part of the answer (adjacent ranks pair first).
    """

    name = "Adasum"
    needs_one_tree = True
    reduces_in_shared_memory = True

    def check(self, dtype: torch.dtype) -> None:
        """TypeError naming the dtype unless it is a floating-point dtype the kernels take."""
        if dtype not in kernels.DTYPES:
            raise TypeError(
                f"Adasum reduces float16, bfloat16, float32 and float64 tensors, not {dtype}"
            )

    def algorithm(self, nbytes: int, size: int) -> str:
        """`rd` for small messages, whose cost is latency; else `vhdd`."""
        return "rd" if nbytes <= _SMALL_BYTES else "vhdd"

    def reduce(self, operands: Operands) -> None:
        """out = adasum(left, right) on this rank's pieces of the two vectors.

        The partial dot products of the pieces go into a full [S, 3] float64 table, so that the
        ranks of the step sum one shape wherever the pieces were cut, inside a segment or not. More
        than two vectors are folded from the left.
        """
        add = operands.sum_partials
        whole = operands.segments
        segments = (0, operands.numel) if whole is None else tuple(whole)
        if add is None and all(
            _holds_whole(segments, start, out.numel()) for _, out, start in operands.pieces
        ):
            for parts, out, start in operands.pieces:
                self._reduce_whole(parts, out, start, segments)
            return
        device = torch.device("cpu")
        folds = 1
        pieces: list[_Clipped] = []
        rows: list[Tensor] = []
        # Of what has come while the rest is on its way.
        for parts, out, start in operands.pieces:
            folds = max(folds, len(parts) - 1)
            device = out.device
            if out.numel():
                first, last, cuts = _clip(segments, start, out.numel())
                rows.append(kernels.dot_and_norms(parts[0], parts[1], cuts))
                pieces.append(_Clipped(parts, out, slice(first, last), cuts))
        dots = _table(pieces, rows, len(segments) - 1, device)
        left = [piece.parts[0] for piece in pieces]
        for k in range(1, folds + 1):
            if k > 1:
                dots.zero_()
                for mine, piece in zip(left, pieces, strict=True):
                    dots[piece.rows] += kernels.dot_and_norms(mine, piece.parts[k], piece.cuts)
            if add is not None:
                add(dots)
            for i, piece in enumerate(pieces):
                target = piece.out if k == folds else None
                mine = dots if len(pieces) == 1 and len(dots) == len(rows[0]) else dots[piece.rows]
                left[i] = kernels.combine(left[i], piece.parts[k], mine, piece.cuts, out=target)

    def _reduce_whole(
        self, parts: Sequence[Tensor], out: Tensor, start: int, segments: tuple[int, ...]
    ) -> None:
        """The same of vectors whose segments lie whole in the parts."""
        if not out.numel():
            return
        cuts = _clip(segments, start, out.numel())[2]
        left = parts[0]
        for k, right in enumerate(parts[1:], 2):
            left = kernels.adasum(left, right, cuts, out=out if k == len(parts) else None)

    def finish(self, buffer: Tensor, size: int) -> None:
        """Nothing: Adasum is not divided by the number of ranks."""


Adasum = AdasumReducer()
