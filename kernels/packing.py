"""pack and unpack: copy many tensors to one buffer and back, with scale and cast, in one launch."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from kernels.arguments import check_pack, check_unpack, device_of
from kernels.binding import check_disjoint, run_direct
from kernels.layout import Layout, check_buffer, check_layout, check_packed, lay_out
from kernels.plans import ScaledPlan
from kernels.torch_ops import run
from kernels.validation import (
    check_all_writable,
    check_each,
    check_factor,
    check_tensor,
    fills_memory,
    read_list,
    tracing,
)


def pack(
    tensors: Iterable[Tensor],
    *,
    layout: Layout | None = None,
    out: Tensor | None = None,
    scale: float | Tensor = 1.0,
    found_inf: Tensor | None = None,
) -> Tensor:
    """Copy `tensors`, times `scale`, into one 1-D buffer and return it; the padding is zero.

    Products are computed in float32 (float64 if either dtype is float64) and rounded once.

    Args:
        tensors: Tensors on one device, of any supported dtypes. Elements are packed in the order of
            contiguous tensors: others, such as those in `torch.channels_last`, are copied first.
        layout: Where each tensor goes, and the buffer's dtype; `layout_of(tensors)` if None.
        out: The buffer to write: 1-D, `layout.numel` elements of `layout.dtype`, which shares no
            memory with the tensors. None makes one.
        scale: The factor of every element: a float, or a 0-d tensor of any supported dtype. If it
            is on the tensors' GPU, it is read there, so the host does not wait and a CUDA graph
            reads the new value at each replay.
        found_inf: float32 of one element, set to 1 if an element written is not finite, otherwise
            not changed.

    Raises:
        TypeError: An argument has another type or dtype. Nothing has been written.
        ValueError: An argument is unusable, or overlaps an output. Nothing has been written.

    Examples:
        >>> tensors = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
        >>> kernels.pack(tensors, layout=kernels.layout_of(tensors, alignment=8), scale=0.5)
        tensor([0.5000, 1.0000, 1.5000, 0.0000])
    """
    scale = check_factor("scale", scale)
    packed = run_direct("pack", (tensors, out, None, scale, 1.0, layout, found_inf))
    if packed is None:
        call = check_pack(tensors, layout, out, found_inf, copies=True)
        packed = run(call, scale)
    return packed


def plan_pack(
    tensors: Iterable[Tensor],
    *,
    layout: Layout | None = None,
    out: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> ScaledPlan[Tensor]:
    """Plan `pack`: run it as plan(scale).

    Examples:
        >>> tensors = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
        >>> plan = kernels.plan_pack(tensors, layout=kernels.layout_of(tensors, alignment=8))
        >>> plan(scale=2.0)
        tensor([2., 4., 6., 0.])
    """
    return ScaledPlan(check_pack(tensors, layout, out, found_inf, copies=False))


def unpack(
    buffer: Tensor,
    tensors: Iterable[Tensor],
    *,
    layout: Layout | None = None,
    scale: float | Tensor = 1.0,
    found_inf: Tensor | None = None,
) -> list[Tensor]:
    """Copy the slots of `buffer`, times `scale`, into `tensors`, and return these.

    Products are computed as in `pack`, whose errors it has.

    Args:
        buffer: 1-D, packed as `layout` says.
        tensors: The tensors to write, which share no memory with each other or the buffer. Those
            that are not contiguous are written by a copy, as `pack` reads them.
        layout: The layout of `buffer`; `layout_of(tensors, dtype=buffer.dtype)` if None.
        scale: As in `pack`.
        found_inf: As in `pack`.

    Examples:
        >>> buffer, tensors = torch.tensor([1.0, 2.0, 3.0]), [torch.empty(2), torch.empty(1)]
        >>> kernels.unpack(buffer, tensors, layout=kernels.layout_of(tensors, alignment=4))
        [tensor([1., 2.]), tensor([3.])]
    """
    scale = check_factor("scale", scale)
    unpacked = run_direct("unpack", (tensors, buffer, None, scale, 1.0, layout, found_inf))
    if unpacked is None:
        given = read_list("tensors", tensors)
        if any(map(_is_permuted, given)):
            return _unpack_permuted(buffer, given, layout, scale, found_inf)
        unpacked = run(check_unpack(buffer, given, layout, found_inf), scale)
    return unpacked


def _is_permuted(tensor: object) -> bool:
    """Whether this is a tensor such as in torch.channels_last: contiguous once it is permuted."""
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return not tensor.is_contiguous() and fills_memory(tensor)


def _unpack_permuted(
    buffer: Tensor,
    given: list[Tensor],
    layout: Layout | None,
    scale: float | Tensor,
    found_inf: Tensor | None,
) -> list[Tensor]:
    """`unpack` into contiguous tensors, and copy these into the tensors that are not."""
    check_all_writable("tensors", check_each("tensors", given, any_order=True))
    if not tracing():
        check_disjoint("tensors", given)
    dense = torch.contiguous_format
    parts = [torch.empty_like(t, memory_format=dense) if _is_permuted(t) else t for t in given]
    unpack(buffer, parts, layout=layout, scale=scale, found_inf=found_inf)
    for tensor, part in zip(given, parts, strict=True):
        if tensor is not part:
            tensor.copy_(part)
    return given


def plan_unpack(
    buffer: Tensor,
    tensors: Iterable[Tensor],
    *,
    layout: Layout | None = None,
    found_inf: Tensor | None = None,
) -> ScaledPlan[list[Tensor]]:
    """Plan `unpack`: run it as plan(scale).

    Examples:
        >>> buffer, tensors = torch.tensor([1.0, 2.0, 3.0]), [torch.empty(2), torch.empty(1)]
        >>> layout = kernels.layout_of(tensors, alignment=4)
        >>> plan = kernels.plan_unpack(buffer, tensors, layout=layout)
        >>> plan(scale=0.5)
        [tensor([0.5000, 1.0000]), tensor([1.5000])]
    """
    return ScaledPlan(check_unpack(buffer, tensors, layout, found_inf))


def pack_bytes(tensors: Iterable[Tensor], *, layout: Layout | None = None) -> int:
    """Return the least traffic of `pack` in bytes: all tensors read, the whole buffer written.

    Examples:
        >>> kernels.pack_bytes([torch.ones(2), torch.ones(1)])  # 12 read, two slots of 64 written
        140
    """
    given, chosen = _fitting(tensors, layout, None)
    return sum(tensor.nbytes for tensor in given) + chosen.numel * chosen.dtype.itemsize


def unpack_bytes(buffer: Tensor, tensors: Iterable[Tensor], *, layout: Layout | None = None) -> int:
    """Return the least traffic of `unpack` in bytes: all slots read, all tensors written.

    Examples:
        >>> kernels.unpack_bytes(torch.ones(32), [torch.ones(2), torch.ones(1)])  # 12 and 12
        24
    """
    given, chosen = _fitting(tensors, layout, check_tensor("buffer", buffer).dtype)
    itemsize = chosen.dtype.itemsize
    return sum(tensor.numel() * (tensor.element_size() + itemsize) for tensor in given)


def _fitting(
    tensors: object, layout: Layout | None, dtype: torch.dtype | None
) -> tuple[list[Tensor], Layout]:
    """Return these tensors and their layout, which is checked or made."""
    given, chosen = lay_out(tensors, layout, dtype)
    check_packed(given, chosen)
    return given, chosen


def pack_reference(
    tensors: Iterable[Tensor], *, layout: Layout | None = None, scale: float | Tensor = 1.0
) -> Tensor:
    """Return the buffer of `pack` in float64, before it is rounded to the buffer's dtype.

    Examples:
        >>> tensors = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
        >>> kernels.pack_reference(tensors, layout=kernels.layout_of(tensors, alignment=8))
        tensor([1., 2., 3., 0.], dtype=torch.float64)
    """
    given, chosen = _fitting(tensors, layout, None)
    scale = check_factor("scale", scale)
    buffer = torch.zeros(chosen.numel, dtype=torch.float64, device=device_of(given))
    for tensor, view in zip(given, chosen.views(buffer), strict=True):
        view.copy_(tensor.detach().double() * scale)
    return buffer


def unpack_reference(
    buffer: Tensor, layout: Layout, *, scale: float | Tensor = 1.0
) -> list[Tensor]:
    """Return the tensors of `unpack` in float64, before they are rounded to their dtypes.

    Examples:
        >>> layout = kernels.layout_of([torch.ones(2), torch.ones(1)], alignment=4)
        >>> kernels.unpack_reference(torch.tensor([1.0, 2.0, 3.0]), layout)
        [tensor([1., 2.], dtype=torch.float64), tensor([3.], dtype=torch.float64)]
    """
    check_layout(layout)
    check_buffer("buffer", buffer, layout, check_tensor("buffer", buffer).device)
    return layout.views(buffer.detach().double() * check_factor("scale", scale))
