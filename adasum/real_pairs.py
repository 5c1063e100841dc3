"""Complex tensors as pairs of reals, whose inner product is Re<a, b>.

Elementwise sums, averages and squared norms are the same either way.
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
    """Return the dtype of a complex dtype's parts; any other dtype as it is."""
    return dtype.to_real() if dtype.is_complex else dtype


def real_numel(tensor: Tensor) -> int:
    """Return the tensor's number of reals: two per complex element."""
    return 2 * tensor.numel() if tensor.is_complex() else tensor.numel()


def as_reals(tensor: Tensor) -> Tensor:
    """Return a view [..., 2] of a complex tensor; any other tensor as it is.

    Conjugate views are returned as they are, for the group to refuse: their memory holds other
    values than they show.
    """
    return torch.view_as_real(tensor) if tensor.is_complex() and not tensor.is_conj() else tensor


def real_operands(operands: Operands) -> Operands:
    """Return operands that describe complex vectors as vectors of twice as many reals."""
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
    """Pieces of complex vectors as pieces of their reals; each access waits for its piece."""

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
