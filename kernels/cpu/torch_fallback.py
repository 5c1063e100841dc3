"""The CPU path where nothing could be compiled: torch's functions, in blocks that stay in a cache.

The arithmetic of kernels/cpu/native.c: float32 for float16, bfloat16 and float32, float64 for
float64, rounded once. Dot products are taken in float64.
"""

from __future__ import annotations

import itertools
import operator
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.arithmetic import TINY, compute_dtype
from kernels.findings import Findings
from kernels.layout import Layout, PackedList

# An operation on both cores costs tens of microseconds to start and to end, so blocks are as large
# as the shared cache lets them be; bench/NOTES.md has the times behind them.
_MAP_BLOCK = 1 << 20
# Two float64 copies in the shared cache.
_DOT_BLOCK = 1 << 18
_SAFE_LOW, _SAFE_HIGH = 2.0**-60, 2.0**60
_dtype = operator.attrgetter("dtype")


class _Memory(threading.local):
    """Each thread's own, kept from call to call: by slot and dtype."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, torch.dtype], Tensor] = {}


_memory = _Memory()


def _scratch(slot: int, numel: int, dtype: torch.dtype) -> Tensor:
    """`numel` elements of this thread's own memory of `slot`."""
    memory = _memory.blocks.get((slot, dtype))
    if memory is None or memory.numel() < numel:
        # Nobody may write outside inference mode to a tensor made inside it.
        with torch.inference_mode(False):
            memory = torch.empty(numel, dtype=dtype, device="cpu")
        _memory.blocks[slot, dtype] = memory
    return memory if memory.numel() == numel else memory[:numel]


def _cut(flat: Tensor, block: int) -> Sequence[Tensor]:
    """Its pieces of `block` elements, the last of them shorter."""
    return (flat,) if flat.numel() <= block else flat.split(block)


def report(findings: Findings, written: Sequence[Tensor]) -> None:
    """Report of the values in tensors just written what `findings` asks for."""
    if findings.found_inf is not None:
        _flag_non_finite(findings.found_inf, written)
    if findings.max_abs is not None:
        _raise_max_abs(findings.max_abs, written)


def _raise_max_abs(max_abs: Tensor, written: Sequence[Tensor]) -> None:
    """Raise `max_abs` to the largest magnitude in the tensors, NaN if they hold one."""
    for tensor in written:
        if tensor.numel():
            low, high = torch.aminmax(tensor)
            largest = torch.maximum(low.abs(), high.abs()).to(max_abs.dtype)
            max_abs.copy_(torch.maximum(max_abs, largest))


def _flag_non_finite(found_inf: Tensor, written: Sequence[Tensor]) -> None:
    """Set `found_inf` to 1 if one of the tensors holds Inf or NaN.

    torch's own pass for GradScaler, one call for a list; times one it leaves the tensors alone.
    """
    one = _scratch(2, 1, torch.float32).fill_(1.0)
    dtypes = set(map(_dtype, written))
    for dtype in dtypes:
        same = written if len(dtypes) == 1 else [t for t in written if t.dtype == dtype]
        torch._amp_foreach_non_finite_check_and_unscale_(list(same), found_inf, one)


def _scaled_copy(target: Tensor, source: Tensor, scale: float) -> None:
    """Write target = scale * source, both flat and of one length; they may be one tensor."""
    wide = torch.promote_types(torch.float32, torch.promote_types(source.dtype, target.dtype))
    if target.dtype == source.dtype:
        torch.mul(source, scale, out=target)
    elif target.dtype == wide:
        target.copy_(source).mul_(scale)
    else:
        # Converting apart is faster than a product into another dtype.
        for part, to in zip(_cut(source, _MAP_BLOCK), _cut(target, _MAP_BLOCK), strict=True):
            block = _scratch(0, part.numel(), wide)
            if part.dtype == wide:
                torch.mul(part, scale, out=block)
            else:
                block.copy_(part).mul_(scale)
            to.copy_(block)


def _flat(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def _all_flat(tensors: Sequence[Tensor], layout: Layout) -> list[Tensor]:
    # A view each, of contiguous tensors, at two thirds of the cost of calling view from Python.
    return list(tensors) if layout.flat else list(map(Tensor.ravel, tensors))


def _slots(layout: Layout, buffer: Tensor) -> list[Tensor]:
    """The 1-D places of the tensors in `buffer`."""
    if layout.dense:
        return list(buffer.split_with_sizes(layout.slots))
    return list(buffer.split_with_sizes(layout.pieces)[::2])


@torch.no_grad()
def pack(
    tensors: Sequence[Tensor],
    packed: PackedList,
    out: Tensor,
    findings: Findings,
    scale: float,
) -> None:
    """Write the tensors into their slots of `out` and zero into the padding."""
    layout = packed.layout
    flat = _all_flat(tensors, layout)
    if scale == 1.0:
        _gather(flat, packed.dtype_set, layout, out)
    else:
        _zero_padding(layout, out)
        for slot, tensor in zip(_slots(layout, out), flat, strict=True):
            _scaled_copy(slot, tensor, scale)
    report(findings, (out,))


def _gather(flat: list[Tensor], dtypes: set[torch.dtype], layout: Layout, out: Tensor) -> None:
    """Copy the tensors into their slots and zero into the padding."""
    # Of other dtypes than its output's, torch.cat is slow.
    if layout.dense and dtypes == {out.dtype}:
        torch.cat(flat, out=out)
    else:
        _zero_padding(layout, out)
        torch._foreach_copy_(_slots(layout, out), flat)


def _zero_padding(layout: Layout, out: Tensor) -> None:
    if not layout.dense:
        torch._foreach_zero_(out.split_with_sizes(layout.pieces)[1::2])


@torch.no_grad()
def unpack(
    tensors: Sequence[Tensor],
    packed: PackedList,
    buffer: Tensor,
    findings: Findings,
    scale: float,
) -> None:
    """Write the slots of `buffer` into the tensors."""
    layout = packed.layout
    flat = _all_flat(tensors, layout)
    if scale == 1.0:
        _scatter(buffer, flat, packed.dtype_set, layout)
    else:
        for slot, tensor in zip(_slots(layout, buffer), flat, strict=True):
            _scaled_copy(tensor, slot, scale)
    report(findings, flat)


def _scatter(buffer: Tensor, flat: list[Tensor], dtypes: set[torch.dtype], layout: Layout) -> None:
    """Copy the slots into the tensors."""
    if layout.dense and dtypes == {buffer.dtype}:
        torch.split_with_sizes_copy(buffer, layout.slots, out=flat)
    else:
        torch._foreach_copy_(flat, _slots(layout, buffer))


@torch.no_grad()
def sum_n(tensors: Sequence[Tensor], out: Tensor, findings: Findings, scale: float) -> None:
    """Write out = scale * (t0 + t1 + ...), in list order; `out` may be any of the tensors."""
    wide = compute_dtype(tensors[0].dtype, out.dtype)
    # Accumulating in the output itself saves a copy where no later input is the output.
    direct = out.dtype == wide and out.data_ptr() not in map(Tensor.data_ptr, tensors[2:])
    cuts = [_cut(_flat(tensor), _MAP_BLOCK) for tensor in (out, *tensors)]
    for to, *parts in zip(*cuts, strict=True):
        block = to if direct else _scratch(0, to.numel(), wide)
        _sum(parts, block)
        if scale != 1.0:
            _scaled_copy(to, block, scale)
        elif not direct:
            to.copy_(block)
        report(findings, (to,))


def _sum(parts: Sequence[Tensor], total: Tensor) -> None:
    """Write total = the sum of the parts, in order."""
    if parts[0].dtype == total.dtype and len(parts) > 1:
        torch.add(parts[0], parts[1], out=total)
        for part in parts[2:]:
            total.add_(part)
        return
    total.copy_(parts[0])
    if len(parts) > 1:
        # Apart, which is faster than an addition of two dtypes.
        block = _scratch(1, total.numel(), total.dtype)
        for part in parts[1:]:
            total.add_(block.copy_(part))


@torch.no_grad()
def scaled_add(
    a: Tensor, b: Tensor, out: Tensor, findings: Findings, alpha: float, beta: float
) -> None:
    """Write out = alpha*a + beta*b, elementwise; `out` may be a or b.

    It has the same bits whichever it is: ranks that reduce a pair write into one or the other.
    """
    wide = compute_dtype(a.dtype, b.dtype, out.dtype)
    if not (_is_safe(alpha) and _is_safe(beta)):
        wide = torch.float64
    # The output can hold the intermediate result unless it is b.
    direct = out.dtype == wide and out.data_ptr() != b.data_ptr()
    cuts = [_cut(_flat(tensor), _MAP_BLOCK) for tensor in (a, b, out)]
    for left, right, to in zip(*cuts, strict=True):
        total = to if direct else _scratch(0, to.numel(), wide)
        if left.dtype == wide:
            torch.mul(left, alpha, out=total)
        else:
            total.copy_(left).mul_(alpha)
        if right.dtype != wide:
            right = _scratch(1, to.numel(), wide).copy_(right)
        if out.dtype == wide:
            torch.add(total, right, alpha=beta, out=to)
        else:
            to.copy_(torch.add(total, right, alpha=beta, out=total))
        report(findings, (to,))


def _wide(slot: int, tensor: Tensor) -> Tensor:
    return _scratch(slot, tensor.numel(), torch.float64).copy_(tensor)


@torch.no_grad()
def dot_and_norms(a: Tensor, b: Tensor, bounds: Sequence[int], dots: Tensor) -> None:
    """Write into `dots` a row (a.b, |a|^2, |b|^2) for each segment."""
    x, y = _flat(a), _flat(b)
    for row, (start, stop) in zip(dots, itertools.pairwise(bounds), strict=True):
        found = [0.0, 0.0, 0.0]
        for low in range(start, stop, _DOT_BLOCK):
            high = min(low + _DOT_BLOCK, stop)
            u, v = _wide(0, x[low:high]), _wide(1, y[low:high])
            for i, (left, right) in enumerate(((u, v), (u, u), (v, v))):
                found[i] += torch.dot(left, right).item()
        row.copy_(torch.tensor(found, dtype=torch.float64))


@torch.no_grad()
def combine(
    a: Tensor, b: Tensor, dots: Tensor, bounds: Sequence[int], out: Tensor, findings: Findings
) -> None:
    """Write out = (1 - d/(2A)) a + (1 - d/(2B)) b per segment; (d, A, B) are rows of `dots`."""
    parts = [tensor.detach().view(-1) for tensor in (a, b, out)]
    for (dot, norm_a, norm_b), (low, high) in zip(
        dots.tolist(), itertools.pairwise(bounds), strict=True
    ):
        if high > low:
            left, right, to = (part[low:high] for part in parts)
            alpha, beta = _coefficient(dot, norm_a), _coefficient(dot, norm_b)
            scaled_add(left, right, to, findings, alpha, beta)


def adasum(a: Tensor, b: Tensor, bounds: Sequence[int], out: Tensor, findings: Findings) -> None:
    """`combine` of the tensors' `dot_and_norms`."""
    dots = torch.empty(len(bounds) - 1, 3, dtype=torch.float64, device="cpu")
    dot_and_norms(a, b, bounds, dots)
    combine(a, b, dots, bounds, out, findings)


def _coefficient(dot: float, norm: float) -> float:
    """1 - d/(2A); 1 for a norm below TINY, which no NaN is."""
    return 1.0 if norm < TINY else 1.0 - dot / (2.0 * norm)


def _is_safe(coefficient: float) -> bool:
    """Whether the product with any float32 loses nothing to float32's exponent."""
    size = abs(coefficient)
    return size == 0.0 or _SAFE_LOW < size < _SAFE_HIGH or size != size
