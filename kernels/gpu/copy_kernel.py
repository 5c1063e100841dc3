"""pack and unpack on a GPU: one launch for each dtype of the tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.arithmetic import compute_dtype
from kernels.call import Call
from kernels.gpu import launcher
from kernels.gpu.device_tables import TABLES, upload, write_addresses
from kernels.gpu.launcher import Kernel, Launch, jit, tl
from kernels.gpu.tiles import convert, float_of, load_tile, part_of, report, store_tile
from kernels.layout import Layout

# The largest float32: a larger factor would be infinite in float32.
_LARGEST = torch.finfo(torch.float32).max
# Bytes of a tile in the narrower dtype: two vectors per thread. With these an H200 copied 1 GiB 5 %
# faster than with eight.
TILE_BYTES = 4096
# Bytes per line of a GPU's caches; a line's parts of 32 bytes are written one by one.
LINE = 128 if tl is None else tl.constexpr(128)


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
    LIVE: tl.constexpr,
    VECTORS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy `reads` of at most BLOCK elements, and write zeros behind them up to `writes`.

    The zeros stay zeros even if the scale is not FINITE, which would make them NaN.
    """
    x = load_tile(source, reads, SOURCE, VECTORS, BLOCK)
    if SCALED:
        x = convert(x, WIDE) * float_of(scale_bits, LIVE).to(WIDE)
        if not FINITE:
            x = tl.where(tl.arange(0, BLOCK) < reads, x, 0.0)
    elif SOURCE != TARGET:
        x = convert(x, WIDE)
    x = convert(x, TARGET)
    report(x, found_inf)
    store_tile(target, writes, x, VECTORS)


@Kernel
def _copy_kernel(
    scale_bits: tl.int64,
    table,
    addresses,
    buffer,
    found_inf,
    tensor_count: tl.int32,
    TENSOR: tl.constexpr,
    BUFFER: tl.constexpr,
    WIDE: tl.constexpr,
    PACK: tl.constexpr,
    SCALED: tl.constexpr,
    FINITE: tl.constexpr,
    LIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy one tile between one tensor and its slot.

    The table starts with the number of every tile's tensor. There is one row per tensor: the offset
    of its slot in the buffer, its elements, the elements of the slot (with padding) and its first
    tile. Addresses are in another table, since they change while the layout stays. Only tensors of
    dtype TENSOR have tiles. If these are all, `tensor_count` is their number, otherwise 0.
    """
    tile = tl.program_id(0).to(tl.int64)
    index = tile
    # Omit this load if every tensor is one tile: with many small tensors, loads that depend on each
    # other take most of the time.
    if tl.num_programs(0) != tensor_count:
        index = tl.load(table + tile)
    row = table + tl.num_programs(0) + 4 * index
    first = (tile - tl.load(row + 3)) * BLOCK
    in_tensor = tl.load(addresses + index) + first * (TENSOR.primitive_bitwidth // 8)
    in_buffer = buffer.to(tl.int64) + (tl.load(row) + first) * (BUFFER.primitive_bitwidth // 8)
    used = tl.minimum(tl.maximum(tl.load(row + 1) - first, 0), BLOCK)
    if PACK:
        source, target, reads = in_tensor, in_buffer, used
        writes = tl.minimum(tl.load(row + 2) - first, BLOCK)
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
            SOURCE, TARGET, WIDE, SCALED, FINITE, LIVE, True, BLOCK,
        )  # fmt: skip
        if (reads | writes) % VECTOR != 0:
            # The last vector, element by element: the store above may have put zeros there.
            tl.debug_barrier()
            _move(
                source + body * SOURCE_BYTES, target + body * TARGET_BYTES,
                reads - body, writes - body, scale_bits, found_inf,
                SOURCE, TARGET, WIDE, SCALED, FINITE, LIVE, False, VECTOR,
            )  # fmt: skip
    else:
        # All tiles except the first begin with a line of the target, so that no two programs write
        # parts of one line: the first tile ends earlier, and the last one includes the rest. Other
        # tiles of this tensor are moved by vectors if its addresses allow it.
        early = (target.to(tl.uint64) % LINE // TARGET_BYTES).to(tl.int64)
        early = tl.where((source | target) % 16 == 0, 0, early)
        back = tl.where(first > 0, early, 0)
        limit = BLOCK - early + back
        if tl.load(row + 2) - first <= BLOCK:
            limit = BLOCK + back
        reads = tl.minimum(tl.maximum(tl.load(row + 1) - first + back, 0), limit)
        writes = reads
        if PACK:
            writes = tl.minimum(tl.load(row + 2) - first + back, limit)
        source -= back * SOURCE_BYTES
        target -= back * TARGET_BYTES
        # In parts, in a loop that is not unrolled: see scalar_pointer.
        PART: tl.constexpr = part_of(BLOCK, 2)
        for done in tl.range(0, writes, PART, loop_unroll_factor=1):
            _move(
                source + done * SOURCE_BYTES, target + done * TARGET_BYTES,
                reads - done, writes - done, scale_bits, found_inf,
                SOURCE, TARGET, WIDE, SCALED, FINITE, LIVE, False, PART,
            )  # fmt: skip


def copies(call: Call) -> Callable[[float | Tensor], None]:
    """Bind one launch for each dtype among the tensors."""
    layout, out = call.layout, call.out
    assert layout is not None
    if not any(layout.numels):
        return launcher.nothing
    # Uploaded now: the first run may be captured, and only replays would fill a table that is
    # uploaded in a capture.
    kinds, addresses = _kinds(call, layout), write_addresses(call, call.addresses)

    def bind(scaled: bool, finite: bool, live: torch.dtype | None) -> list[Launch]:
        return [
            _copy_kernel.bind(
                tiles,
                (0,),
                rows,
                addresses,
                out,
                call.found_inf,
                tensors,
                TENSOR=dtype,
                BUFFER=out.dtype,
                WIDE=compute_dtype(dtype, out.dtype),
                PACK=call.packing,
                SCALED=scaled,
                FINITE=finite,
                LIVE=live,
                BLOCK=block,
                num_warps=warps,
            )
            for rows, dtype, tiles, tensors, block, warps in kinds
        ]

    # By whether there is a scale, whether it is finite in float32, and its dtype if it is a tensor.
    bound: dict[tuple[bool, bool, torch.dtype | None], list[Launch]] = {}

    def run(scale: float | Tensor) -> None:
        bits, live = launcher.scalar_of(scale, out)
        number = math.inf if live is not None else float(scale)
        kind = (number != 1.0, abs(number) <= _LARGEST, live)
        if kind not in bound:
            with launcher.on_device_of(out):
                bound[kind] = bind(*kind)
        for launch in bound[kind]:
            launch(bits)

    return run


def _kinds(call: Call, layout: Layout) -> list[tuple[Any, ...]]:
    """Return (table on the device, dtype, tiles, `tensor_count`, block, warps) of each dtype."""
    device = call.out.device

    def make(pinned: Tensor | None) -> tuple[Tensor, Tensor, list[tuple[Any, ...]]]:
        numels, edges = map(np.array, layout.in_c)
        slots, parts, kinds = np.diff(edges), [], []
        indices: dict[torch.dtype, list[int]] = {}
        for i, (numel, dtype) in enumerate(zip(layout.numels, call.dtypes, strict=True)):
            if numel > 0:
                indices.setdefault(dtype, []).append(i)
        for dtype, chosen in indices.items():
            narrower = min(dtype.itemsize, layout.dtype.itemsize)
            block, warps = launcher.block_of(layout.numel, narrower, TILE_BYTES)
            tiles = np.zeros_like(slots)
            tiles[chosen] = -(-slots[chosen] // block)
            rows = np.stack([edges[:-1], numels, slots, np.cumsum(tiles) - tiles])
            owners = np.repeat(np.arange(len(tiles)), tiles)
            parts.append(np.concatenate([owners, rows.T.reshape(-1)]))
            tensors = len(numels) if len(chosen) == len(numels) else 0
            kinds.append((dtype, len(owners), tensors, block, warps))
        table, host = upload(np.concatenate(parts), device, pinned)
        tables = table.split([len(part) for part in parts])
        return table, host, [(own, *kind) for own, kind in zip(tables, kinds, strict=True)]

    found: list[tuple[Any, ...]] = TABLES.fetch((call.codes, layout.in_one), device, make)[2]
    return found
