"""pack and unpack: many tensors to one buffer and back in one launch, scale and cast fused."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels import _cpu, _launch
from kernels._check import (
    check_all_writable,
    check_found_inf,
    check_scalar,
    check_tensor,
    check_writable,
)
from kernels._known import Known
from kernels._launch import CACHE, Kernel, jit, tl
from kernels._ops import call, operator, returns_nothing, tracing
from kernels._packed import PackedList, check_all_apart, check_buffer, check_layout, check_packed
from kernels._tiles import flag_non_finite, load_tile, part_of, rescale, store_tile
from kernels.layout import Layout


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


def _copy(
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
        wide = _cpu.compute_dtype(dtype, layout.dtype)
        block, warps = _launch.block_of(layout.numel, max(dtype.itemsize, layout.dtype.itemsize))
        table, tiles = _table(addresses, chosen, layout, block, buffer.device)
        with _launch.device_guard(buffer):
            _copy_kernel.launch(
                tiles,
                table,
                buffer,
                buffer if found_inf is None else found_inf,
                _launch.float_bits(scale),
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
        table, host = _launch.upload(np.concatenate([owners, rows.T.reshape(-1)]), device)
        return table, int(ends[-1]), host

    key = ("pack", device, block, addresses, chosen, layout.numels, layout.offsets, layout.numel)
    table, tiles, _ = CACHE.fetch(key, device, make)
    return table, tiles


def _pack(
    tensors: list[Tensor],
    known: Known[PackedList],
    scale: float,
    out: Tensor,
    found_inf: Tensor | None,
) -> None:
    addresses = check_all_apart(tensors, known, "out", out, False, found_inf)
    if _launch.on_triton(out):
        _copy(addresses, known.value, out, scale, found_inf, packing=True)
        _launch.mark_written([out], found_inf)
    else:
        _cpu.pack(tensors, addresses, known.value, out, scale, found_inf)


def _unpack(
    buffer: Tensor,
    known: Known[PackedList],
    scale: float,
    tensors: list[Tensor],
    found_inf: Tensor | None,
) -> None:
    addresses = check_all_apart(tensors, known, "buffer", buffer, True, found_inf)
    if _launch.on_triton(buffer):
        _copy(addresses, known.value, buffer, scale, found_inf, packing=False)
        _launch.mark_written(tensors, found_inf)
    else:
        _cpu.unpack(buffer, tensors, addresses, known.value, scale, found_inf)


@operator(
    "pack(Tensor[] tensors, SymInt[] offsets, int alignment, float scale, Tensor(a!) out, "
    "Tensor(b!)? found_inf) -> ()",
    fake=returns_nothing,
)
def _pack_op(
    tensors: list[Tensor],
    offsets: list[int],
    alignment: int,
    scale: float,
    out: Tensor,
    found_inf: Tensor | None,
) -> None:
    _pack(tensors, _known_within(out, tensors, offsets, alignment), scale, out, found_inf)


@operator(
    "unpack(Tensor buffer, SymInt[] offsets, int alignment, float scale, Tensor(a!)[] tensors, "
    "Tensor(b!)? found_inf) -> ()",
    fake=returns_nothing,
)
def _unpack_op(
    buffer: Tensor,
    offsets: list[int],
    alignment: int,
    scale: float,
    tensors: list[Tensor],
    found_inf: Tensor | None,
) -> None:
    _unpack(buffer, _known_within(buffer, tensors, offsets, alignment), scale, tensors, found_inf)


def _known_within(
    buffer: Tensor, tensors: list[Tensor], offsets: list[int], alignment: int
) -> Known[PackedList]:
    """An operator's tensors and their layout in its buffer."""
    layout = Layout(
        dtype=buffer.dtype,
        shapes=tuple([tuple(tensor.shape) for tensor in tensors]),
        numels=tuple(map(Tensor.numel, tensors)),
        offsets=tuple(offsets),
        numel=buffer.numel(),
        alignment=alignment,
    )
    check_layout(layout)
    return Known(PackedList(layout, tuple([tensor.dtype for tensor in tensors])))


def pack(
    tensors: Sequence[Tensor],
    *,
    layout: Layout | None = None,
    out: Tensor | None = None,
    scale: float = 1.0,
    found_inf: Tensor | None = None,
) -> Tensor:
    """Copy `tensors`, each times `scale`, into one 1-D buffer; the padding is zero.

    layout: where each goes and the buffer's dtype; None takes `layout_of(tensors)`. out: the
    buffer to write, `layout.numel` elements of `layout.dtype`, 1-D and apart from the tensors.
    found_inf: float32 of one element, set to 1 where an element written is not finite, else left.
    Products are taken in float32 (float64 where either dtype is float64) and rounded once.
    Returns the buffer. Raises TypeError or ValueError before anything is written.
    """
    checked, known = check_packed(tensors, layout, None)
    layout = known.value.layout
    scale = check_scalar("scale", scale)
    device = checked[0].device if checked else torch.device("cpu")
    if out is None:
        out = torch.empty(layout.numel, dtype=layout.dtype, device=device)
    else:
        device = device if checked else check_tensor("out", out).device
        check_buffer("out", out, layout, device)
        check_writable("out", out)
    flag = check_found_inf(found_inf, out.device)
    if tracing():
        call("pack", checked, layout.offsets, layout.alignment, scale, out, flag)
    else:
        _pack(checked, known, scale, out, flag)
    return out


def unpack(
    buffer: Tensor,
    tensors: Sequence[Tensor],
    *,
    layout: Layout | None = None,
    scale: float = 1.0,
    found_inf: Tensor | None = None,
) -> list[Tensor]:
    """Copy the slots of `buffer`, times `scale`, into `tensors`, in place.

    layout: the one `buffer` was packed with; None takes `layout_of(tensors, dtype=buffer.dtype)`.
    found_inf and products as in `pack`. Returns the tensors. Raises TypeError or ValueError before
    anything is written.
    """
    check_tensor("buffer", buffer)
    checked, known = check_packed(tensors, layout, buffer.dtype)
    layout = known.value.layout
    scale = check_scalar("scale", scale)
    check_buffer("buffer", buffer, layout, checked[0].device if checked else buffer.device)
    if not known.writable:
        check_all_writable("tensors", checked)
    flag = check_found_inf(found_inf, buffer.device)
    if tracing():
        call("unpack", buffer, layout.offsets, layout.alignment, scale, checked, flag)
    else:
        _unpack(buffer, known, scale, checked, flag)
    return checked


def pack_bytes(tensors: Sequence[Tensor], *, layout: Layout | None = None) -> int:
    """Least traffic of `pack`, in bytes: every tensor read, the whole buffer written."""
    checked, known = check_packed(tensors, layout, None)
    layout = known.value.layout
    read = sum(tensor.numel() * tensor.element_size() for tensor in checked)
    return read + layout.numel * layout.dtype.itemsize


def unpack_bytes(buffer: Tensor, tensors: Sequence[Tensor], *, layout: Layout | None = None) -> int:
    """Least traffic of `unpack`, in bytes: every slot read, every tensor written."""
    checked, known = check_packed(tensors, layout, check_tensor("buffer", buffer).dtype)
    itemsize = known.value.layout.dtype.itemsize
    return sum(tensor.numel() * (tensor.element_size() + itemsize) for tensor in checked)


def pack_reference(
    tensors: Sequence[Tensor], *, layout: Layout | None = None, scale: float = 1.0
) -> Tensor:
    """What `pack` writes, before the rounding to the buffer's dtype: float64, 1-D."""
    checked, known = check_packed(tensors, layout, None)
    layout = known.value.layout
    scale = check_scalar("scale", scale)
    device = checked[0].device if checked else None
    buffer = torch.zeros(layout.numel, dtype=torch.float64, device=device)
    for tensor, view in zip(checked, layout.views(buffer), strict=True):
        view.copy_(tensor.detach().double() * scale)
    return buffer


def unpack_reference(buffer: Tensor, layout: Layout, *, scale: float = 1.0) -> list[Tensor]:
    """What `unpack` writes, before the rounding to the tensors' dtypes: float64 tensors."""
    check_layout(layout)
    check_buffer("buffer", buffer, layout, check_tensor("buffer", buffer).device)
    return layout.views(buffer.detach().double() * check_scalar("scale", scale))
