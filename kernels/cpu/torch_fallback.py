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

from kernels.layout import Layout
from kernels.packed_list import PackedList

# An operation on both cores costs tens of microseconds to start and to end, so blocks are as large
# as the shared cache lets them be; bench/NOTES.md has the times behind them.
_MAP_BLOCK = 1 << 20
# Two float64 copies in the shared cache.
_DOT_BLOCK = 1 << 18
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


def _flag_non_finite(found_inf: Tensor | None, written: Sequence[Tensor]) -> None:
    """Set `found_inf` to 1 if one of the tensors holds Inf or NaN.

    torch's own pass for GradScaler, one call for a list; times one it leaves the tensors alone.
    """
    if found_inf is None:
        return
    one = _scratch(2, 1, torch.float32).fill_(1.0)
    dtypes = set(map(_dtype, written))
    for dtype in dtypes:
        same = written if len(dtypes) == 1 else [t for t in written if t.dtype == dtype]
        torch._amp_foreach_non_finite_check_and_unscale_(list(same), found_inf, one)


def _scaled_copy(target: Tensor, source: Tensor, scale: float) -> None:
    """target = scale * source, both flat and of one length; they may be one tensor."""
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
    listed: PackedList,
    out: Tensor,
    scale: float,
    found_inf: Tensor | None,
) -> None:
    """Write the tensors into their slots of `out` and zero into the padding."""
    layout = listed.layout
    flat = _all_flat(tensors, layout)
    if scale == 1.0:
        _gather(flat, listed.dtype_set, layout, out)
    else:
        _zero_padding(layout, out)
        for slot, tensor in zip(_slots(layout, out), flat, strict=True):
            _scaled_copy(slot, tensor, scale)
    _flag_non_finite(found_inf, (out,))


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
    buffer: Tensor,
    tensors: Sequence[Tensor],
    listed: PackedList,
    scale: float,
    found_inf: Tensor | None,
) -> None:
    """Write the slots of `buffer` into the tensors."""
    layout = listed.layout
    flat = _all_flat(tensors, layout)
    if scale == 1.0:
        _scatter(buffer, flat, listed.dtype_set, layout)
    else:
        for slot, tensor in zip(_slots(layout, buffer), flat, strict=True):
            _scaled_copy(tensor, slot, scale)
    _flag_non_finite(found_inf, flat)


def _scatter(buffer: Tensor, flat: list[Tensor], dtypes: set[torch.dtype], layout: Layout) -> None:
    """Copy the slots into the tensors."""
    if layout.dense and dtypes == {buffer.dtype}:
        torch.split_with_sizes_copy(buffer, layout.slots, out=flat)
    else:
        torch._foreach_copy_(flat, _slots(layout, buffer))


@torch.no_grad()
def sum_n(
    tensors: Sequence[Tensor],
    wide: torch.dtype,
    out: Tensor,
    scale: float,
    found_inf: Tensor | None,
) -> None:
    """out = scale * (t0 + t1 + ...), in list order; `out` may be any of the tensors."""
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
        _flag_non_finite(found_inf, (to,))


def _sum(parts: Sequence[Tensor], total: Tensor) -> None:
    """total = sum of the parts in order."""
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
    a: Tensor,
    b: Tensor,
    alpha: float,
    beta: float,
    wide: torch.dtype,
    out: Tensor,
    found_inf: Tensor | None,
) -> None:
    """out = alpha*a + beta*b, elementwise; `out` may be a or b.

    The same bits whichever it is: ranks that reduce the same pair write into one or the other.
    """
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
        _flag_non_finite(found_inf, (to,))


def _wide(slot: int, tensor: Tensor) -> Tensor:
    return _scratch(slot, tensor.numel(), torch.float64).copy_(tensor)


@torch.no_grad()
def dot_and_norms(a: Tensor, b: Tensor, bounds: Sequence[int]) -> list[list[float]]:
    """S rows (a.b, |a|^2, |b|^2) of the flattened segments."""
    x, y = _flat(a), _flat(b)
    rows = [[0.0, 0.0, 0.0] for _ in range(len(bounds) - 1)]
    for row, (start, stop) in zip(rows, itertools.pairwise(bounds), strict=True):
        for low in range(start, stop, _DOT_BLOCK):
            high = min(low + _DOT_BLOCK, stop)
            u, v = _wide(0, x[low:high]), _wide(1, y[low:high])
            row[0] += torch.dot(u, v).item()
            row[1] += torch.dot(u, u).item()
            row[2] += torch.dot(v, v).item()
    return rows
