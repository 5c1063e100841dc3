"""sum_n and scaled_add: n tensors to one in a single pass, accumulated wider than stored."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import _cpu, _launch
from kernels._check import check_in_place, check_like, check_pair, check_scalar, check_tensors
from kernels._launch import jit, tl
from kernels._tiles import float_of, vector_count, vector_pointer, weigh


@jit
def _sum_kernel(
    addresses,
    out,
    tensor_count,
    element_count,
    scale_bits,
    DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One tile of all tensors; every read of it comes before its write, so `out` may be one."""
    BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    VECTOR: tl.constexpr = 16 // BYTES
    first = tl.program_id(0).to(tl.int64) * BLOCK
    count = tl.minimum(element_count - first, BLOCK)
    i = tl.arange(0, BLOCK)
    scale = float_of(scale_bits).to(WIDE)
    if ALIGNED and count % VECTOR == 0:
        inside = i < vector_count(count, VECTOR)
        total = tl.zeros([BLOCK], WIDE)
        for k in range(tensor_count):
            source = vector_pointer(tl.load(addresses + k) + first * BYTES, DTYPE)
            total += tl.load(source + i, mask=inside, other=0.0).to(WIDE)
        target = vector_pointer(out.to(tl.int64) + first * BYTES, DTYPE)
        tl.store(target + i, (total * scale).to(DTYPE), mask=inside)
    else:
        inside = i < count
        total = tl.zeros([BLOCK], WIDE)
        for k in range(tensor_count):
            source = (tl.load(addresses + k) + first * BYTES).to(tl.pointer_type(DTYPE))
            total += tl.load(source + i, mask=inside, other=0.0).to(WIDE)
        tl.store(out + first + i, (total * scale).to(DTYPE), mask=inside)


def _sum(tensors: Sequence[Tensor], out: Tensor, scale: float) -> None:
    addresses = tuple(tensor.data_ptr() for tensor in tensors)
    block, warps = _launch.block_of(out.numel(), out.element_size())
    tiles = -(-out.numel() // block)
    if tiles == 0:
        return
    with _launch.device_guard(out):
        _sum_kernel[(tiles,)](
            _launch.address_table(addresses, out.device),
            out,
            len(tensors),
            out.numel(),
            _launch.float_bits(scale),
            DTYPE=_launch.dtype_in_triton(out.dtype),
            WIDE=_launch.dtype_in_triton(_cpu.compute_dtype(out.dtype)),
            ALIGNED=all(address % 16 == 0 for address in (*addresses, out.data_ptr())),
            BLOCK=block,
            num_warps=warps,
        )


@jit
def _scaled_add_kernel(
    a,
    b,
    out,
    element_count,
    alpha_bits,
    beta_bits,
    DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One tile of alpha*a + beta*b."""
    BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    VECTOR: tl.constexpr = 16 // BYTES
    first = tl.program_id(0).to(tl.int64) * BLOCK
    count = tl.minimum(element_count - first, BLOCK)
    i = tl.arange(0, BLOCK)
    alpha, beta = float_of(alpha_bits), float_of(beta_bits)
    if ALIGNED and count % VECTOR == 0:
        inside = i < vector_count(count, VECTOR)
        offset = first * BYTES
        x = tl.load(vector_pointer(a.to(tl.int64) + offset, DTYPE) + i, mask=inside, other=0.0)
        y = tl.load(vector_pointer(b.to(tl.int64) + offset, DTYPE) + i, mask=inside, other=0.0)
        z = weigh(x, y, alpha, beta, WIDE).to(DTYPE)
        tl.store(vector_pointer(out.to(tl.int64) + offset, DTYPE) + i, z, mask=inside)
    else:
        inside = i < count
        x = tl.load(a + first + i, mask=inside, other=0.0)
        y = tl.load(b + first + i, mask=inside, other=0.0)
        tl.store(out + first + i, weigh(x, y, alpha, beta, WIDE).to(DTYPE), mask=inside)


def _scaled_add(a: Tensor, b: Tensor, alpha: float, beta: float, out: Tensor) -> None:
    block, warps = _launch.block_of(out.numel(), out.element_size())
    tiles = -(-out.numel() // block)
    if tiles == 0:
        return
    with _launch.device_guard(out):
        _scaled_add_kernel[(tiles,)](
            a,
            b,
            out,
            out.numel(),
            _launch.float_bits(alpha),
            _launch.float_bits(beta),
            DTYPE=_launch.dtype_in_triton(out.dtype),
            WIDE=_launch.dtype_in_triton(_cpu.compute_dtype(out.dtype)),
            ALIGNED=all(tensor.data_ptr() % 16 == 0 for tensor in (a, b, out)),
            BLOCK=block,
            num_warps=warps,
        )


@torch.no_grad()
def sum_n(tensors: Sequence[Tensor], *, out: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """scale * (tensors[0] + tensors[1] + ...), added in list order.

    tensors: at least one, equal in shape, dtype and device. out: written and returned; may be one
    of the tensors. Sums are taken in float32 (float64 for float64) and rounded once. Raises
    TypeError or ValueError before anything is written.
    """
    checked, target = _check_sum(tensors, out)
    scale = check_scalar("scale", scale)
    if _launch.on_triton(target):
        _sum(checked, target, scale)
    else:
        _cpu.sum_n(checked, target, scale)
    return target


@torch.no_grad()
def scaled_add(
    a: Tensor, b: Tensor, *, alpha: float = 1.0, beta: float = 1.0, out: Tensor | None = None
) -> Tensor:
    """alpha*a + beta*b, in float32 (float64 for float64), rounded once.

    a, b: equal in shape, dtype and device. out: written and returned; may be a or b. Raises
    TypeError or ValueError before anything is written.
    """
    left, right, target = check_pair(a, b, out)
    alpha, beta = check_scalar("alpha", alpha), check_scalar("beta", beta)
    if _launch.on_triton(target):
        _scaled_add(left, right, alpha, beta, target)
    else:
        _cpu.scaled_add(left, right, alpha, beta, target, (0, left.numel()))
    return target


def _check_sum(tensors: Sequence[Tensor], out: Tensor | None) -> tuple[list[Tensor], Tensor]:
    checked = check_tensors("tensors", tensors)
    if not checked:
        raise ValueError("tensors is empty: pass at least one tensor to sum")
    first = checked[0]
    for i, tensor in enumerate(checked):
        check_like(f"tensors[{i}]", tensor, "tensors[0]", first)
    if out is None:
        return checked, torch.empty_like(first, memory_format=torch.contiguous_format)
    check_like("out", out, "tensors[0]", first)
    for i, tensor in enumerate(checked):
        check_in_place("out", out, f"tensors[{i}]", tensor)
    return checked, out


def sum_n_bytes(tensors: Sequence[Tensor]) -> int:
    """Least traffic of `sum_n`, in bytes: every tensor read once, one written."""
    return (len(tensors) + 1) * tensors[0].numel() * tensors[0].element_size()


def scaled_add_bytes(a: Tensor, b: Tensor) -> int:
    """Least traffic of `scaled_add`, in bytes: two tensors read, one written."""
    return 2 * a.numel() * a.element_size() + b.numel() * b.element_size()


def sum_n_reference(tensors: Sequence[Tensor], *, scale: float = 1.0) -> Tensor:
    """`sum_n` evaluated in float64 and left there."""
    total = torch.zeros_like(tensors[0], dtype=torch.float64)
    for tensor in tensors:
        total += tensor.detach().double()
    return total * scale


def scaled_add_reference(a: Tensor, b: Tensor, *, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    """`scaled_add` evaluated in float64 and left there."""
    return alpha * a.detach().double() + beta * b.detach().double()
