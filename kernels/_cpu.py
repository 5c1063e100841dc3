"""The CPU path: the kernels' arithmetic in torch, in blocks that stay in a core's cache.

Arithmetic is float32 for float16, bfloat16 and float32, float64 for float64; results are rounded
once. Dot products are taken in float64, where no square of a float32 under- or overflows.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kernels.layout import Layout

# Starting torch's threads costs more than leaving the cache of one core: bench/NOTES.md has the
# times behind these three. Two float64 copies of a block for the dots,
_DOT_BLOCK = 1 << 18
# one float32 intermediate beside its inputs,
_MAP_BLOCK = 1 << 17
# and sums that accumulate in their output.
_SUM_BLOCK = 1 << 20
# Coefficients inside this range times any float32 lose nothing to float32's exponent.
_SAFE_LOW, _SAFE_HIGH = 2.0**-60, 2.0**60
_memory = threading.local()


def compute_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype arithmetic is done in for tensors of `dtypes`."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _scratch(slot: int, numel: int, dtype: torch.dtype) -> Tensor:
    """`numel` elements of this thread's own memory of `slot`, kept from call to call."""
    name = f"{slot} {dtype}"
    memory: Tensor | None = getattr(_memory, name, None)
    if memory is None or memory.numel() < numel:
        # Nobody may write outside inference mode to a tensor made inside it.
        with torch.inference_mode(False):
            memory = torch.empty(numel, dtype=dtype)
        setattr(_memory, name, memory)
    return memory[:numel]


def _blocks(start: int, stop: int, block: int) -> Iterator[tuple[int, int]]:
    for low in range(start, stop, block):
        yield low, min(low + block, stop)


def _flag_non_finite(found_inf: Tensor | None, *written: Tensor) -> None:
    """Set `found_inf` to 1 if any of the tensors holds Inf or NaN: its extremes show them."""
    if found_inf is None:
        return
    for tensor in written:
        if tensor.numel() and not all(end.isfinite() for end in torch.aminmax(tensor)):
            found_inf.fill_(1.0)
            return


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
    ends = layout.segments[1:]
    sizes = [end - offset for offset, end in zip(layout.offsets, ends, strict=True)]
    slots = list(buffer.split(sizes))
    padding = []
    for i, (size, numel) in enumerate(zip(sizes, layout.numels, strict=True)):
        if size != numel:
            padding.append(slots[i][numel:])
            slots[i] = slots[i][:numel]
    return slots, padding


@torch.no_grad()
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
    if scale == 1.0 and sum(layout.numels) == layout.numel:
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


@torch.no_grad()
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
    slots, _ = _slots(layout, buffer)
    if scale == 1.0:
        torch._foreach_copy_(flat, slots)
    else:
        for slot, tensor in zip(slots, flat, strict=True):
            _scaled_copy(tensor, slot, scale)
    _flag_non_finite(found_inf, *flat)


@torch.no_grad()
def sum_n(tensors: Sequence[Tensor], out: Tensor, scale: float, found_inf: Tensor | None) -> None:
    """out = scale * (t0 + t1 + ...), in list order; `out` may be any of the tensors."""
    dtype = tensors[0].dtype
    wide = compute_dtype(dtype, out.dtype)
    flat = [tensor.view(-1) for tensor in tensors]
    target = out.view(-1)
    # Accumulating in the output itself saves a copy where no later input is the output.
    direct = out.dtype == wide and all(t.data_ptr() != out.data_ptr() for t in tensors[2:])
    for low, high in _blocks(0, out.numel(), _SUM_BLOCK if direct else _MAP_BLOCK):
        block = target[low:high] if direct else _scratch(0, high - low, wide)
        if len(flat) > 1 and dtype == wide:
            torch.add(flat[0][low:high], flat[1][low:high], out=block)
        else:
            block.copy_(flat[0][low:high])
            for tensor in flat[1:2]:
                _accumulate(block, tensor[low:high])
        for tensor in flat[2:]:
            _accumulate(block, tensor[low:high])
        if not direct:
            _scaled_copy(target[low:high], block, scale)
        elif scale != 1.0:
            block.mul_(scale)
        _flag_non_finite(found_inf, target[low:high])


def _accumulate(total: Tensor, tensor: Tensor) -> None:
    """total += tensor. Converting apart is faster than an addition of two dtypes."""
    if tensor.dtype != total.dtype:
        tensor = _scratch(1, tensor.numel(), total.dtype).copy_(tensor)
    total.add_(tensor)


@torch.no_grad()
def scaled_add(
    a: Tensor,
    b: Tensor,
    alpha: float,
    beta: float,
    out: Tensor,
    found_inf: Tensor | None = None,
) -> None:
    """out = alpha*a + beta*b, elementwise; `out` may be a or b.

    The same bits whichever it is: two ranks with the operands the other way round must agree.
    """
    wide = compute_dtype(a.dtype, b.dtype, out.dtype)
    if wide == torch.float32 and not all(
        value == 0.0 or _SAFE_LOW < abs(value) < _SAFE_HIGH or value != value
        for value in (alpha, beta)
    ):
        wide = torch.float64
    x, y, target = _flat(a), _flat(b), _flat(out)
    for low, high in _blocks(0, target.numel(), _MAP_BLOCK):
        block = _scratch(0, high - low, wide)
        left, right, to = x[low:high], y[low:high], target[low:high]
        if right.dtype == wide:
            torch.mul(right, beta, out=block)
        else:
            block.copy_(right).mul_(beta)
        if left.dtype != wide:
            left = _scratch(1, high - low, wide).copy_(left)
        torch.add(block, left, alpha=alpha, out=to)
        _flag_non_finite(found_inf, to)


@torch.no_grad()
def dot_and_norms(a: Tensor, b: Tensor, bounds: Sequence[int]) -> Tensor:
    """float64 [S, 3] rows (a.b, |a|^2, |b|^2) of the flattened segments."""
    x, y = a.view(-1), b.view(-1)
    count = len(bounds) - 1
    rows = [[0.0, 0.0, 0.0] for _ in range(count)]
    segment = 0
    for low, high in _blocks(0, x.numel(), _DOT_BLOCK):
        left = _scratch(0, high - low, torch.float64).copy_(x[low:high])
        right = _scratch(1, high - low, torch.float64).copy_(y[low:high])
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


@torch.no_grad()
def combine(
    a: Tensor,
    b: Tensor,
    coefficients: Tensor,
    bounds: Sequence[int],
    out: Tensor,
    found_inf: Tensor | None = None,
) -> None:
    """out = ca*a + cb*b a segment, with `coefficients` float64 [S, 2] rows (ca, cb)."""
    x, y, target = _flat(a), _flat(b), _flat(out)
    for (alpha, beta), low, high in zip(
        coefficients.tolist(), bounds[:-1], bounds[1:], strict=True
    ):
        if low < high:
            span = slice(low, high)
            scaled_add(x[span], y[span], alpha, beta, target[span], found_inf)
