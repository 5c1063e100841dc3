"""pack and unpack: many tensors to one buffer and back in one launch, scale and cast fused."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.findings import SCHEMA, Findings
from kernels.layout import Layout, PackedList, check_buffer, check_layout, check_packed
from kernels.plans import PackPlan, UnpackPlan, device_of, plan_pack, plan_unpack
from kernels.torch_ops import call, mark_written, operator, read_list, returns_nothing, tracing
from kernels.validation import (
    check_all_writable,
    check_scalar,
    check_tensor,
    check_writable,
)

__all__ = ["pack", "pack_bytes", "pack_reference", "unpack", "unpack_bytes", "unpack_reference"]


def pack(
    tensors: Sequence[Tensor],
    *,
    layout: Layout | None = None,
    out: Tensor | None = None,
    scale: float = 1.0,
    found_inf: Tensor | None = None,
    max_abs: Tensor | None = None,
) -> Tensor:
    """Copy `tensors`, each times `scale`, into one 1-D buffer; the padding is zero.

    Products are taken in float32 (float64 where either dtype is float64) and rounded once.

    Args:
        tensors: Contiguous, on one device, of any supported dtypes.
        layout: Where each goes and the buffer's dtype; None takes `layout_of(tensors)`.
        out: The buffer to write, `layout.numel` elements of `layout.dtype`, 1-D and apart from the
            tensors; None makes one.
        scale: Factor of every element.
        found_inf: float32 of one element, set to 1 where an element written is not finite, else
            left.
        max_abs: One element, float64 where the buffer is, else float32; set to the largest
            magnitude written, NaN if any is.

    Returns:
        The buffer.

    Raises:
        TypeError: An argument has another type or dtype. Nothing has been written.
        ValueError: One cannot be used, or overlaps what is written. Nothing has been written.
    """
    scale = check_scalar("scale", scale)
    if tracing():
        return _trace_pack(tensors, layout, out, scale, Findings(found_inf, max_abs))
    plan = plan_pack(tensors, layout=layout, out=out, found_inf=found_inf, max_abs=max_abs)
    plan(scale)
    mark_written(plan.written())
    return plan.out


def unpack(
    buffer: Tensor,
    tensors: Sequence[Tensor],
    *,
    layout: Layout | None = None,
    scale: float = 1.0,
    found_inf: Tensor | None = None,
    max_abs: Tensor | None = None,
) -> list[Tensor]:
    """Copy the slots of `buffer`, times `scale`, into `tensors`, in place.

    Products are taken as in `pack`.

    Args:
        buffer: 1-D, as `layout` says.
        tensors: Written; apart from each other and from the buffer.
        layout: The one `buffer` was packed with; None takes
            `layout_of(tensors, dtype=buffer.dtype)`.
        scale: Factor of every element.
        found_inf: As in `pack`.
        max_abs: As in `pack`, float64 where a tensor written is.

    Returns:
        The tensors.

    Raises:
        TypeError: An argument has another type or dtype. Nothing has been written.
        ValueError: One cannot be used, or overlaps what is written. Nothing has been written.
    """
    scale = check_scalar("scale", scale)
    if tracing():
        return _trace_unpack(buffer, tensors, layout, scale, Findings(found_inf, max_abs))
    plan = plan_unpack(buffer, tensors, layout=layout, found_inf=found_inf, max_abs=max_abs)
    done = plan(scale)
    mark_written(plan.written())
    return done


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
    buffer = torch.zeros(layout.numel, dtype=torch.float64, device=device_of(tensors))
    for tensor, view in zip(tensors, layout.views(buffer), strict=True):
        view.copy_(tensor.detach().double() * scale)
    return buffer


def unpack_reference(buffer: Tensor, layout: Layout, *, scale: float = 1.0) -> list[Tensor]:
    """What `unpack` writes, before the rounding to the tensors' dtypes: float64 tensors."""
    check_layout(layout)
    check_buffer("buffer", buffer, layout, check_tensor("buffer", buffer).device)
    return layout.views(buffer.detach().double() * check_scalar("scale", scale))


def _trace_pack(
    tensors: Sequence[Tensor],
    layout: Layout | None,
    out: Tensor | None,
    scale: float,
    findings: Findings,
) -> Tensor:
    """`pack` where the call is read rather than run."""
    tensors = read_list("tensors", tensors)
    chosen = check_packed(tensors, layout, None).layout
    device = device_of(tensors)
    if out is not None:
        device = device if tensors else check_tensor("out", out).device
        check_buffer("out", out, chosen, device)
        check_writable("out", out)
    findings.check(device, chosen.dtype)
    target = torch.empty(chosen.numel, dtype=chosen.dtype, device=device) if out is None else out
    call("pack_2", tensors, chosen.offsets, chosen.alignment, scale, target, *findings)
    return target


def _trace_unpack(
    buffer: Tensor,
    tensors: Sequence[Tensor],
    layout: Layout | None,
    scale: float,
    findings: Findings,
) -> list[Tensor]:
    """`unpack` where the call is read rather than run."""
    tensors = read_list("tensors", tensors)
    check_tensor("buffer", buffer)
    chosen = check_packed(tensors, layout, buffer.dtype).layout
    device = tensors[0].device if tensors else buffer.device
    check_buffer("buffer", buffer, chosen, device)
    check_all_writable("tensors", tensors)
    findings.check(device, *[tensor.dtype for tensor in tensors])
    call("unpack_2", buffer, chosen.offsets, chosen.alignment, scale, tensors, *findings)
    return tensors


@operator(
    "pack_2(Tensor[] tensors, SymInt[] offsets, int alignment, float scale, Tensor(a!) out, "
    f"{SCHEMA}) -> ()",
    fake=returns_nothing,
)
def _pack(
    tensors: list[Tensor],
    offsets: list[int],
    alignment: int,
    scale: float,
    out: Tensor,
    *findings: Tensor | None,
) -> None:
    packed = _within(out, tensors, offsets, alignment)
    plan = PackPlan(tensors, packed, out, Findings(*findings))
    plan(scale)
    mark_written(plan.written())


@operator(
    "unpack_2(Tensor buffer, SymInt[] offsets, int alignment, float scale, Tensor(a!)[] tensors, "
    f"{SCHEMA}) -> ()",
    fake=returns_nothing,
)
def _unpack(
    buffer: Tensor,
    offsets: list[int],
    alignment: int,
    scale: float,
    tensors: list[Tensor],
    *findings: Tensor | None,
) -> None:
    packed = _within(buffer, tensors, offsets, alignment)
    plan = UnpackPlan(tensors, packed, buffer, Findings(*findings))
    plan(scale)
    mark_written(plan.written())


def _within(
    buffer: Tensor, tensors: list[Tensor], offsets: list[int], alignment: int
) -> PackedList:
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
    return PackedList(layout, tuple([tensor.dtype for tensor in tensors]))
