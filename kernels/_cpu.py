"""The CPU path: the kernels' arithmetic in torch, in blocks that stay in a core's cache.

Arithmetic is float32 for float16, bfloat16 and float32, float64 for float64; results are rounded
once. Dot products are taken in float64, where no square of a float32 under- or overflows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kernels.layout import Layout

# Two float64 copies of a block are 512 KiB: they stay in the L2 of current server cores.
_DOT_BLOCK = 1 << 15
# One float32 block of 256 KiB beside its two inputs.
_MAP_BLOCK = 1 << 16
# Coefficients inside this range times any float32 lose nothing to float32's exponent.
_SAFE_LOW, _SAFE_HIGH = 2.0**-60, 2.0**60


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype arithmetic is done in for tensors of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _blocks(start: int, stop: int, block: int) -> Iterator[tuple[int, int]]:
    for low in range(start, stop, block):
        yield low, min(low + block, stop)


def _scaled_copy(target: Tensor, source: Tensor, scale: float) -> None:
    wide = torch.promote_types(compute_dtype(source.dtype), compute_dtype(target.dtype))
    if target.dtype == wide:
        target.copy_(source).mul_(scale)
    elif source.dtype == wide or source.dtype == target.dtype:
        torch.mul(source, scale, out=target)
    else:
        target.copy_(source.to(wide).mul_(scale))


def pack(tensors: Sequence[Tensor], layout: Layout, out: Tensor, scale: float) -> None:
    """Write the tensors into their slots of `out` and zero into the padding."""
    if scale == 1.0 and all(tensor.dtype == layout.dtype for tensor in tensors):
        zeros = out.new_zeros(layout.alignment // layout.dtype.itemsize)
        pieces = []
        ends = layout.segments[1:]
        for tensor, offset, end in zip(tensors, layout.offsets, ends, strict=True):
            pieces.append(tensor.reshape(-1))
            if padding := end - offset - tensor.numel():
                pieces.append(zeros[:padding])
        if pieces:
            torch.cat(pieces, out=out)
        return
    out.zero_()
    for tensor, view in zip(tensors, layout.views(out), strict=True):
        _scaled_copy(view, tensor, scale)


def unpack(buffer: Tensor, tensors: Sequence[Tensor], layout: Layout, scale: float) -> None:
    """Write the slots of `buffer` into the tensors."""
    for tensor, view in zip(tensors, layout.views(buffer), strict=True):
        if scale == 1.0:
            tensor.copy_(view)
        else:
            _scaled_copy(tensor, view, scale)


def sum_n(tensors: Sequence[Tensor], out: Tensor, scale: float) -> None:
    """out = scale * (t0 + t1 + ...), in list order; `out` may be any of the tensors."""
    wide = compute_dtype(out.dtype)
    flat = [tensor.view(-1) for tensor in tensors]
    target = out.view(-1)
    scratch = torch.empty(min(_MAP_BLOCK, out.numel()), dtype=wide)
    # Accumulating in the output itself saves a copy where no later input is the output.
    direct = out.dtype == wide and all(t.data_ptr() != out.data_ptr() for t in tensors[2:])
    for low, high in _blocks(0, out.numel(), _MAP_BLOCK):
        block = target[low:high] if direct else scratch[: high - low]
        if len(flat) > 1 and out.dtype == wide:
            torch.add(flat[0][low:high], flat[1][low:high], out=block)
        else:
            block.copy_(flat[0][low:high])
            for tensor in flat[1:2]:
                block.add_(tensor[low:high])
        for tensor in flat[2:]:
            block.add_(tensor[low:high])
        if scale != 1.0:
            block.mul_(scale)
        if not direct:
            target[low:high].copy_(block)


def scaled_add(
    a: Tensor, b: Tensor, alpha: float, beta: float, out: Tensor, bounds: tuple[int, int]
) -> None:
    """out = alpha*a + beta*b on the flattened elements [bounds[0], bounds[1])."""
    wide = compute_dtype(out.dtype)
    if wide == torch.float32 and not all(
        value == 0.0 or _SAFE_LOW < abs(value) < _SAFE_HIGH or value != value
        for value in (alpha, beta)
    ):
        wide = torch.float64
    x, y, target = a.view(-1), b.view(-1), out.view(-1)
    length = min(_MAP_BLOCK, bounds[1] - bounds[0])
    scratch = torch.empty(length, dtype=wide)
    widened = torch.empty(length, dtype=wide) if out.dtype != wide else None
    for low, high in _blocks(*bounds, _MAP_BLOCK):
        block = scratch[: high - low]
        if widened is None:
            torch.mul(y[low:high], beta, out=block)
            torch.add(block, x[low:high], alpha=alpha, out=target[low:high])
        else:
            block.copy_(y[low:high]).mul_(beta)
            left = widened[: high - low].copy_(x[low:high])
            target[low:high].copy_(block.add_(left, alpha=alpha))


def dot_and_norms(a: Tensor, b: Tensor, bounds: Sequence[int]) -> Tensor:
    """float64 [S, 3] rows (a.b, |a|^2, |b|^2) of the flattened segments."""
    x, y = a.view(-1), b.view(-1)
    count = len(bounds) - 1
    rows = [[0.0, 0.0, 0.0] for _ in range(count)]
    length = min(_DOT_BLOCK, x.numel())
    left, right = (torch.empty(length, dtype=torch.float64) for _ in range(2))
    segment = 0
    for low, high in _blocks(0, x.numel(), _DOT_BLOCK):
        left[: high - low].copy_(x[low:high])
        right[: high - low].copy_(y[low:high])
        while bounds[segment + 1] <= low:
            segment += 1
        here = segment
        while here < count and bounds[here] < high:
            start, stop = max(bounds[here], low) - low, min(bounds[here + 1], high) - low
            if start < stop:
                u, v, row = left[start:stop], right[start:stop], rows[here]
                row[0] += torch.dot(u, v).item()
                row[1] += torch.dot(u, u).item()
                row[2] += torch.dot(v, v).item()
            here += 1
    return torch.tensor(rows, dtype=torch.float64).view(count, 3)


def combine(a: Tensor, b: Tensor, coefficients: Tensor, bounds: Sequence[int], out: Tensor) -> None:
    """out = ca*a + cb*b a segment, with `coefficients` float64 [S, 2] rows (ca, cb)."""
    for (alpha, beta), low, high in zip(
        coefficients.tolist(), bounds[:-1], bounds[1:], strict=True
    ):
        if low < high:
            scaled_add(a, b, alpha, beta, out, (low, high))
