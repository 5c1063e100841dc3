"""The CPU path without compiled code: torch's functions, in blocks that fit into a cache.

The arithmetic is that of kernels/cpu/native.c: float32 for float16, bfloat16 and float32, float64
for float64, rounded once. Dot products are computed in float64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from decimal import Context, Decimal, localcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.arithmetic import CANCELLED, SPREAD_LIMIT, TINY, compute_dtype, joined
from kernels.call import Call, Tree
from kernels.findings import Findings

# An operation on both cores costs tens of microseconds to start and to end, so blocks are as large
# as the shared cache lets them be; bench/NOTES.md has the times behind them.
_MAP_BLOCK = 1 << 20
# Two float64 copies in the shared cache.
_DOT_BLOCK = 1 << 18
# More digits than double-double has.
_DIGITS = Context(prec=40)
# What precise matrices round away, of the square of the sum of all lengths.
_LOST = Decimal(2.0**-92)
_SAFE_LOW, _SAFE_HIGH = 2.0**-60, 2.0**60


def _blocks(*tensors: Tensor) -> zip[tuple[Tensor, ...]]:
    """Return blocks of the tensors: each tuple has the same elements of all of them."""
    return zip(*[tensor.view(-1).split(_MAP_BLOCK) for tensor in tensors], strict=True)


def report(findings: Findings, written: Sequence[Tensor]) -> None:
    """Report what `findings` asks for about the values of tensors that were just written."""
    found_inf, max_abs = findings
    if found_inf is None and max_abs is None:
        return
    for tensor in written:
        if tensor.numel():
            low, high = torch.aminmax(tensor)
            largest = torch.maximum(low.abs(), high.abs())
            if found_inf is not None:
                # Without an `if` on the value: it would break traced code and wait for a GPU, both
                # of which use this function for derivatives.
                found_inf.masked_fill_(~largest.isfinite(), 1.0)
            if max_abs is not None:
                max_abs.copy_(torch.maximum(max_abs, largest.to(max_abs.dtype)))


def _scaled_copy(target: Tensor, source: Tensor, scale: float) -> None:
    """Write target = scale * source, of equal length; they may be the same tensor."""
    wide = compute_dtype(source.dtype, target.dtype)
    for to, part in _blocks(target, source):
        to.copy_(part.to(wide) * scale)


@torch.no_grad()
def copy(call: Call, scale: float) -> None:
    """Copy between tensors and their slots of the buffer; packing zeroes the padding."""
    assert call.packed is not None
    pieces = call.out.split_with_sizes(call.packed.layout.pieces)
    slots, paddings = pieces[::2], pieces[1::2]
    for tensor, slot, padding in zip(call.inputs, slots, paddings, strict=True):
        target, source = (slot, tensor.view(-1)) if call.packing else (tensor.view(-1), slot)
        if scale == 1.0:
            target.copy_(source)
        else:
            _scaled_copy(target, source, scale)
        if call.packing and padding.numel():
            padding.zero_()
    report(call.findings, (call.out,) if call.packing else call.inputs)


pack = unpack = copy


@torch.no_grad()
def sum_n(call: Call, scale: float) -> None:
    """Write out = scale * (t0 + t1 + ...), in the call's order; `out` may be any of the tensors."""
    wide = compute_dtype(call.inputs[0].dtype, call.out.dtype)
    for to, *parts in _blocks(call.out, *call.inputs):
        # Converted first, which is faster than an addition of two dtypes.
        total = joined(call.order, len(parts), partial(_converted, parts, call), torch.add)
        to.copy_(total if scale == 1.0 else total.to(wide) * scale)
        report(call.findings, (to,))


def _converted(parts: Sequence[Tensor], call: Call, i: int) -> Tensor:
    return parts[i].to(call.accumulated)


def scaled_add(call: Call, alpha: float, beta: float) -> None:
    """Write out = alpha*a + beta*b, elementwise; `out` may be a or b."""
    a, b = call.inputs
    _blend(a, b, call.out, call.findings, alpha, beta)


@torch.no_grad()
def _blend(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    findings: Findings,
    alpha: float,
    beta: float,
    cancelling: bool = False,
) -> None:
    """Write out = alpha*a + beta*b, with the same bits whether `out` is a, b or neither.

    Of two ranks that reduce a pair, one writes to a and the other to b. cancelling: Whether the sum
    is so short that float32 would lose it.
    """
    wide = compute_dtype(a.dtype, b.dtype, out.dtype)
    if cancelling or not (_is_safe(alpha) and _is_safe(beta)):
        wide = torch.float64
    # Opposed tensors of one length: their sum is exact where they nearly cancel.
    opposed = wide == torch.float64 and alpha == beta > 1
    for left, right, to in _blocks(a, b, out):
        if opposed:
            to.copy_((left.to(wide) + right.to(wide)) * alpha)
        else:
            to.copy_(torch.add(left.to(wide) * alpha, right.to(wide), alpha=beta))
        report(findings, (to,))


@torch.no_grad()
def dot_and_norms(call: Call) -> None:
    """Write into `out` a row (a.b, |a|^2, |b|^2) for each segment."""
    x, y = (tensor.view(-1) for tensor in call.inputs)
    for row, (start, stop) in zip(call.out, itertools.pairwise(call.bounds), strict=True):
        found = [0.0, 0.0, 0.0]
        for low in range(start, stop, _DOT_BLOCK):
            high = min(low + _DOT_BLOCK, stop)
            u, v = x[low:high].double(), y[low:high].double()
            for i, (left, right) in enumerate(((u, v), (u, u), (v, v))):
                found[i] += torch.dot(left, right).item()
        row.copy_(torch.tensor(found, dtype=torch.float64, device="cpu"))


def combine(call: Call, factor_a: float, factor_b: float) -> None:
    """Write out = (1 - d/(fA)) a + (1 - d/(gB)) b per segment; (d, A, B) are rows of `dots`.

    f and g are the factors of a's and b's squared norm, as `check_weights` returns them.
    """
    assert call.dots is not None
    parts = [tensor.detach().view(-1) for tensor in (*call.inputs, call.out)]
    for (dot, norm_a, norm_b), (low, high) in zip(
        call.dots.tolist(), itertools.pairwise(call.bounds), strict=True
    ):
        if high > low:
            left, right, to = (part[low:high] for part in parts)
            alpha, beta = _coefficient(dot, factor_a, norm_a), _coefficient(dot, factor_b, norm_b)
            cancelling = _cancels(dot, norm_a, norm_b, alpha, beta)
            _blend(left, right, to, call.findings, alpha, beta, cancelling)


def adasum(call: Call, factor_a: float, factor_b: float) -> None:
    """`combine` of the tensors' `dot_and_norms`."""
    dots = torch.empty(len(call.bounds) - 1, 3, dtype=torch.float64, device="cpu")
    dot_and_norms(replace(call, out=dots))
    combine(replace(call, dots=dots), factor_a, factor_b)


def _coefficient(dot: float, factor: float, norm: float) -> float:
    """Return 1 - d/(fA); 1 for a norm below TINY (not for NaN), and NaN if fA overflows float64."""
    scaled = factor * norm
    if norm < TINY:
        return 1.0
    # An infinite factor is no overflow: one weight is negligible, and the quotient is 0.
    return math.nan if scaled == math.inf and factor < math.inf else 1.0 - dot / scaled


def _cancels(dot: float, norm_a: float, norm_b: float, alpha: float, beta: float) -> bool:
    """Whether alpha a + beta b is so much shorter than both that float32 would lose it, or NaN."""
    apart = alpha * alpha * norm_a + beta * beta * norm_b
    return not apart + 2 * alpha * beta * dot >= CANCELLED * apart


def _is_safe(coefficient: float) -> bool:
    """Whether the product with any float32 loses nothing to float32's exponent."""
    size = abs(coefficient)
    return size == 0.0 or _SAFE_LOW < size < _SAFE_HIGH or size != size


@torch.no_grad()
def gram(call: Call) -> None:
    """Write into `out` the matrix of dot products of each segment."""
    call.out.zero_()
    size, exact = len(call.inputs), call.inputs[0].dtype != torch.float64
    i, j = torch.triu_indices(size, size, offset=1, device="cpu")
    for matrix, start, stop in zip(call.out, call.bounds[:-1], call.bounds[1:], strict=True):
        sums = matrix[..., 0] if call.precise else matrix
        for rows in _rows(call, start, stop):
            sums += rows @ rows.T
        if call.precise and _may_cancel(sums):
            matrix.zero_()
            for rows in _rows(call, start, stop):
                _add_precisely(matrix, rows, exact)
        # What multiplies matrices does not promise that they are symmetric.
        matrix[j, i] = matrix[i, j]


def _rows(call: Call, start: int, stop: int) -> Iterator[Tensor]:
    """Yield the tensors' elements as rows in float64, some at a time."""
    step = max(1, 2 * _DOT_BLOCK // len(call.inputs))
    for low in range(start, stop, step):
        parts = [tensor.view(-1)[low : min(low + step, stop)] for tensor in call.inputs]
        yield torch.stack([part.double() for part in parts])


def _may_cancel(matrix: Tensor) -> bool:
    """Whether vectors may cancel beyond the limit; kernels/cpu/replay.h says how it is known."""
    diagonal = matrix.diagonal()
    lowered = torch.where(diagonal == 0, 1.0, diagonal * (1 - len(matrix) / SPREAD_LIMIT))
    factor = torch.linalg.cholesky_ex(matrix - torch.diag(diagonal - lowered))
    return bool(diagonal.isfinite().all()) and factor.info.item() > 0


def _two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rounded sum and what it lost (Knuth)."""
    total = a + b
    other = total - a
    return total, (a - (total - other)) + (b - other)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return float64 values as sums of two of 26 bits each (Veltkamp)."""
    scaled = x * (2.0**27 + 1.0)
    high = scaled - (scaled - x)
    return high, x - high


def _add_precisely(matrix: Tensor, rows: Tensor, exact: bool) -> None:
    """Add to a matrix of sums high + low; exact: products of the rows are."""
    for i, j in itertools.combinations_with_replacement(range(len(rows)), 2):
        high = rows[i] * rows[j]
        low = torch.zeros_like(high)
        if not exact:
            (a, b), (c, d) = _halves(rows[i]), _halves(rows[j])
            low = ((a * c - high) + a * d + b * c) + b * d
        while len(high) > 1:
            # The last of an odd number waits.
            half = len(high) // 2
            total, lost = _two_sum(high[:half], high[half : 2 * half])
            rest = low[:half] + low[half : 2 * half] + lost
            high, low = (
                torch.cat([new, old[2 * half :]]) for new, old in ((total, high), (rest, low))
            )
        total, lost = _two_sum(matrix[i, j, 0], high[0])
        lost = lost + matrix[i, j, 1] + low[0]
        matrix[i, j, 0] = total + lost
        matrix[i, j, 1] = lost - (matrix[i, j, 0] - total)


@torch.no_grad()
def adasum_coefficients(call: Call) -> None:
    """Write into `out` the coefficients of each segment, and find its spread."""
    for segment, row in enumerate(call.out):
        tables = call.inputs[0][:, segment].tolist()
        found, spread = _replay(tables, call.tree, call.precise)
        row.copy_(torch.tensor(found, dtype=torch.float64, device="cpu"))
        if call.spread is not None:
            call.spread[segment] = spread


def _replay(tables: list[Any], tree: Tree, precise: bool) -> tuple[list[float], float]:
    """Return the coefficients of one segment, and its spread.

    The matrix of the vectors that stand becomes, join by join, that of the vectors that then do.
    """
    size, widest = len(tables[0]), Decimal(1)
    if not all(math.isfinite(entry) for entry in _entries(tables)):
        return [math.nan] * size, math.nan
    with localcontext(_DIGITS):
        matrix = _sum_of(tables, precise)
        if not all(math.isfinite(float(matrix[i][i])) for i in range(size)):
            return [math.nan] * size, math.nan
        lengths = [max(matrix[i][i], Decimal(0)).sqrt() for i in range(size)]
        leaves = [{i: Decimal(1)} for i in range(size)]
        last = 0
        for left, right, p, q in tree:
            alpha, beta = _weigh(matrix, lengths, (left, right), (p, q), precise)
            rows = zip(matrix[left], matrix[right], strict=True)
            matrix[left] = [alpha * x + beta * y for x, y in rows]
            for row in matrix:
                row[left] = alpha * row[left] + beta * row[right]
            lengths[left] = abs(alpha) * lengths[left] + abs(beta) * lengths[right]
            leaves[left] = {i: alpha * c for i, c in leaves[left].items()} | {
                i: beta * c for i, c in leaves[right].items()
            }
            widest, last = max(widest, _spread_of(matrix[left][left], lengths[left])), left
        if precise and matrix[last][last] < _LOST * lengths[last] ** 2:
            return [0.0] * size, float(widest)
        return [float(leaves[last][i]) for i in range(size)], float(widest)


def _entries(tables: list[Any]) -> Iterator[float]:
    for one in tables:
        if isinstance(one, list):
            yield from _entries(one)
        else:
            yield one


def _sum_of(tables: list[Any], precise: bool) -> list[list[Decimal]]:
    """The sum of tables of entries, which where precise are pairs themselves."""
    cells = [list(zip(*rows, strict=True)) for rows in zip(*tables, strict=True)]
    return [
        [sum(map(Decimal, itertools.chain(*cell) if precise else cell), Decimal(0)) for cell in row]
        for row in cells
    ]


def _weigh(
    matrix: list[list[Decimal]],
    lengths: list[Decimal],
    ends: tuple[int, int],
    weights: tuple[float, float],
    precise: bool,
) -> list[Decimal]:
    """Return the factors of the vectors at both ends; kernels/cpu/replay.h says why these."""
    (i, j), given = ends, [Decimal(weight) for weight in weights]
    dot, norms = matrix[i][j], [matrix[i][i], matrix[j][j]]
    shares = [weight / sum(given) for weight in given]
    seen = _LOST if precise else Decimal(2.0**-46)
    zeros = [
        norm < Decimal(TINY) or norm < seen * lengths[end] ** 2
        for norm, end in zip(norms, ends, strict=True)
    ]
    lost = Decimal(2.0**-100) * (lengths[i] ** 2 * norms[1] + lengths[j] ** 2 * norms[0])
    if precise and not any(zeros) and abs(norms[0] * norms[1] - dot**2) <= lost:
        return shares
    return [
        Decimal(1) if zero else 1 - share * dot / norm
        for zero, share, norm in zip(zeros, shares, norms, strict=True)
    ]


def _spread_of(norm: Decimal, length: Decimal) -> Decimal:
    if length**2 < Decimal(TINY):
        return Decimal(1)
    return length**2 / norm if norm > 0 else Decimal("inf")


@torch.no_grad()
def weighted_sum(call: Call) -> None:
    """Write the sum of the tensors, times each segment's row of coefficients."""
    assert call.coefficients is not None
    flat = [tensor.view(-1) for tensor in (call.out, *call.inputs)]
    for row, low, high in zip(
        call.coefficients.tolist(), call.bounds[:-1], call.bounds[1:], strict=True
    ):
        for to, first, *others in _blocks(*[one[low:high] for one in flat]):
            total = first.double() * row[0]
            for factor, part in zip(row[1:], others, strict=True):
                total = torch.add(total, part.double(), alpha=factor)
            to.copy_(total)
            report(call.findings, (to,))
