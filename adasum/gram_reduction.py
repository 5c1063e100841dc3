"""Adasum of all ranks' vectors at once: one Gram matrix a segment decides the whole tree.

Every vector of the tree is a linear combination v = sum_i c_i g_i of the ranks' vectors, and every
dot product that it asks for is c^T G c' with G = (g_i . g_j), the Gram matrix of a segment. So the
tree is replayed on coefficient vectors, and the vectors are blended once.

float64 sums are enough up to cancellations of `LIMIT`: of `(sum |c_i| |g_i|)^2 / |v|^2`, the
spread, which follows from G. Beyond, G is taken once more as sums of two float64 each. All ranks
conclude the same from the same tables; on a GPU the kernels conclude it, not the host, so that the
second tables always travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import kernels
from adasum.pieces import ClippedPiece, add_up, clipped, device_of
from collectives import Operands

LIMIT = 2.0**30
"""The spread up to which float64 sums are precise enough for float32 results."""

Tree = Sequence[tuple[int, int, int, int]]


def reduce_tree(operands: Operands, segments: tuple[int, ...], tree: Tree) -> None:
    """Write each piece's parts, joined by a tree, to its `out`; pieces may cut segments."""
    pieces: list[ClippedPiece] = []
    grams: list[Tensor] = []
    # A piece's products are taken before the next piece is looked at, which waits for it.
    for piece in clipped(operands, segments):
        grams.append(kernels.gram(piece.parts, piece.segments))
        pieces.append(piece)
    coefficients = _coefficients(operands, pieces, grams, len(segments) - 1, tree)
    for piece in pieces:
        kernels.weighted_sum(
            piece.parts, coefficients[piece.touched], piece.segments, out=piece.out
        )


def bind_tree(operands: Operands, segments: tuple[int, ...], tree: Tree) -> Callable[[], None]:
    """Plan `reduce_tree`."""
    pieces = list(clipped(operands, segments))
    grams = [kernels.plan_gram(piece.parts, piece.segments) for piece in pieces]
    count, device = len(segments) - 1, device_of(operands)
    coefficients = torch.zeros(count, len(tree) + 1, dtype=torch.float64, device=device)
    sums = [
        kernels.plan_weighted_sum(
            piece.parts, coefficients[piece.touched], piece.segments, out=piece.out
        )
        for piece in pieces
    ]

    def run() -> None:
        found = _coefficients(operands, pieces, [plan() for plan in grams], count, tree)
        coefficients.copy_(found)
        for plan in sums:
            plan()

    return run


def _coefficients(
    operands: Operands,
    pieces: Sequence[ClippedPiece],
    grams: Sequence[Tensor],
    count: int,
    tree: Tree,
) -> Tensor:
    """Return float64 [count, n], each part's coefficient in every segment."""
    device, parts = device_of(operands), len(tree) + 1
    spread = torch.zeros(count, dtype=torch.float64, device=device)
    tables = _gathered(operands, add_up(pieces, grams, (count, parts, parts), device))
    coefficients = kernels.adasum_coefficients(tables, tree, spread=spread)
    if device.type == "cpu" and not (spread > LIMIT).any():
        return coefficients
    grams = [
        kernels.gram(piece.parts, piece.segments, precise=True, spread=spread[piece.touched])
        for piece in pieces
    ]
    table = add_up(pieces, grams, (count, parts, parts, 2), device, precise=True)
    tables = _gathered(operands, table)
    return kernels.adasum_coefficients(tables, tree, out=coefficients, spread=spread)


def _gathered(operands: Operands, table: Tensor) -> Tensor:
    """Return all tables of the ranks that together hold the vectors."""
    gather = operands.gather_partials
    return table.unsqueeze(0) if gather is None else gather(table)
