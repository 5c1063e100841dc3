"""pack and unpack: many tensors to one buffer and back in one launch, scale and cast fused."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import _cpu
from kernels._check import (
    check_disjoint,
    check_no_overlap,
    check_scalar,
    check_tensor,
    check_tensors,
)
from kernels.layout import Layout, layout_of


@torch.no_grad()
def pack(
    tensors: Sequence[Tensor],
    *,
    layout: Layout | None = None,
    out: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Copy `tensors`, each times `scale`, into one 1-D buffer; the padding is zero.

    layout: where each goes and the buffer's dtype; None takes `layout_of(tensors)`. out: the
    buffer to write, `layout.numel` elements of `layout.dtype`, 1-D and apart from the tensors.
    Products are taken in float32 (float64 where either dtype is float64) and rounded once.
    Returns the buffer. Raises TypeError or ValueError before anything is written.
    """
    checked, layout = _check_list(tensors, layout, None)
    scale = check_scalar("scale", scale)
    device = checked[0].device if checked else torch.device("cpu")
    if out is None:
        out = torch.empty(layout.numel, dtype=layout.dtype, device=device)
    else:
        device = device if checked else out.device
        _check_buffer("out", out, layout, device)
        for i, tensor in enumerate(checked):
            check_no_overlap("out", out, f"tensors[{i}]", tensor)
    _cpu.pack(checked, layout, out, scale)
    return out


@torch.no_grad()
def unpack(
    buffer: Tensor,
    tensors: Sequence[Tensor],
    *,
    layout: Layout | None = None,
    scale: float = 1.0,
) -> list[Tensor]:
    """Copy the slots of `buffer`, times `scale`, into `tensors`, in place.

    layout: the one `buffer` was packed with; None takes `layout_of(tensors, dtype=buffer.dtype)`.
    Products as in `pack`. Returns the tensors. Raises TypeError or ValueError before anything is
    written.
    """
    check_tensor("buffer", buffer)
    checked, layout = _check_list(tensors, layout, buffer.dtype)
    scale = check_scalar("scale", scale)
    _check_buffer("buffer", buffer, layout, checked[0].device if checked else buffer.device)
    for i, tensor in enumerate(checked):
        check_no_overlap(f"tensors[{i}]", tensor, "buffer", buffer)
    check_disjoint("tensors", checked)
    _cpu.unpack(buffer, checked, layout, scale)
    return checked


def _check_list(
    tensors: Sequence[Tensor], layout: Layout | None, dtype: torch.dtype | None
) -> tuple[list[Tensor], Layout]:
    if layout is None:
        layout = layout_of(tensors, dtype=dtype)
        return list(tensors), layout
    if not isinstance(layout, Layout):
        raise TypeError(f"layout must be a kernels.Layout, not {type(layout).__name__}")
    checked = check_tensors("tensors", tensors)
    if not layout.fits(checked):
        raise ValueError(
            f"layout holds {len(layout.shapes)} tensors of other shapes than the {len(checked)} "
            "given: call kernels.layout_of on these tensors"
        )
    return checked, layout


def _check_buffer(name: str, buffer: Tensor, layout: Layout, device: torch.device) -> None:
    check_tensor(name, buffer)
    if buffer.dtype != layout.dtype:
        raise TypeError(f"{name} has dtype {buffer.dtype} but the layout has {layout.dtype}")
    if buffer.shape != (layout.numel,):
        raise ValueError(
            f"{name} has shape {tuple(buffer.shape)} but the layout needs ({layout.numel},)"
        )
    if buffer.device != device:
        raise ValueError(f"{name} is on {buffer.device} but the tensors are on {device}: move one")


def pack_bytes(tensors: Sequence[Tensor], *, layout: Layout | None = None) -> int:
    """Least traffic of `pack`, in bytes: every tensor read, the whole buffer written."""
    checked, layout = _check_list(tensors, layout, None)
    read = sum(tensor.numel() * tensor.element_size() for tensor in checked)
    return read + layout.numel * layout.dtype.itemsize


def unpack_bytes(buffer: Tensor, tensors: Sequence[Tensor], *, layout: Layout | None = None) -> int:
    """Least traffic of `unpack`, in bytes: every slot read, every tensor written."""
    checked, layout = _check_list(tensors, layout, buffer.dtype)
    return sum(t.numel() * (t.element_size() + layout.dtype.itemsize) for t in checked)


def pack_reference(
    tensors: Sequence[Tensor], *, layout: Layout | None = None, scale: float = 1.0
) -> Tensor:
    """What `pack` writes, before the rounding to the buffer's dtype: float64, 1-D."""
    layout = layout_of(tensors) if layout is None else layout
    device = tensors[0].device if tensors else None
    buffer = torch.zeros(layout.numel, dtype=torch.float64, device=device)
    for tensor, view in zip(tensors, layout.views(buffer), strict=True):
        view.copy_(tensor.detach().double() * scale)
    return buffer


def unpack_reference(buffer: Tensor, layout: Layout, *, scale: float = 1.0) -> list[Tensor]:
    """What `unpack` writes, before the rounding to the tensors' dtypes: float64 tensors."""
    return layout.views(buffer.double() * scale)
