"""The CPU path: the kernels' arithmetic in torch, in blocks that stay in a core's cache.

Arithmetic is float32 for float16, bfloat16 and float32, float64 for float64; results are rounded
once. Dot products are taken in float64, where no square of a float32 under- or overflows.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import TypeVar, cast

import torch
from torch import Tensor

from kernels._dots import TINY
from kernels.layout import Layout

# An operation on both cores costs tens of microseconds to start and to end, so blocks are as large
# as the shared cache lets them be: two float64 copies for the dots,
_DOT_BLOCK = 1 << 18
# one intermediate beside inputs and output,
_MAP_BLOCK = 1 << 19
# and no intermediate but the output. bench/NOTES.md has the times behind the three.
_SUM_BLOCK = 1 << 21
# Coefficients inside this range times any float32 lose nothing to float32's exponent.
_SAFE_LOW, _SAFE_HIGH = 2.0**-60, 2.0**60
Function = TypeVar("Function", bound=Callable[..., object])


class _Memory(threading.local):
    """Each thread's own, kept from call to call: by slot and dtype."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, torch.dtype], Tensor] = {}


_memory = _Memory()


def _without_grad(function: Function) -> Function:
    """torch.no_grad(), which costs microseconds, only where gradients are on."""

    @wraps(function)
    def quietly(*args: object) -> object:
        if not torch.is_grad_enabled():
            return function(*args)
        with torch.no_grad():
            return function(*args)

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
    return memory[:numel]


def _part(flat: Tensor, low: int, high: int) -> Tensor:
    """flat[low:high], without the cost of a view where that is all of it."""
    return flat if high - low == flat.numel() else flat[low:high]


def _blocks(start: int, stop: int, block: int) -> Iterator[tuple[int, int]]:
    for low in range(start, stop, block):
        yield low, min(low + block, stop)


def _flag_non_finite(found_inf: Tensor | None, *written: Tensor) -> None:
    """Set `found_inf` to 1 if any of the tensors holds Inf or NaN.

    torch's own pass for GradScaler, one call for a list; times one it leaves the tensors alone.
    """
    if found_inf is None:
        return
    for dtype in dict.fromkeys(tensor.dtype for tensor in written):
        same = [tensor for tensor in written if tensor.dtype == dtype]
        torch._amp_foreach_non_finite_check_and_unscale_(same, found_inf, found_inf.new_ones(()))


def _scaled_copy(target: Tensor, source: Tensor, scale: float) -> None:
    """target = scale * source, both flat and of one length."""
    wide = compute_dtype(source.dtype, target.dtype)
    if target.dtype != wide and source.dtype not in (wide, target.dtype):
        for low, high in _blocks(0, source.numel(), _MAP_BLOCK):
            block = _scratch(0, high - low, wide)
            target[low:high].copy_(block.copy_(source[low:high]).mul_(scale))
    elif target.dtype == wide and source.dtype != wide:
        target.copy_(source).mul_(scale)
    else:
        torch.mul(source, scale, out=target)


def _flat(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def _slots(layout: Layout, buffer: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The 1-D places of the tensors in `buffer`, and those of the padding."""
    slots = list(buffer.split(layout.slots))
    padding = []
    if not layout.dense:
        for i, (size, numel) in enumerate(zip(layout.slots, layout.numels, strict=True)):
            if size != numel:
                padding.append(slots[i][numel:])
                slots[i] = slots[i][:numel]
    return slots, padding


@_without_grad
def pack(
    tensors: Sequence[Tensor],
    layout: Layout,
    out: Tensor,
    scale: float,
    found_inf: Tensor | None,
) -> None:
    """Write the tensors into their slots of `out` and zero into the padding."""
    if not tensors:
        return
    flat = [_flat(tensor) for tensor in tensors]
    if scale == 1.0 and layout.dense:
        torch.cat(flat, out=out)
    else:
        slots, padding = _slots(layout, out)
        if padding:
            torch._foreach_zero_(padding)
        if scale == 1.0:
            torch._foreach_copy_(slots, flat)
        else:
            for slot, tensor in zip(slots, flat, strict=True):
                _scaled_copy(slot, tensor, scale)
    _flag_non_finite(found_inf, out)


@_without_grad
def unpack(
    buffer: Tensor,
    tensors: Sequence[Tensor],
    layout: Layout,
    scale: float,
    found_inf: Tensor | None,
) -> None:
    """Write the slots of `buffer` into the tensors."""
    if not tensors:
        return
    flat = [_flat(tensor) for tensor in tensors]
    if scale == 1.0 and layout.dense and all(t.dtype == buffer.dtype for t in flat):
        torch.split_with_sizes_copy(buffer, layout.slots, out=flat)
    elif scale == 1.0:
        torch._foreach_copy_(flat, _slots(layout, buffer)[0])
    else:
        for slot, tensor in zip(_slots(layout, buffer)[0], flat, strict=True):
            _scaled_copy(tensor, slot, scale)
    _flag_non_finite(found_inf, *flat)


@_without_grad
def sum_n(tensors: Sequence[Tensor], out: Tensor, scale: float, found_inf: Tensor | None) -> None:
    """out = scale * (t0 + t1 + ...), in list order; `out` may be any of the tensors."""
    dtype = tensors[0].dtype
    wide = compute_dtype(dtype, out.dtype)
    flat = [_flat(tensor) for tensor in tensors]
    target = _flat(out)
    # Accumulating in the output itself saves a copy where no later input is the output.
    direct = out.dtype == wide and all(t.data_ptr() != out.data_ptr() for t in tensors[2:])
    for low, high in _blocks(0, out.numel(), _SUM_BLOCK if direct else _MAP_BLOCK):
        parts = [_part(tensor, low, high) for tensor in flat]
        to = _part(target, low, high)
        block = to if direct else _scratch(0, high - low, wide)
        if len(parts) > 1 and dtype == wide:
            torch.add(parts[0], parts[1], out=block)
        else:
            block.copy_(parts[0])
            for part in parts[1:2]:
                _accumulate(block, part)
        for part in parts[2:]:
            _accumulate(block, part)
        if not direct:
            _scaled_copy(to, block, scale)
        elif scale != 1.0:
            block.mul_(scale)
        _flag_non_finite(found_inf, to)


def _accumulate(total: Tensor, tensor: Tensor) -> None:
    """total += tensor. Converting apart is faster than an addition of two dtypes."""
    if tensor.dtype != total.dtype:
        tensor = _scratch(1, tensor.numel(), total.dtype).copy_(tensor)
    total.add_(tensor)


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
    x, y, target = _flat(a), _flat(b), _flat(out)
    # The output can hold the intermediate result unless it is b.
    direct = out.dtype == wide and out.data_ptr() != b.data_ptr()
    for low, high in _blocks(0, target.numel(), _SUM_BLOCK if direct else _MAP_BLOCK):
        left, right, to = _part(x, low, high), _part(y, low, high), _part(target, low, high)
        block = to if direct else _scratch(0, high - low, wide)
        if left.dtype == wide:
            torch.mul(left, alpha, out=block)
        else:
            block.copy_(left).mul_(alpha)
        if right.dtype != wide:
            right = _scratch(1, high - low, wide).copy_(right)
        torch.add(block, right, alpha=beta, out=to)
        _flag_non_finite(found_inf, to)


def _wide(slot: int, tensor: Tensor) -> Tensor:
    return _scratch(slot, tensor.numel(), torch.float64).copy_(tensor)


def _dots(u: Tensor, v: Tensor) -> list[float]:
    return [torch.dot(u, v).item(), torch.dot(u, u).item(), torch.dot(v, v).item()]


@_without_grad
def dot_and_norms(a: Tensor, b: Tensor, bounds: Sequence[int]) -> list[list[float]]:
    """S rows (a.b, |a|^2, |b|^2) of the flattened segments."""
    x, y = _flat(a), _flat(b)
    if len(bounds) == 2 and 0 < x.numel() <= _DOT_BLOCK:
        return [_dots(_wide(0, x), _wide(1, y))]
    count = len(bounds) - 1
    rows = [[0.0, 0.0, 0.0] for _ in range(count)]
    segment = 0
    for low, high in _blocks(0, x.numel(), _DOT_BLOCK):
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
    x, y, target = _flat(a), _flat(b), _flat(out)
    for (dot, mine, theirs), low, high in zip(dots, bounds[:-1], bounds[1:], strict=True):
        if low < high:
            alpha, beta = _coefficient(dot, mine), _coefficient(dot, theirs)
            left, right, to = _part(x, low, high), _part(y, low, high), _part(target, low, high)
            scaled_add(left, right, alpha, beta, to, found_inf)


def _coefficient(dot: float, norm: float) -> float:
    """1 - d/(2A); 1 below sqrt(DBL_MIN), which no NaN is."""
    return 1.0 if norm < TINY else 1.0 - dot / (2.0 * norm)
