"""pack and unpack: many tensors to one buffer and back in one launch, scale and cast fused."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import _recall
from kernels._known import Known, KnownCalls, Place
from kernels.cpu import dispatch
from kernels.gpu import copy_kernel, launcher
from kernels.layout import Layout
from kernels.packed_list import PackedList, check_buffer, check_layout, check_packed, place_of
from kernels.torch_ops import call, operator, read_list, returns_nothing, tracing
from kernels.validation import (
    check_all_writable,
    check_found_inf,
    check_scalar,
    check_tensor,
    check_writable,
)

_PACKS: KnownCalls[PackedList] = KnownCalls()
_UNPACKS: KnownCalls[PackedList] = KnownCalls()


def _pack_known(
    tensors: list[Tensor],
    known: Known[PackedList],
    place: Place,
    scale: float,
    out: Tensor,
    found_inf: Tensor | None,
) -> None:
    if launcher.on_triton(out):
        copy_kernel.copy(place.inputs, known.value, out, scale, found_inf, packing=True)
        launcher.mark_written([out], found_inf)
    else:
        dispatch.pack(tensors, place, known, out, scale, found_inf)


def _unpack_known(
    buffer: Tensor,
    known: Known[PackedList],
    place: Place,
    scale: float,
    tensors: list[Tensor],
    found_inf: Tensor | None,
) -> None:
    if launcher.on_triton(buffer):
        copy_kernel.copy(place.inputs, known.value, buffer, scale, found_inf, packing=False)
        launcher.mark_written(tensors, found_inf)
    else:
        dispatch.unpack(buffer, tensors, place, known, scale, found_inf)


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
    known = _known_within(out, tensors, offsets, alignment)
    place = place_of(tensors, known, "out", out, False, found_inf)
    _pack_known(tensors, known, place, scale, out, found_inf)


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
    known = _known_within(buffer, tensors, offsets, alignment)
    place = place_of(tensors, known, "buffer", buffer, True, found_inf)
    _unpack_known(buffer, known, place, scale, tensors, found_inf)


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
    done: Tensor | None = None
    if not tracing():
        done = _recall.copy(_PACKS.calls, layout, tensors, scale, out, found_inf, True)
    return _pack(tensors, layout, out, scale, found_inf) if done is None else done


def _pack(
    tensors: Sequence[Tensor],
    layout: Layout | None,
    out: Tensor | None,
    scale: float,
    found_inf: Tensor | None,
) -> Tensor:
    def check() -> PackedList:
        found = check_packed(tensors, layout, None)
        device = _device_of(tensors)
        if out is not None:
            device = device if tensors else check_tensor("out", out).device
            check_buffer("out", out, found.layout, device)
            check_writable("out", out)
        check_found_inf(found_inf, device)
        return found

    tensors, scale = read_list("tensors", tensors), check_scalar("scale", scale)
    traced = tracing()
    if traced:
        known, place = Known(check()), None
    else:
        known, place = _PACKS.checked(check, layout, tensors, (out, found_inf))
    chosen = known.value.layout
    target = out
    if target is None:
        target = torch.empty(chosen.numel, dtype=chosen.dtype, device=_device_of(tensors))
    if traced:
        call("pack", tensors, chosen.offsets, chosen.alignment, scale, target, found_inf)
    else:
        place = place or place_of(tensors, known, "out", out, False, found_inf)
        _pack_known(tensors, known, place, scale, target, found_inf)
    return target


def _device_of(tensors: Sequence[Tensor]) -> torch.device:
    return tensors[0].device if tensors else torch.device("cpu")


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
    done: list[Tensor] | None = None
    if not tracing():
        done = _recall.copy(_UNPACKS.calls, layout, tensors, scale, buffer, found_inf, False)
    return _unpack(buffer, tensors, layout, scale, found_inf) if done is None else done


def _unpack(
    buffer: Tensor,
    tensors: Sequence[Tensor],
    layout: Layout | None,
    scale: float,
    found_inf: Tensor | None,
) -> list[Tensor]:
    def check() -> PackedList:
        check_tensor("buffer", buffer)
        found = check_packed(tensors, layout, buffer.dtype)
        device = tensors[0].device if tensors else buffer.device
        check_buffer("buffer", buffer, found.layout, device)
        check_all_writable("tensors", tensors)
        check_found_inf(found_inf, device)
        return found

    tensors, scale = read_list("tensors", tensors), check_scalar("scale", scale)
    traced = tracing()
    if traced:
        known, place = Known(check()), None
    else:
        known, place = _UNPACKS.checked(check, layout, tensors, (buffer, found_inf))
    chosen = known.value.layout
    if traced:
        call("unpack", buffer, chosen.offsets, chosen.alignment, scale, tensors, found_inf)
    else:
        place = place or place_of(tensors, known, "buffer", buffer, True, found_inf)
        _unpack_known(buffer, known, place, scale, tensors, found_inf)
    return tensors


def pack_bytes(tensors: Sequence[Tensor], *, layout: Layout | None = None) -> int:
    """Least traffic of `pack`, in bytes: every tensor read, the whole buffer written."""
    layout = check_packed(tensors, layout, None).layout
    read = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return read + layout.numel * layout.dtype.itemsize


def unpack_bytes(buffer: Tensor, tensors: Sequence[Tensor], *, layout: Layout | None = None) -> int:
    """Least traffic of `unpack`, in bytes: every slot read, every tensor written."""
    found = check_packed(tensors, layout, check_tensor("buffer", buffer).dtype)
    itemsize = found.layout.dtype.itemsize
    return sum(tensor.numel() * (tensor.element_size() + itemsize) for tensor in tensors)


def pack_reference(
    tensors: Sequence[Tensor], *, layout: Layout | None = None, scale: float = 1.0
) -> Tensor:
    """What `pack` writes, before the rounding to the buffer's dtype: float64, 1-D."""
    layout = check_packed(tensors, layout, None).layout
    scale = check_scalar("scale", scale)
    buffer = torch.zeros(layout.numel, dtype=torch.float64, device=_device_of(tensors))
    for tensor, view in zip(tensors, layout.views(buffer), strict=True):
        view.copy_(tensor.detach().double() * scale)
    return buffer


def unpack_reference(buffer: Tensor, layout: Layout, *, scale: float = 1.0) -> list[Tensor]:
    """What `unpack` writes, before the rounding to the tensors' dtypes: float64 tensors."""
    check_layout(layout)
    check_buffer("buffer", buffer, layout, check_tensor("buffer", buffer).device)
    return layout.views(buffer.detach().double() * check_scalar("scale", scale))
