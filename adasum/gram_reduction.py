"""Adasum of all ranks' vectors at once: one Gram matrix per segment decides the whole tree.

Every vector of the tree is a linear combination v = sum_i c_i g_i of the ranks' vectors, and every
dot product of the tree is c^T G c' with G = (g_i . g_j), the Gram matrix of the segment. So the
tree is replayed on coefficient vectors, and the vectors are blended once.

If the vectors in a rank's slice may cancel too far for float64, each entry of its table is the sum
of two float64 numbers. Each rank decides for its own slice only (`docs/direct.md`), so tables are
exchanged once, and no host reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor

import kernels
from adasum.observer import ObservedGram
from adasum.pieces import ClippedPiece, add_up, clipped, device_of
from collectives import Operands
from kernels.validation import tracing

Tree = Sequence[tuple[int, int, int, int]]
Take = Callable[[ObservedGram], None]


def reduce_tree(
    operands: Operands, segments: tuple[int, ...], tree: Tree, take: Take | None = None
) -> None:
    """Join each piece's parts by a tree, into its `out`; pieces may cut segments.

    take: a function that receives all segments' Gram matrices.
    """
    if take is None and operands.gather_partials is None and len(operands.pieces) == 1:
        (parts, out, _), (piece,) = operands.pieces[0], clipped(operands, segments)
        if len(piece.segments) == len(segments):
            # This rank has the whole vectors, as with small ones in shared memory.
            table = kernels.gram(parts, segments, precise=True).unsqueeze(0)
            coefficients = kernels.adasum_coefficients(table, tree)
            kernels.weighted_sum(parts, coefficients, segments, out=out)
            return
    pieces: list[ClippedPiece] = []
    grams: list[Tensor] = []
    # Compute one piece's products before the iterator waits for the next piece.
    for piece in clipped(operands, segments):
        grams.append(kernels.gram(piece.parts, piece.segments, precise=True))
        pieces.append(piece)
    replay = _Replay(operands, pieces, len(segments) - 1, tree, take)
    replay(grams)
    for piece in pieces:
        kernels.weighted_sum(
            piece.parts, replay.coefficients[piece.touched], piece.segments, out=piece.out
        )


def bind_tree(
    operands: Operands, segments: tuple[int, ...], tree: Tree, take: Take | None = None
) -> Callable[[], None]:
    """Return a function that does `reduce_tree` any number of times."""
    pieces = list(clipped(operands, segments))
    replay = _Replay(operands, pieces, len(segments) - 1, tree, take, planned=True)
    grams = [
        kernels.plan_gram(piece.parts, piece.segments, out=replay.rows_of(piece), precise=True)
        for piece in pieces
    ]
    sums = [
        kernels.plan_weighted_sum(
            piece.parts, replay.coefficients[piece.touched], piece.segments, out=piece.out
        )
        for piece in pieces
    ]

    def run() -> None:
        replay([plan() for plan in grams])
        for plan in sums:
            plan()

    return run


class _Replay:
    """Finds each part's coefficient in every segment from the pieces' Gram matrices.

    Args:
        operands: The vectors to reduce.
        pieces: Their pieces.
        count: The number of segments.
        tree: How the parts are joined.
        take: A function that receives the Gram matrices, or None.
        planned: Whether it runs many times, by a plan.

    Attributes:
        coefficients: float64 [count, n].
    """

    def __init__(
        self,
        operands: Operands,
        pieces: Sequence[ClippedPiece],
        count: int,
        tree: Tree,
        take: Take | None,
        *,
        planned: bool = False,
    ) -> None:
        self._operands, self._pieces, self._tree = operands, pieces, tree
        parts, self._device = len(tree) + 1, device_of(operands)
        self._shape = count, parts, parts, 2
        self.coefficients = torch.zeros(count, parts, dtype=torch.float64, device=self._device)
        self._spread = None if take is None else self.coefficients.new_empty(count)
        self._planned, self._take = planned, take
        self._plan: Callable[[], Tensor] | None = None
        self._tables = self.coefficients
        # A plan with one piece writes its matrices into this table.
        self._table: Tensor | None = None
        if planned and len(pieces) == 1:
            self._table = self.coefficients.new_zeros(self._shape)

    def rows_of(self, piece: ClippedPiece) -> Tensor | None:
        """Return the rows of the table for the piece's matrices, if it is the only piece."""
        return None if self._table is None else self._table[piece.touched]

    def __call__(self, grams: Sequence[Tensor]) -> None:
        """Write `coefficients`."""
        table = self._table
        if table is None:
            table = add_up(self._pieces, grams, self._shape, self._device, precise=True)
        tables = self._gathered(table)
        self._find(tables)
        if self._take is not None and self._spread is not None:
            # Added in rank order, for equal bits on all ranks.
            products = reduce(torch.add, tables).sum(-1)
            found = self.coefficients.clone(), self._spread.clone()
            self._take(ObservedGram(products, *found, tuple(self._tree)))

    def _find(self, tables: Tensor) -> None:
        """Write `coefficients` from all ranks' tables."""
        written = {"out": self.coefficients, "spread": self._spread}
        # No plan can be made while any thread is under a dispatch mode.
        if not self._planned or (self._plan is None and tracing()):
            kernels.adasum_coefficients(tables, self._tree, **written)
            return
        if self._plan is None:
            self._tables = tables.clone()
            self._plan = kernels.plan_adasum_coefficients(self._tables, self._tree, **written)
        else:
            self._tables.copy_(tables)
        self._plan()

    def _gathered(self, table: Tensor) -> Tensor:
        """Return the tables of all ranks that together hold the vectors."""
        gather = self._operands.gather_partials
        return table.unsqueeze(0) if gather is None else gather(table)
