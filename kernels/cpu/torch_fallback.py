"""The CPU path without compiled code: torch's functions, in blocks that fit into a cache.

The arithmetic is that of kernels/cpu/native.c: float32 for float16, bfloat16 and float32, float64
for float64, rounded once. Dot products are computed in float64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kernels.arguments import Call
from kernels.arithmetic import CANCELLED, TINY, compute_dtype
from kernels.findings import Findings

# An operation on both cores costs tens of microseconds to start and to end, so blocks are as large
# as the shared cache lets them be; bench/NOTES.md has the times behind them.
_MAP_BLOCK = 1 << 20
# Two float64 copies in the shared cache.
_DOT_BLOCK = 1 << 18
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
    """Write out = scale * (t0 + t1 + ...), in list order; `out` may be any of the tensors."""
    wide = compute_dtype(call.inputs[0].dtype, call.out.dtype)
    for to, first, *others in _blocks(call.out, *call.inputs):
        total = first.to(wide)
        for part in others:
            # Converted first, which is faster than an addition of two dtypes.
            total = total + part.to(wide)
        to.copy_(total if scale == 1.0 else total * scale)
        report(call.findings, (to,))


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
    for left, right, to in _blocks(a, b, out):
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
