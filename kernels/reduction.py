"""sum_n and scaled_add: n tensors to one in a single pass, accumulated wider than stored."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import _cpu, _launch
from kernels._check import (
    check_dtype,
    check_found_inf,
    check_like,
    check_place,
    check_scalar,
    check_sequence,
    check_sized,
    check_target,
    check_tensor,
    check_written,
)
from kernels._known import Known, KnownLists
from kernels._launch import Kernel, jit, tl
from kernels._ops import call, check_list, operator, returns_nothing, tracing
from kernels._tiles import convert, flag_non_finite, float_of, load_tile, part_of, store_tile, weigh


@jit
def _total(
    addresses,
    offset,
    count,
    tensor_count,
    DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
    VECTORS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum, in list order, of the tensors' tiles that start `offset` bytes into each."""
    x = load_tile(tl.load(addresses) + offset, count, DTYPE, VECTORS, BLOCK)
    total = tl.zeros([BLOCK], WIDE)
    # One tensor ahead: ptxas would else use two registers' worth of loads again and again.
    for k in range(1, tensor_count):
        following = load_tile(tl.load(addresses + k) + offset, count, DTYPE, VECTORS, BLOCK)
        total += convert(x, WIDE)
        x = following
    return total + convert(x, WIDE)


@Kernel
def _sum_kernel(
    addresses,
    out,
    found_inf,
    tensor_count: tl.int32,
    element_count: tl.int64,
    scale_bits: tl.int64,
    DTYPE: tl.constexpr,
    OUT: tl.constexpr,
    WIDE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHECKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One tile of all tensors; every read of it comes before its write, so `out` may be one."""
    BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    OUT_BYTES: tl.constexpr = OUT.primitive_bitwidth // 8
    # A multiple of 16 bytes in the narrower dtype is one in the wider.
    VECTOR: tl.constexpr = 16 // min(BYTES, OUT_BYTES)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    count = tl.minimum(element_count - first, BLOCK)
    scale = float_of(scale_bits).to(WIDE)
    to = out.to(tl.int64)
    if ALIGNED and count % VECTOR == 0:
        x = _total(addresses, first * BYTES, count, tensor_count, DTYPE, WIDE, True, BLOCK)
        x = convert(x * scale, OUT)
        if CHECKED:
            flag_non_finite(x, found_inf)
        store_tile(to + first * OUT_BYTES, count, x, True)
    else:
        # In parts, rolled up: see scalar_pointer.
        PART: tl.constexpr = part_of(BLOCK, 4)
        for part in tl.range(0, BLOCK // PART, loop_unroll_factor=1):
            at = first + part * PART
            left = count - part * PART
            y = _total(addresses, at * BYTES, left, tensor_count, DTYPE, WIDE, False, PART)
            y = convert(y * scale, OUT)
            if CHECKED:
                flag_non_finite(y, found_inf)
            store_tile(to + at * OUT_BYTES, left, y, False)


def _sum(
    tensors: Sequence[Tensor],
    addresses: tuple[int, ...],
    out: Tensor,
    scale: float,
    found_inf: Tensor | None,
) -> None:
    dtype = tensors[0].dtype
    block, warps = _launch.block_of(out.numel(), max(dtype.itemsize, out.element_size()))
    tiles = -(-out.numel() // block)
    if tiles == 0:
        return
    with _launch.device_guard(out):
        _sum_kernel.launch(
            tiles,
            _launch.address_table(addresses, out.device),
            out,
            out if found_inf is None else found_inf,
            len(tensors),
            out.numel(),
            _launch.float_bits(scale),
            DTYPE=dtype,
            OUT=out.dtype,
            WIDE=_cpu.compute_dtype(dtype, out.dtype),
            ALIGNED=all(address % 16 == 0 for address in (*addresses, out.data_ptr())),
            CHECKED=found_inf is not None,
            BLOCK=block,
            num_warps=warps,
        )
    _launch.mark_written([out], found_inf)


@Kernel
def _scaled_add_kernel(
    a,
    b,
    out,
    found_inf,
    element_count: tl.int64,
    alpha_bits: tl.int64,
    beta_bits: tl.int64,
    A: tl.constexpr,
    B: tl.constexpr,
    OUT: tl.constexpr,
    WIDE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHECKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One tile of alpha*a + beta*b."""
    A_BYTES: tl.constexpr = A.primitive_bitwidth // 8
    B_BYTES: tl.constexpr = B.primitive_bitwidth // 8
    OUT_BYTES: tl.constexpr = OUT.primitive_bitwidth // 8
    # A multiple of 16 bytes in the narrowest dtype is one in the others.
    VECTOR: tl.constexpr = 16 // min(A_BYTES, min(B_BYTES, OUT_BYTES))
    first = tl.program_id(0).to(tl.int64) * BLOCK
    count = tl.minimum(element_count - first, BLOCK)
    alpha, beta = float_of(alpha_bits), float_of(beta_bits)
    at_a = a.to(tl.int64) + first * A_BYTES
    at_b = b.to(tl.int64) + first * B_BYTES
    to = out.to(tl.int64) + first * OUT_BYTES
    if ALIGNED and count % VECTOR == 0:
        x = load_tile(at_a, count, A, True, BLOCK)
        y = load_tile(at_b, count, B, True, BLOCK)
        z = convert(weigh(x, y, alpha, beta, WIDE), OUT)
        if CHECKED:
            flag_non_finite(z, found_inf)
        store_tile(to, count, z, True)
    else:
        # In parts, rolled up: see scalar_pointer. Of quarters ptxas spills.
        PART: tl.constexpr = part_of(BLOCK, 8)
        for part in tl.range(0, BLOCK // PART, loop_unroll_factor=1):
            done = part * PART
            u = load_tile(at_a + done * A_BYTES, count - done, A, False, PART)
            v = load_tile(at_b + done * B_BYTES, count - done, B, False, PART)
            w = convert(weigh(u, v, alpha, beta, WIDE), OUT)
            if CHECKED:
                flag_non_finite(w, found_inf)
            store_tile(to + done * OUT_BYTES, count - done, w, False)


def _scaled_add(
    a: Tensor, b: Tensor, alpha: float, beta: float, out: Tensor, found_inf: Tensor | None
) -> None:
    widest = max(a.element_size(), b.element_size(), out.element_size())
    block, warps = _launch.block_of(out.numel(), widest)
    tiles = -(-out.numel() // block)
    if tiles == 0:
        return
    with _launch.device_guard(out):
        _scaled_add_kernel.launch(
            tiles,
            a,
            b,
            out,
            out if found_inf is None else found_inf,
            out.numel(),
            _launch.float_bits(alpha),
            _launch.float_bits(beta),
            A=a.dtype,
            B=b.dtype,
            OUT=out.dtype,
            WIDE=_cpu.compute_dtype(a.dtype, b.dtype, out.dtype),
            ALIGNED=all(tensor.data_ptr() % 16 == 0 for tensor in (a, b, out)),
            CHECKED=found_inf is not None,
            BLOCK=block,
            num_warps=warps,
        )
    _launch.mark_written([out], found_inf)


@operator(
    "sum_n(Tensor[] tensors, float scale, Tensor(a!) out, Tensor(b!)? found_inf) -> ()",
    fake=returns_nothing,
)
def _run_sum_n(
    tensors: list[Tensor],
    scale: float,
    out: Tensor,
    found_inf: Tensor | None,
) -> None:
    _sum_known(tensors, Known(None), scale, out, found_inf)


def _sum_known(
    tensors: list[Tensor],
    known: Known[None],
    scale: float,
    out: Tensor,
    found_inf: Tensor | None,
) -> None:
    addresses = tuple(map(Tensor.data_ptr, tensors))
    flag = None if found_inf is None else found_inf.data_ptr()
    place = (addresses, out.data_ptr(), out.dtype, flag)
    if place not in known.apart:
        check_written(out, found_inf, tensors, "tensors[{}]".format)
        known.found_apart(place, len(addresses))
    if _launch.on_triton(out):
        _sum(tensors, addresses, out, scale, found_inf)
    else:
        _cpu.sum_n(tensors, addresses, out, scale, found_inf)


@operator(
    "scaled_add(Tensor a, Tensor b, float alpha, float beta, Tensor(a!) out, "
    "Tensor(b!)? found_inf) -> ()",
    fake=returns_nothing,
)
def _run_scaled_add(
    a: Tensor, b: Tensor, alpha: float, beta: float, out: Tensor, found_inf: Tensor | None
) -> None:
    check_written(out, found_inf, (a, b), "ab".__getitem__)
    if _launch.on_triton(out):
        _scaled_add(a, b, alpha, beta, out, found_inf)
    else:
        _cpu.scaled_add(a, b, alpha, beta, out, found_inf)


def sum_n(
    tensors: Sequence[Tensor],
    *,
    out: Tensor | None = None,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
    found_inf: Tensor | None = None,
) -> Tensor:
    """scale * (tensors[0] + tensors[1] + ...), added in list order.

    tensors: at least one, equal in shape, dtype and device. out: written and returned; may be one
    of the tensors. dtype: of the output, None for that of `out` or, without one, of the tensors.
    found_inf: float32 of one element, set to 1 where an output is not finite, else left. Sums are
    taken in float32 (float64 where either dtype is float64) and rounded once. Raises TypeError or
    ValueError before anything is written.
    """
    checked, known = _check_equals(tensors)
    target = check_target(out, "tensors[0]", checked[0], dtype)
    scale = check_scalar("scale", scale)
    flag = check_found_inf(found_inf, target.device)
    if tracing():
        call("sum_n", checked, scale, target, flag)
    else:
        _sum_known(checked, known, scale, target, flag)
    return target


def scaled_add(
    a: Tensor,
    b: Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    found_inf: Tensor | None = None,
) -> Tensor:
    """alpha*a + beta*b, in float32 (float64 where a dtype is float64), rounded once.

    a, b: equal in shape and device, each of its own dtype. out: written and returned; may be a or
    b. dtype: of the output, None for that of `out` or, without one, of a. found_inf: as in
    `sum_n`. Raises TypeError or ValueError before anything is written.
    """
    left = check_tensor("a", a)
    right = check_place("b", b, "a", left)
    target = check_target(out, "a", left, dtype)
    alpha, beta = check_scalar("alpha", alpha), check_scalar("beta", beta)
    flag = check_found_inf(found_inf, target.device)
    if tracing():
        call("scaled_add", left, right, alpha, beta, target, flag)
    else:
        _run_scaled_add(left, right, alpha, beta, target, flag)
    return target


_EMPTY = "tensors is empty: pass at least one tensor to sum"


_LISTS: KnownLists[None] = KnownLists()


def _check_equals(tensors: Sequence[Tensor]) -> tuple[list[Tensor], Known[None]]:
    plain = not tracing() and type(tensors) in (list, tuple)
    if plain and (known := _LISTS.find(None, tensors)) is not None:
        return list(tensors), known
    checked = check_list("tensors", tensors)
    if not checked:
        raise ValueError(_EMPTY)
    first = checked[0]
    dtype, shape = first.dtype, first.shape
    for i in range(1, len(checked)):
        if checked[i].dtype != dtype or checked[i].shape != shape:
            check_like(f"tensors[{i}]", checked[i], "tensors[0]", first)
    return checked, _LISTS.keep(None, checked, None) if plain else Known(None)


def sum_n_bytes(tensors: Sequence[Tensor], *, dtype: torch.dtype | None = None) -> int:
    """Least traffic of `sum_n`, in bytes: every tensor read once, one of `dtype` written."""
    given = check_sequence("tensors", tensors)
    sized = [check_sized(f"tensors[{i}]", tensor) for i, tensor in enumerate(given)]
    if not sized:
        raise ValueError(_EMPTY)
    read = sum(tensor.numel() * tensor.element_size() for tensor in sized)
    return read + sized[0].numel() * _written(sized[0], dtype).itemsize


def scaled_add_bytes(a: Tensor, b: Tensor, *, dtype: torch.dtype | None = None) -> int:
    """Least traffic of `scaled_add`, in bytes: two tensors read, one of `dtype` written."""
    left, right = check_sized("a", a), check_sized("b", b)
    read = left.numel() * left.element_size() + right.numel() * right.element_size()
    return read + left.numel() * _written(left, dtype).itemsize


def _written(like: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is None:
        return like.dtype
    check_dtype("dtype", dtype)
    return dtype


def sum_n_reference(tensors: Sequence[Tensor], *, scale: float = 1.0) -> Tensor:
    """`sum_n` evaluated in float64 and left there; arguments and errors as there."""
    checked, scale = _check_equals(tensors)[0], check_scalar("scale", scale)
    total = torch.zeros_like(checked[0], dtype=torch.float64, requires_grad=False)
    for tensor in checked:
        total += tensor.detach().double()
    return total * scale


def scaled_add_reference(a: Tensor, b: Tensor, *, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    """`scaled_add` evaluated in float64 and left there; arguments and errors as there."""
    left = check_tensor("a", a)
    right = check_place("b", b, "a", left)
    alpha, beta = check_scalar("alpha", alpha), check_scalar("beta", beta)
    return alpha * left.detach().double() + beta * right.detach().double()
