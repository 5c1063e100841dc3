"""pack and unpack on a GPU: one launch for each dtype of the tensors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.cpu import dispatch
from kernels.gpu import launcher
from kernels.gpu.launcher import CACHE, Kernel, jit, tl
from kernels.gpu.tiles import flag_non_finite, load_tile, part_of, rescale, store_tile
from kernels.layout import Layout
from kernels.packed_list import PackedList


@jit
def _move(
    source,
    target,
    reads,
    writes,
    scale_bits,
    found_inf,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    WIDE: tl.constexpr,
    SCALED: tl.constexpr,
    FINITE: tl.constexpr,
    CHECKED: tl.constexpr,
    VECTORS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Up to BLOCK elements from one address to the other: `reads` of them, zeros to `writes`."""
    x = load_tile(source, reads, SOURCE, VECTORS, BLOCK)
    x = rescale(x, tl.arange(0, BLOCK) < reads, scale_bits, WIDE, TARGET, SCALED, FINITE)
    if CHECKED:
        flag_non_finite(x, found_inf)
    store_tile(target, writes, x, VECTORS)


@Kernel
def _copy_kernel(
    table,
    buffer,
    found_inf,
    scale_bits: tl.int64,
    tensor_count: tl.int32,
    TENSOR: tl.constexpr,
    BUFFER: tl.constexpr,
    WIDE: tl.constexpr,
    PACK: tl.constexpr,
    SCALED: tl.constexpr,
    FINITE: tl.constexpr,
    CHECKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One tile between one tensor and its slot.

    The table starts with the row of every tile. A row holds the address of the tensor, the offset
    of its slot in the buffer, its elements, the elements of the slot (with padding) and the first
    tile.
    """
    tile = tl.program_id(0).to(tl.int64)
    index = tile
    # Of many small tensors each is a tile, and what to wait for is most of their time.
    if tl.num_programs(0) != tensor_count:
        index = tl.load(table + tile)
    row = table + tl.num_programs(0) + 5 * index
    first = (tile - tl.load(row + 4)) * BLOCK
    in_tensor = tl.load(row) + first * (TENSOR.primitive_bitwidth // 8)
    in_buffer = buffer.to(tl.int64) + (tl.load(row + 1) + first) * (BUFFER.primitive_bitwidth // 8)
    used = tl.minimum(tl.maximum(tl.load(row + 2) - first, 0), BLOCK)
    if PACK:
        source, target, reads = in_tensor, in_buffer, used
        writes = tl.minimum(tl.load(row + 3) - first, BLOCK)
    else:
        source, target, reads, writes = in_buffer, in_tensor, used, used
    SOURCE: tl.constexpr = TENSOR if PACK else BUFFER
    TARGET: tl.constexpr = BUFFER if PACK else TENSOR
    SOURCE_BYTES: tl.constexpr = SOURCE.primitive_bitwidth // 8
    TARGET_BYTES: tl.constexpr = TARGET.primitive_bitwidth // 8
    # A multiple of 16 bytes in the narrower dtype is one in the wider.
    VECTOR: tl.constexpr = 16 // min(SOURCE_BYTES, TARGET_BYTES)
    body = reads // VECTOR * VECTOR
    if (source | target) % 16 == 0 and (writes % VECTOR == 0 or writes < body + VECTOR):
        _move(
            source, target, body, writes // VECTOR * VECTOR, scale_bits, found_inf,
            SOURCE, TARGET, WIDE, SCALED, FINITE, CHECKED, True, BLOCK,
        )  # fmt: skip
        if (reads | writes) % VECTOR != 0:
            # One vector's worth, element by element, where the store above may have put zeros.
            tl.debug_barrier()
            _move(
                source + body * SOURCE_BYTES, target + body * TARGET_BYTES,
                reads - body, writes - body, scale_bits, found_inf,
                SOURCE, TARGET, WIDE, SCALED, FINITE, CHECKED, False, VECTOR,
            )  # fmt: skip
    else:
        # In parts, rolled up: see scalar_pointer.
        PART: tl.constexpr = part_of(BLOCK, 4)
        for part in tl.range(0, BLOCK // PART, loop_unroll_factor=1):
            done = part * PART
            _move(
                source + done * SOURCE_BYTES, target + done * TARGET_BYTES,
                reads - done, writes - done, scale_bits, found_inf,
                SOURCE, TARGET, WIDE, SCALED, FINITE, CHECKED, False, PART,
            )  # fmt: skip


def copy(
    addresses: tuple[int, ...],
    known: PackedList,
    buffer: Tensor,
    scale: float,
    found_inf: Tensor | None,
    packing: bool,
) -> None:
    """Launch once for each dtype among the tensors."""
    layout = known.layout
    for dtype, chosen in known.kinds.items():
        wide = dispatch.compute_dtype(dtype, layout.dtype)
        block, warps = launcher.block_of(layout.numel, max(dtype.itemsize, layout.dtype.itemsize))
        table, tiles = _table(addresses, chosen, layout, block, buffer.device)
        with launcher.device_guard(buffer):
            _copy_kernel.launch(
                tiles,
                table,
                buffer,
                buffer if found_inf is None else found_inf,
                launcher.float_bits(scale),
                len(chosen),
                TENSOR=dtype,
                BUFFER=layout.dtype,
                WIDE=wide,
                PACK=packing,
                SCALED=scale != 1.0,
                FINITE=scale == 1.0 or abs(scale) <= torch.finfo(wide).max,
                CHECKED=found_inf is not None,
                BLOCK=block,
                num_warps=warps,
            )


def _table(
    addresses: tuple[int, ...],
    chosen: tuple[int, ...],
    layout: Layout,
    block: int,
    device: torch.device,
) -> tuple[Tensor, int]:
    """The device table of the chosen tensors for tiles of `block` elements, and the tiles."""
    if len(chosen) < len(addresses):
        addresses = tuple([addresses[i] for i in chosen])

    def make() -> tuple[Tensor, int, Tensor]:
        offsets = np.array(layout.offsets, dtype=np.int64)
        slots = np.array(layout.slots, dtype=np.int64)
        index = np.array(chosen)
        tiles = -(-slots[index] // block)
        ends = np.cumsum(tiles)
        sizes = np.array(layout.numels, dtype=np.int64)[index]
        rows = np.stack(
            [np.array(addresses, dtype=np.int64), offsets[index], sizes, slots[index], ends - tiles]
        )
        owners = np.repeat(np.arange(len(chosen)), tiles)
        table, host = launcher.upload(np.concatenate([owners, rows.T.reshape(-1)]), device)
        return table, int(ends[-1]), host

    key = ("pack", device, block, addresses, chosen, layout.numels, layout.offsets, layout.numel)
    table, tiles, _ = CACHE.fetch(key, device, make)
    return table, tiles
