"""What REDUCE means: Sum and Average. (Adasum's reducer is in the adasum package.)"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import NamedTuple

import torch

from collectives._kernels_check import require_our_kernels

kernels = require_our_kernels()

_SMALL_BYTES = 64 * 1024
_RING_BYTES = 4 * 1024 * 1024


class Piece(NamedTuple):
    """The same elements of two or more vectors.

    parts: 1-D tensors of equal length, in the order of the reduction. out: one of them. start:
    where they lie in the whole buffer, in elements.
    """

    parts: tuple[torch.Tensor, ...]
    out: torch.Tensor
    start: int


@dataclass(frozen=True)
class Operands:
    """All that one rank reduces in a step.

    pieces: the parts of the vectors that this rank holds; they may still be on their way, one after
    the other, and looking at one waits for it: what can be done with the first before the second is
    looked at overlaps its way. numel: the whole buffer's length.
    segments: element boundaries (0, ..., numel) over the whole buffer, None for one segment.
    sum_partials: sums a float64 tensor in place over the ranks that together hold both vectors;
    all of them get the same bits. Each of them must call it as often. None where this rank alone
    holds them, in one piece or in several.
    """

    pieces: Sequence[Piece]
    numel: int
    segments: Sequence[int] | None
    sum_partials: Callable[[torch.Tensor], None] | None


class Reducer:
    """An associative or tree-ordered binary operator on buffers.

    needs_one_tree: whether every element must be reduced by the same expression tree, so that only
    some algorithms fit. reduces_in_shared_memory: whether `reduce` needs nothing but the vectors,
    so that ranks that share memory may reduce there without messages: it takes each segment by
    itself and calls no other rank, except for `sum_partials` once where that is given, with a row
    for each segment.
    """

    name = "Reducer"
    needs_one_tree = False
    reduces_in_shared_memory = False

    def __repr__(self) -> str:
        return self.name

    def check(self, dtype: torch.dtype) -> None:
        """Raise TypeError naming the dtype where the operator has no meaning on it."""
        raise NotImplementedError

    def algorithm(self, nbytes: int, size: int) -> str:
        """The all-reduce algorithm for a buffer of `nbytes` over `size` ranks."""
        raise NotImplementedError

    def reduce(self, operands: Operands) -> None:
        """Write parts[0] (op) parts[1] (op) ... to out, in every piece."""
        raise NotImplementedError

    def finish(self, buffer: torch.Tensor, size: int) -> None:
        """What is left to do on the reduced buffer, once: to each element, perhaps part by part."""


@lru_cache
def _computes(operator: Callable[..., torch.Tensor], dtype: torch.dtype) -> bool:
    """Whether torch adds, say, tensors of the dtype, as it does not those of 8-bit floats."""
    one = torch.empty(1, dtype=dtype, device="cpu")
    try:
        operator(one, one)
    except (RuntimeError, TypeError):
        return False
    return True


class SumReducer(Reducer):
    """Elementwise sum; every hop rounds to the buffer's dtype, as NCCL and gloo do."""

    name = "Sum"
    reduces_in_shared_memory = True

    def check(self, dtype: torch.dtype) -> None:
        if dtype == torch.bool:
            raise TypeError(f"{self.name} has no meaning on {dtype}: convert to an integer dtype")
        if not _computes(torch.add, dtype):
            raise TypeError(f"{self.name} needs additions, which torch has not for {dtype}")

    def algorithm(self, nbytes: int, size: int) -> str:
        if nbytes <= _SMALL_BYTES:
            return "rd"
        return "rechd" if nbytes <= _RING_BYTES else "xring"

    def reduce(self, operands: Operands) -> None:
        for parts, out, _ in operands.pieces:
            # Sums of integers and complex numbers are torch's own. Those of two floating ones are
            # the same bits, and looking at the arguments again costs more than a small sum.
            if out.dtype in kernels.DTYPES and (len(parts) > 2 or not out.is_cpu):
                kernels.sum_n(parts, out=out)
            else:
                _fold(torch.add, parts, out)


class AverageReducer(SumReducer):
    """The sum divided once, at the end, by the number of ranks."""

    name = "Average"

    def check(self, dtype: torch.dtype) -> None:
        if not (dtype.is_floating_point or dtype.is_complex):
            raise TypeError(f"{self.name} has no meaning on {dtype}: use Sum, or a floating dtype")
        super().check(dtype)
        if not _computes(torch.div, dtype):
            raise TypeError(f"{self.name} needs divisions, which torch has not for {dtype}")

    def finish(self, buffer: torch.Tensor, size: int) -> None:
        if size > 1:
            buffer.div_(size)


class MaxReducer(Reducer):
    """Elementwise maximum; what ranks agree on their arguments with."""

    name = "Max"
    reduces_in_shared_memory = True

    def check(self, dtype: torch.dtype) -> None:
        if dtype.is_complex:
            raise TypeError(f"{self.name} has no meaning on {dtype}")

    def algorithm(self, nbytes: int, size: int) -> str:
        return "rd" if nbytes <= _SMALL_BYTES else "rechd"

    def reduce(self, operands: Operands) -> None:
        for parts, out, _ in operands.pieces:
            _fold(torch.maximum, parts, out)


def _fold(
    operator: Callable[..., torch.Tensor], parts: Sequence[torch.Tensor], out: torch.Tensor
) -> None:
    """out = the parts joined by a binary operator, left to right."""
    *first, last = parts
    operator(reduce(operator, first), last, out=out)


Sum = SumReducer()
Average = AverageReducer()
Max = MaxReducer()
