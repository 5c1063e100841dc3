"""The CPU path's dot products: compiled (kernels/_native.py), all in float64, else by torch.

By torch, long ones of float32 are taken by rows, as the kernels take them by tiles: within a row in
float32, over the rows in float64. The elements of a row, a power of two of them, are summed in an
order that depends on neither their place in memory nor the number of threads. All others, and rows
whose squares come near float32's ends, in float64, where no square of a float32 under- or
overflows.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import _native
from kernels._cpu import _blocks, _flat, _scratch, _without_grad, compute_dtype

# Two float64 copies in the shared cache.
_WIDE_BLOCK = 1 << 18
# Two operands and their products beside each other there; from how many elements rows are faster.
# bench/NOTES.md has the times behind these.
_ROWS_BLOCK = 1 << 19
_ROWS_FROM = 1 << 17
_ROW = 1024
# Norms of rows between which nothing that float32 loses at its ends counts: 1024 squares, each off
# by 2**-126 at most, are less than 2**-28 of a square of 2**-44; and that of 2**62 is finite.
_LEAST, _MOST = 2.0**-44, 2.0**62


@_without_grad
def dot_and_norms(a: Tensor, b: Tensor, bounds: Sequence[int]) -> list[list[float]]:
    """S rows (a.b, |a|^2, |b|^2) of the flattened segments."""
    native = _native.library(compute_dtype(a.dtype, b.dtype))
    if native is not None:
        return native.dot_and_norms(a, b, bounds)
    x, y = _flat(a), _flat(b)
    if not x.dtype == y.dtype == torch.float32 or x.numel() < _ROWS_FROM:
        return _wide_dots(x, y, bounds)
    rows: list[list[float]] = []
    first = 0
    for segment, (low, high) in enumerate(itertools.pairwise(bounds)):
        if high - low < _ROWS_FROM:
            continue
        rows += _short(x, y, bounds[first : segment + 1])
        rows.append(_long_dots(x[low:high], y[low:high]))
        first = segment + 1
    return rows + _short(x, y, bounds[first:])


def _short(x: Tensor, y: Tensor, bounds: Sequence[int]) -> list[list[float]]:
    """Of segments that follow each other."""
    if len(bounds) < 2:
        return []
    start, stop = bounds[0], bounds[-1]
    return _wide_dots(x[start:stop], y[start:stop], [bound - start for bound in bounds])


def _wide(slot: int, tensor: Tensor) -> Tensor:
    return _scratch(slot, tensor.numel(), torch.float64).copy_(tensor)


def _dots(u: Tensor, v: Tensor) -> list[float]:
    return [torch.dot(u, v).item(), torch.dot(u, u).item(), torch.dot(v, v).item()]


def _wide_dots(x: Tensor, y: Tensor, bounds: Sequence[int]) -> list[list[float]]:
    """Of 1-D tensors, in float64."""
    if len(bounds) == 2 and 0 < x.numel() <= _WIDE_BLOCK:
        return [_dots(_wide(0, x), _wide(1, y))]
    count = len(bounds) - 1
    rows = [[0.0, 0.0, 0.0] for _ in range(count)]
    segment = 0
    for low, high in _blocks(0, x.numel(), _WIDE_BLOCK):
        left, right = _wide(0, x[low:high]), _wide(1, y[low:high])
        while bounds[segment + 1] <= low:
            segment += 1
        here = segment
        while here < count and bounds[here] < high:
            start, stop = max(bounds[here], low) - low, min(bounds[here + 1], high) - low
            if start < stop:
                part = _dots(left[start:stop], right[start:stop])
                rows[here] = [*map(operator.add, rows[here], part)]
            here += 1
    return rows


def _long_dots(x: Tensor, y: Tensor) -> list[float]:
    """Of one long segment."""
    total = [0.0, 0.0, 0.0]
    numel = x.numel()
    whole = numel - numel % _ROW
    for low, high in _blocks(0, whole, _ROWS_BLOCK):
        u, v = x[low:high], y[low:high]
        part = _row_dots(u, v) or _wide_dots(u, v, (0, high - low))[0]
        total = [*map(operator.add, total, part)]
    if whole < numel:
        rest = _wide_dots(x[whole:], y[whole:], (0, numel - whole))[0]
        total = [*map(operator.add, total, rest)]
    return total


def _row_dots(x: Tensor, y: Tensor) -> list[float] | None:
    """Of whole rows; None where a row's norm is out of range."""
    u, v = x.view(-1, _ROW), y.view(-1, _ROW)
    count = u.shape[0]
    sums = _scratch(3, 3 * count, torch.float32).view(3, count)
    for rows, norms in ((u, sums[1]), (v, sums[2])):
        torch.linalg.vector_norm(rows, dim=1, out=norms)
    least, most = torch.aminmax(sums[1:])
    if not (least.item() >= _LEAST and most.item() <= _MOST):
        return None
    products = _scratch(2, x.numel(), torch.float32).view_as(u)
    torch.sum(torch.mul(u, v, out=products), 1, out=sums[0])
    wide = _scratch(3, 3 * count, torch.float64).view(3, count).copy_(sums)
    wide[1:].square_()
    answer: list[float] = wide.sum(1).tolist()
    return answer
