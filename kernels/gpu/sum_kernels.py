"""sum_n, scaled_add and weighted_sum on a GPU: one launch each."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.arithmetic import compute_dtype
from kernels.call import Call
from kernels.gpu import launcher
from kernels.gpu.balanced_tree import branch, join, options_of, tree_tile_of
from kernels.gpu.chunking import chunks_of, tile_of
from kernels.gpu.device_tables import write_addresses
from kernels.gpu.launcher import Kernel, Launch, jit, tl
from kernels.gpu.tiles import convert, float_of, load_tile, part_of, report, store_tile, weigh


@jit
def in_order(
    addresses,
    offset,
    count,
    tensor_count,
    DTYPE: tl.constexpr,
    SUM: tl.constexpr,
    ROUNDED: tl.constexpr,
    VECTORS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum, in list order, of the tensors' tiles at `offset` bytes in each."""
    x = load_tile(tl.load(addresses) + offset, count, DTYPE, VECTORS, BLOCK)
    if ROUNDED:
        # -0.0, since adding to it changes nothing; made from bits, as in `weighted_total`.
        none = tl.full([BLOCK], -0x80000000, tl.int32).to(tl.float32, bitcast=True)
        total = none.to(SUM)
    else:
        total = tl.zeros([BLOCK], SUM)
    # Load one tensor ahead: otherwise ptxas would reuse only two registers' worth of loads.
    for k in range(1, tensor_count):
        following = load_tile(tl.load(addresses + k) + offset, count, DTYPE, VECTORS, BLOCK)
        total = join(total, convert(x, SUM))
        x = following
    return join(total, convert(x, SUM))


@Kernel
def _sum_kernel(
    scale_bits: tl.int64,
    addresses,
    out,
    found_inf,
    tensor_count: tl.int32,
    element_count: tl.int64,
    DTYPE: tl.constexpr,
    OUT: tl.constexpr,
    WIDE: tl.constexpr,
    SUM: tl.constexpr,
    LEVELS: tl.constexpr,
    PAIRS: tl.constexpr,
    SCALE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum one tile of all tensors; all reads precede the write, so `out` may be one of them.

    Each sum of two is rounded to SUM. LEVELS: The balanced tree's levels; None for list order.
    PAIRS: Whether there are more tensors than leaves.
    """
    BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    OUT_BYTES: tl.constexpr = OUT.primitive_bitwidth // 8
    # A multiple of 16 bytes in the narrower dtype is one in the wider.
    VECTOR: tl.constexpr = 16 // min(BYTES, OUT_BYTES)
    ROUNDED: tl.constexpr = SUM != WIDE
    first = tl.program_id(0).to(tl.int64) * BLOCK
    count = tl.minimum(element_count - first, BLOCK)
    scale = float_of(scale_bits, SCALE).to(WIDE)
    whole = ALIGNED and count % VECTOR == 0
    # One source for both paths. scalar_pointer says why the scalar one works on parts of a tile.
    for VECTORS in tl.static_range(1, -1, -1):
        if whole == VECTORS:
            for part in tl.range(0, BLOCK // part_of(BLOCK, 4, VECTORS), loop_unroll_factor=1):
                done = part * part_of(BLOCK, 4, VECTORS)
                at, left = (first + done) * BYTES, count - done
                if LEVELS is None:
                    x = in_order(
                        addresses, at, left, tensor_count, DTYPE, SUM, ROUNDED,
                        VECTORS, part_of(BLOCK, 4, VECTORS),
                    )  # fmt: skip
                else:
                    extra = tensor_count - (1 << LEVELS)
                    x = branch(
                        addresses, at, left, 0, extra, DTYPE, SUM, LEVELS, PAIRS,
                        VECTORS, part_of(BLOCK, 4, VECTORS),
                    )  # fmt: skip
                x = convert(convert(x, WIDE) * scale, OUT)
                report(x, found_inf)
                store_tile(out.to(tl.int64) + (first + done) * OUT_BYTES, left, x, VECTORS)


def sum_n(call: Call) -> Callable[[float], None]:
    """Bind out = scale * (the sum of the tensors, in the call's order)."""
    addresses, out, dtype = call.addresses, call.out, call.inputs[0].dtype
    numel, wide = out.numel(), compute_dtype(dtype, out.dtype)
    itemsize, levels = max(dtype.itemsize, out.element_size()), None
    block, warps = launcher.block_of(numel, itemsize)
    options: dict[str, int] = {}
    if call.kind == "tree":
        levels = len(addresses).bit_length() - 1
        block, warps = tree_tile_of(levels, numel, itemsize)
        options = options_of(levels)
    tiles = -(-numel // block)
    if tiles == 0:
        return launcher.nothing
    on_device = write_addresses(call, addresses)

    def bind(scale: torch.dtype | None) -> Launch:
        return _sum_kernel.bind(
            tiles,
            (0,),
            on_device,
            out,
            call.found_inf,
            len(addresses),
            numel,
            DTYPE=dtype,
            OUT=out.dtype,
            WIDE=wide,
            SUM=call.accumulate or wide,
            LEVELS=levels,
            PAIRS=levels is not None and len(addresses) > 1 << levels,
            SCALE=scale,
            ALIGNED=call.aligned,
            BLOCK=block,
            num_warps=warps,
            **options,
        )

    return launcher.with_scalars(bind, 1, out)


@Kernel
def _scaled_add_kernel(
    alpha_bits: tl.int64,
    beta_bits: tl.int64,
    a,
    b,
    out,
    found_inf,
    element_count: tl.int64,
    A: tl.constexpr,
    B: tl.constexpr,
    OUT: tl.constexpr,
    WIDE: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute one tile of alpha*a + beta*b."""
    A_BYTES: tl.constexpr = A.primitive_bitwidth // 8
    B_BYTES: tl.constexpr = B.primitive_bitwidth // 8
    OUT_BYTES: tl.constexpr = OUT.primitive_bitwidth // 8
    # A multiple of 16 bytes in the narrowest dtype is one in the others.
    VECTOR: tl.constexpr = 16 // min(A_BYTES, min(B_BYTES, OUT_BYTES))
    first = tl.program_id(0).to(tl.int64) * BLOCK
    count = tl.minimum(element_count - first, BLOCK)
    alpha, beta = float_of(alpha_bits, ALPHA), float_of(beta_bits, BETA)
    at_a = a.to(tl.int64) + first * A_BYTES
    at_b = b.to(tl.int64) + first * B_BYTES
    to = out.to(tl.int64) + first * OUT_BYTES
    whole = ALIGNED and count % VECTOR == 0
    # As in `_sum_kernel`. With quarters ptxas would spill.
    for VECTORS in tl.static_range(1, -1, -1):
        if whole == VECTORS:
            for part in tl.range(0, BLOCK // part_of(BLOCK, 8, VECTORS), loop_unroll_factor=1):
                done = part * part_of(BLOCK, 8, VECTORS)
                left = count - done
                x = load_tile(at_a + done * A_BYTES, left, A, VECTORS, part_of(BLOCK, 8, VECTORS))
                y = load_tile(at_b + done * B_BYTES, left, B, VECTORS, part_of(BLOCK, 8, VECTORS))
                z = convert(weigh(x, y, alpha, beta, False, WIDE), OUT)
                report(z, found_inf)
                store_tile(to + done * OUT_BYTES, left, z, VECTORS)


def scaled_add(call: Call) -> Callable[[float, float], None]:
    """Bind out = alpha*a + beta*b."""
    (a, b), out, numel = call.inputs, call.out, call.out.numel()
    widest = max(a.element_size(), b.element_size(), out.element_size())
    block, warps = launcher.block_of(numel, widest)
    tiles = -(-numel // block)
    if tiles == 0:
        return launcher.nothing

    def bind(alpha: torch.dtype | None, beta: torch.dtype | None) -> Launch:
        return _scaled_add_kernel.bind(
            tiles,
            (0, 0),
            a,
            b,
            out,
            call.found_inf,
            numel,
            A=a.dtype,
            B=b.dtype,
            OUT=out.dtype,
            WIDE=compute_dtype(a.dtype, b.dtype, out.dtype),
            ALPHA=alpha,
            BETA=beta,
            ALIGNED=call.aligned,
            BLOCK=block,
            num_warps=warps,
        )

    return launcher.with_scalars(bind, 2, out)


@jit
def weighted_total(
    addresses,
    row,
    offset,
    count,
    n,
    DTYPE: tl.constexpr,
    VECTORS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum, in list order, of the tensors' tiles at `offset` bytes in each, times their factors."""
    ONCE: tl.constexpr = "evict_first"
    x = load_tile(tl.load(addresses) + offset, count, DTYPE, VECTORS, BLOCK, ONCE)
    factor = tl.load(row)
    # -0.0: adding a product to it leaves the product unchanged, even the sign of a zero. Made from
    # bits, since Triton 3.6 turns -0.0 into 0.0.
    total = tl.full([BLOCK], -0x8000000000000000, tl.int64).to(tl.float64, bitcast=True)
    # Load one tensor ahead, as in `in_order`, and addresses another one ahead.
    at = tl.load(addresses + 1, mask=n > 1, other=0)
    for k in range(1, n):
        following = load_tile(at + offset, count, DTYPE, VECTORS, BLOCK, ONCE)
        at = tl.load(addresses + k + 1, mask=k + 1 < n, other=0)
        total = tl.fma(convert(x, tl.float64), factor, total)
        x, factor = following, tl.load(row + k)
    return convert(tl.fma(convert(x, tl.float64), factor, total), DTYPE)


@Kernel
def _weighted_sum_kernel(
    addresses,
    coefficients,
    table,
    out,
    found_inf,
    n: tl.int32,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute one chunk of the sum, in reverse order: `gram` has left the last chunks in L2.

    All reads of a tile precede its write, so `out` may be one of the tensors.
    """
    ONCE: tl.constexpr = "evict_first"
    BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    VECTOR: tl.constexpr = 16 // BYTES
    chunk = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    start = tl.load(table + 3 * chunk)
    length = tl.load(table + 3 * chunk + 1)
    row = coefficients + tl.load(table + 3 * chunk + 2) * n
    tiles = (length + BLOCK - 1) // BLOCK
    for k in range(tiles):
        done = (tiles - 1 - k) * BLOCK
        count = tl.minimum(length - done, BLOCK)
        offset = (start + done) * BYTES
        to = out.to(tl.int64) + offset
        if ALIGNED and offset % 16 == 0 and count % VECTOR == 0:
            x = weighted_total(addresses, row, offset, count, n, DTYPE, True, BLOCK)
            report(x, found_inf)
            store_tile(to, count, x, True, ONCE)
        else:
            # In parts, in a loop that is not unrolled: see scalar_pointer.
            PART: tl.constexpr = part_of(BLOCK, 4)
            for part in tl.range(0, BLOCK // PART, loop_unroll_factor=1):
                before = part * PART
                y = weighted_total(
                    addresses, row, offset + before * BYTES, count - before, n, DTYPE, False, PART
                )
                report(y, found_inf)
                store_tile(to + before * BYTES, count - before, y, False, ONCE)


def weighted_tile_of(numel: int, itemsize: int) -> tuple[int, int]:
    """(elements per tile, warps): at most 4 KiB, since float64 sums need more registers."""
    block, warps = tile_of(numel, itemsize)
    return min(block, 4096 // itemsize), warps


def weighted_sum(call: Call) -> Callable[[], None]:
    """Bind out = the sum of the tensors times their segments' coefficients."""
    addresses, out = call.addresses, call.out
    if out.numel() == 0:
        return launcher.nothing
    assert call.table is not None
    chunks = chunks_of(out, call.bounds, summed=False)
    block, warps = weighted_tile_of(out.numel(), out.element_size())
    return _weighted_sum_kernel.bind(
        chunks.chunks,
        (),
        write_addresses(call, addresses),
        call.table,
        chunks.table,
        out,
        call.found_inf,
        len(addresses),
        DTYPE=out.dtype,
        ALIGNED=call.aligned,
        BLOCK=block,
        num_warps=warps,
    )
