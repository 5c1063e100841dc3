"""The CPU path: one pass of compiled code (kernels/_native.py) where there is such, else torch.

In torch the same arithmetic is done in blocks that stay in a core's cache: float32 for float16,
bfloat16 and float32, float64 for float64; results are rounded once. Dot products:
kernels/_cpu_dots.py.
"""

from __future__ import annotations

import itertools
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import TypeVar, cast

import torch
from torch import Tensor

from kernels import _native
from kernels._dots import TINY
from kernels._launch import mark_written
from kernels._packed import PackedList
from kernels.layout import Layout

# An operation on both cores costs tens of microseconds to start and to end, so blocks are as large
# as the shared cache lets them be: one intermediate beside inputs and output,
_MAP_BLOCK = 1 << 20
# and no intermediate but the output. bench/NOTES.md has the times behind the two.
_SUM_BLOCK = 1 << 21
# Coefficients inside this range times any float32 lose nothing to float32's exponent.
_SAFE_LOW, _SAFE_HIGH = 2.0**-60, 2.0**60
_dtype = operator.attrgetter("dtype")
Function = TypeVar("Function", bound=Callable[..., object])


class _Memory(threading.local):
    """Each thread's own, kept from call to call: by slot and dtype."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, torch.dtype], Tensor] = {}


_memory = _Memory()


def _without_grad(function: Function) -> Function:
    """torch.no_grad() without the cost of its context manager, and only where gradients are on."""

    @wraps(function)
    def quietly(*args: object) -> object:
        if not torch.is_grad_enabled():
            return function(*args)
        torch.set_grad_enabled(False)
        try:
            return function(*args)
        finally:
            torch.set_grad_enabled(True)

    return cast(Function, quietly)


def compute_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype arithmetic is done in for tensors of `dtypes`."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


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


def _sum_block(numel: int, found_inf: Tensor | None) -> int:
    """Elements of a block; all of them where the shared cache holds the output, or nearly."""
    return numel if found_inf is None and numel <= 2 * _SUM_BLOCK else _SUM_BLOCK


def _blocks(start: int, stop: int, block: int) -> Iterator[tuple[int, int]]:
    for low in range(start, stop, block):
        yield low, min(low + block, stop)


def _flag_non_finite(
    found_inf: Tensor | None, written: Sequence[Tensor], scale: float = 1.0
) -> None:
    """Multiply the tensors by `scale`; set `found_inf` to 1 if one held Inf or NaN before that.

    torch's own pass for GradScaler, one call for a list; times one it leaves the tensors alone.
    """
    if found_inf is None:
        return
    factor = _scratch(2, 1, torch.float32).fill_(scale)
    dtypes = set(map(_dtype, written))
    for dtype in dtypes:
        same = written if len(dtypes) == 1 else [t for t in written if t.dtype == dtype]
        torch._amp_foreach_non_finite_check_and_unscale_(list(same), found_inf, factor)


def _scales_when_flagged(found_inf: Tensor | None, scale: float, *dtypes: torch.dtype) -> bool:
    """Whether `_flag_non_finite` may multiply by `scale` what is float32 by then.

    It looks at a value before the product, which is finite if and only if the value is where the
    factor is at most 1. Its factor is a float32; a negative one would make the padding -0.
    """
    return found_inf is not None and 0.0 < scale <= 1.0 and torch.float64 not in dtypes


def _scaled_copy(target: Tensor, source: Tensor, scale: float) -> None:
    """target = scale * source, both flat and of one length; they may be one tensor."""
    wide = compute_dtype(source.dtype, target.dtype)
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


def _is_small(layout: Layout) -> bool:
    """Whether a call a tensor costs more than a pass over all of them in one piece."""
    return layout.numel <= min(_MAP_BLOCK, len(layout.numels) << 14)


def _native_for(listed: PackedList) -> _native.Library | None:
    """The compiled functions for a list: of one dtype."""
    dtypes = listed.dtype_set
    if len(dtypes) != 1:
        return None
    return _native.library(compute_dtype(listed.layout.dtype, *dtypes))


@_without_grad
def pack(
    tensors: Sequence[Tensor],
    addresses: Sequence[int],
    listed: PackedList,
    out: Tensor,
    scale: float,
    found_inf: Tensor | None,
) -> None:
    """Write the tensors into their slots of `out` and zero into the padding."""
    if not tensors:
        return
    if (native := _native_for(listed)) is not None:
        native.copy(addresses, listed, out, scale, found_inf, packing=True)
        mark_written([out], found_inf)
        return
    layout, dtypes = listed.layout, listed.dtype_set
    flat = _all_flat(tensors, layout)
    if scale == 1.0:
        _gather(flat, dtypes, layout, out)
        _flag_non_finite(found_inf, (out,))
    elif out.dtype == torch.float32 and _scales_when_flagged(found_inf, scale, *dtypes):
        _gather(flat, dtypes, layout, out)
        _flag_non_finite(found_inf, (out,), scale)
    else:
        # Zeros times such a scale are zeros in every dtype.
        if len(dtypes) == 1 and _is_small(layout) and 0.0 < scale < _SAFE_HIGH:
            source = out
            if out.dtype not in dtypes:
                source = _scratch(3, layout.numel, flat[0].dtype)
            _gather(flat, dtypes, layout, source)
            _scaled_copy(out, source, scale)
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


@_without_grad
def unpack(
    buffer: Tensor,
    tensors: list[Tensor],
    addresses: Sequence[int],
    listed: PackedList,
    scale: float,
    found_inf: Tensor | None,
) -> None:
    """Write the slots of `buffer` into the tensors."""
    if not tensors:
        return
    if (native := _native_for(listed)) is not None:
        native.copy(addresses, listed, buffer, scale, found_inf, packing=False)
        mark_written(tensors, found_inf)
        return
    layout, dtypes = listed.layout, listed.dtype_set
    flat = _all_flat(tensors, layout)
    if scale == 1.0:
        _scatter(buffer, flat, dtypes, layout)
        _flag_non_finite(found_inf, flat)
    elif dtypes == {torch.float32} and _scales_when_flagged(found_inf, scale, buffer.dtype):
        _scatter(buffer, flat, dtypes, layout)
        _flag_non_finite(found_inf, flat, scale)
    else:
        if len(dtypes) == 1 and _is_small(layout):
            scaled = _scratch(3, layout.numel, flat[0].dtype)
            _scaled_copy(scaled, buffer, scale)
            _scatter(scaled, flat, dtypes, layout)
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


@_without_grad
def sum_n(tensors: Sequence[Tensor], out: Tensor, scale: float, found_inf: Tensor | None) -> None:
    """out = scale * (t0 + t1 + ...), in list order; `out` may be any of the tensors."""
    dtype = tensors[0].dtype
    numel = out.numel()
    wide = compute_dtype(dtype, out.dtype)
    one_block = numel <= _SUM_BLOCK or found_inf is None
    if len(tensors) == 2 and scale == 1.0 and dtype == out.dtype and one_block:
        # torch adds two 16-bit numbers in float32 and rounds once, too.
        torch.add(tensors[0], tensors[1], out=out)
        _flag_non_finite(found_inf, (out,))
        return
    if (native := _native.library(wide)) is not None:
        native.sum_n(tensors, out, scale, found_inf)
        mark_written([out], found_inf)
        return
    # Accumulating in the output itself saves a copy where no later input is the output.
    direct = out.dtype == wide and out.data_ptr() not in map(Tensor.data_ptr, tensors[2:])
    scales = direct and wide == torch.float32 and _scales_when_flagged(found_inf, scale)
    whole = direct and dtype == wide
    size = _sum_block(numel, found_inf) if whole else _MAP_BLOCK
    # In one piece they need not be flat.
    if out.dim() != 1 and not (whole and numel <= size):
        out, tensors = out.view(-1), list(map(Tensor.ravel, tensors))
    for to, *parts in zip(_cut(out, size), *[_cut(t, size) for t in tensors], strict=True):
        block = to if direct else _scratch(0, to.numel(), wide)
        _sum(parts, block)
        if scales:
            _flag_non_finite(found_inf, (to,), scale)
            continue
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


def _safe(coefficient: float) -> bool:
    return (
        coefficient == 0.0
        or _SAFE_LOW < abs(coefficient) < _SAFE_HIGH
        or coefficient != coefficient
    )


@_without_grad
def scaled_add(
    a: Tensor,
    b: Tensor,
    alpha: float,
    beta: float,
    out: Tensor,
    found_inf: Tensor | None = None,
) -> None:
    """out = alpha*a + beta*b, elementwise; `out` may be a or b.

    The same bits whichever it is: ranks that reduce the same pair write into one or the other.
    """
    wide = compute_dtype(a.dtype, b.dtype, out.dtype)
    if wide == torch.float32 and not (_safe(alpha) and _safe(beta)):
        wide = torch.float64
    if (native := _native.library(wide)) is not None:
        native.blend(a, b, out, (0, out.numel()), (alpha, beta), found_inf)
        mark_written([out], found_inf)
        return
    # The output can hold the intermediate result unless it is b.
    direct = out.dtype == wide and out.data_ptr() != b.data_ptr()
    whole = direct and a.dtype == wide and b.dtype == wide
    block = _sum_block(out.numel(), found_inf) if whole else _MAP_BLOCK
    if whole and out.numel() <= block:
        torch.add(torch.mul(a, alpha, out=out), b, alpha=beta, out=out)
        _flag_non_finite(found_inf, (out,))
        return
    for left, right, to in zip(*[_cut(_flat(t), block) for t in (a, b, out)], strict=True):
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


@_without_grad
def combine(
    a: Tensor,
    b: Tensor,
    dots: Sequence[Sequence[float]],
    bounds: Sequence[int],
    out: Tensor,
    found_inf: Tensor | None = None,
) -> None:
    """out = (1 - d/(2A)) a + (1 - d/(2B)) b a segment, with `dots` S rows (d, A, B)."""
    factors = [(_coefficient(dot, mine), _coefficient(dot, theirs)) for dot, mine, theirs in dots]
    if all(map(_safe, itertools.chain(*factors))):
        native = _native.library(compute_dtype(a.dtype, out.dtype))
        if native is not None:
            native.blend(a, b, out, bounds, [*itertools.chain(*factors)], found_inf)
            mark_written([out], found_inf)
            return
    x, y, target = _flat(a), _flat(b), _flat(out)
    sizes = [high - low for low, high in itertools.pairwise(bounds)]
    segments = [(x, y, target)]
    if len(sizes) != 1:
        segments = list(zip(*[t.split_with_sizes(sizes) for t in (x, y, target)], strict=True))
    for (alpha, beta), (left, right, to) in zip(factors, segments, strict=True):
        if to.numel() > 0:
            scaled_add(left, right, alpha, beta, to, found_inf)


def _coefficient(dot: float, norm: float) -> float:
    """1 - d/(2A); 1 below sqrt(DBL_MIN), which no NaN is."""
    return 1.0 if norm < TINY else 1.0 - dot / (2.0 * norm)
