"""Complex tensors as pairs of reals, whose inner product is Re<a, b>.

Elementwise sums and averages are the same either way, and so are squared norms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import overload

import torch
from torch import Tensor

from collectives import Operands
from collectives.reducers import Piece


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the parts of a complex one, and any other as it is."""
    return dtype.to_real() if dtype.is_complex else dtype


def real_numel(tensor: Tensor) -> int:
    """Return how many reals a tensor's elements are."""
    return 2 * tensor.numel() if tensor.is_complex() else tensor.numel()


def as_reals(tensor: Tensor) -> Tensor:
    """Return a view [..., 2] of a complex tensor, and any other tensor as it is.

    A conjugate view, which holds other values than it shows, stays one, for the group to refuse.
    """
    return torch.view_as_real(tensor) if tensor.is_complex() and not tensor.is_conj() else tensor


def real_operands(operands: Operands) -> Operands:
    """Return the operands of a step on complex vectors as those of a step on their reals."""
    if not operands.pieces or not operands.pieces[0].out.is_complex():
        return operands
    segments = operands.segments
    return replace(
        operands,
        pieces=_RealPieces(operands.pieces),
        numel=2 * operands.numel,
        segments=None if segments is None else [2 * boundary for boundary in segments],
    )


class _RealPieces(Sequence[Piece]):
    """Pieces of complex vectors as pieces of their reals; taking one waits for it, as before."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces

    def __len__(self) -> int:
        return len(self._pieces)

    def __iter__(self) -> Iterator[Piece]:
        return map(_real_piece, self._pieces)

    @overload
    def __getitem__(self, index: int) -> Piece: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Piece]: ...
    def __getitem__(self, index: int | slice) -> Piece | Sequence[Piece]:
        if isinstance(index, slice):
            return _RealPieces(self._pieces[index])
        return _real_piece(self._pieces[index])


def _real_piece(piece: Piece) -> Piece:
    parts, out, start = piece
    reals = tuple(as_reals(part).view(-1) for part in parts)
    return Piece(reals, as_reals(out).view(-1), 2 * start)
