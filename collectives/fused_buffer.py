"""Tensors in aligned slots of one buffer, so that they need no packing."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from collectives import validation
from collectives.reducers import kernels
from kernels import Layout

Tensor = torch.Tensor
_SlotsKey = tuple[int, torch.dtype, torch.device, tuple[int, ...]]


class FusedBuffer:
    """A buffer with a slot for each of several tensors of one dtype and device.

    `kernels.layout_of` determines the slots. A grouped all-reduce of the attribute `tensors` runs
    in the buffer itself. The padding between slots has arbitrary values.

    Args:
        tensors: Strided tensors of one dtype and device; slots get their shapes and strides, but
            not their values.
        memory: Memory for the buffer: 1-D, contiguous, at least `layout.numel` elements, of the
            tensors' dtype and device. Nothing else may use it from now on. None allocates zeros.

    Attributes:
        layout: The positions of the slots.
        buffer: The whole buffer, 1-D.
        views: The slots with the shapes and strides of the tensors; contiguous for tensors whose
            memory has holes or overlaps.
        tensors: The slots as contiguous tensors for collectives; 1-D if the view is not contiguous.
        addresses: The address of each slot.
        padding: The gaps between slots, and after the last one.

    Examples:
        >>> fused = collectives.FusedBuffer([torch.ones(2, 3), torch.ones(4)])
        >>> fused.layout.offsets, [tuple(view.shape) for view in fused.views]
        ((0, 16), [(2, 3), (4,)])
    """

    def __init__(self, tensors: Sequence[Tensor], memory: Tensor | None = None) -> None:
        tensors = validation.tensors("tensors", tensors, dense=True)
        if not tensors:
            raise ValueError("tensors must be one or more: a buffer is of their dtype and device")
        self.layout = kernels.layout_of([_flat(tensor) for tensor in tensors])
        if memory is None:
            memory = torch.zeros(
                self.layout.numel, dtype=self.layout.dtype, device=tensors[0].device
            )
        _check_memory(memory, self.layout, tensors[0].device)
        self.buffer = memory[: self.layout.numel]
        slots = self.layout.views(self.buffer)
        self.views = [_as(slot, tensor) for slot, tensor in zip(slots, tensors, strict=True)]
        self.tensors = [
            view if view.is_contiguous() else slot
            for view, slot in zip(self.views, slots, strict=True)
        ]
        ends = [o + n for o, n in zip(self.layout.offsets, self.layout.numels, strict=True)]
        self.padding = [
            self.buffer[end:stop]
            for end, stop in zip(ends, self.layout.segments[1:], strict=True)
            if stop > end
        ]
        self.addresses = [tensor.data_ptr() for tensor in self.tensors]
        if self.layout.numel:
            _buffers[_slots_key(self.tensors)] = self

    def clear_padding(self) -> None:
        """Zero the padding, before `buffer` is reduced as a single tensor."""
        if self.padding:
            torch._foreach_zero_(self.padding)


# Buffers by the first slot's address, dtype and device and the sizes of all slots: the host knows
# these, so that a look-up does not wait for the device.
_buffers: weakref.WeakValueDictionary[_SlotsKey, FusedBuffer] = weakref.WeakValueDictionary()


def buffer_of(tensors: Sequence[Tensor]) -> FusedBuffer | None:
    """Return the FusedBuffer whose slots are exactly these tensors, in this order, or None.

    Args:
        tensors: Contiguous tensors.

    Raises:
        TypeError: `tensors` is not a list or tuple of tensors.

    Examples:
        >>> fused = collectives.FusedBuffer([torch.ones(2, 3), torch.ones(4)])
        >>> collectives.buffer_of(fused.tensors) is fused
        True
        >>> collectives.buffer_of([torch.ones(4)]) is None
        True
    """
    validation.instance("tensors", tensors, Sequence, "a list or tuple")
    if not tensors:
        return None
    validation.instance("tensors[0]", tensors[0], Tensor, "a torch.Tensor")
    if tensors[0].layout is not torch.strided:
        return None
    try:
        found = _buffers.get(_slots_key(tensors))
    except TypeError:
        # Checked only after an error: models have hundreds of tensors, and wrong types are rare.
        for i, tensor in enumerate(tensors):
            validation.instance(f"tensors[{i}]", tensor, Tensor, "a torch.Tensor")
        raise
    if found is None or found.addresses != [tensor.data_ptr() for tensor in tensors]:
        return None
    return found


def memory_of(tensors: Sequence[Tensor], layout: Layout) -> Tensor | None:
    """Return the 1-D memory that has these contiguous tensors at the layout's offsets, or None.

    Any memory is accepted that is aligned like the layout. None for layouts with padding: outside
    of a FusedBuffer, memory between tensors may be in use, and not zero. Does no work on the
    device.
    """
    if not layout.numel or layout.numel != sum(layout.numels):
        return None
    whole = [tensor for tensor in tensors if tensor.numel()]
    first, start = whole[0], whole[0].data_ptr()
    if start % layout.alignment:
        return None
    offsets = [o for o, n in zip(layout.offsets, layout.numels, strict=True) if n]
    size = first.element_size()
    if any(start + o * size != one.data_ptr() for o, one in zip(offsets, whole, strict=True)):
        return None
    # Adjacent tensors may belong to different allocations, which one tensor cannot span.
    storage = first.untyped_storage().data_ptr()
    if any(each.untyped_storage().data_ptr() != storage for each in whole):
        return None
    return first.detach().as_strided((layout.numel,), (1,))


def _check_memory(memory: Tensor, layout: Layout, device: torch.device) -> None:
    """Check that `memory` can be a buffer of this layout."""
    validation.tensor("memory", memory)
    if memory.dtype != layout.dtype:
        raise TypeError(f"memory must be of {layout.dtype} as the tensors, got {memory.dtype}")
    if memory.device != device:
        raise ValueError(f"memory must be on {device} as the tensors, got one on {memory.device}")
    if memory.dim() != 1 or memory.numel() < layout.numel:
        raise ValueError(
            f"memory must be 1-D and have at least {layout.numel} elements, got shape "
            f"{tuple(memory.shape)}"
        )


def _slots_key(tensors: Sequence[Tensor]) -> _SlotsKey:
    first = tensors[0]
    return Tensor.data_ptr(first), first.dtype, first.device, tuple(map(Tensor.numel, tensors))


def _flat(tensor: Tensor) -> Tensor:
    """Return a 1-D tensor of the same size and dtype, with arbitrary values."""
    if _dense(tensor):
        return tensor.detach().as_strided((tensor.numel(),), (1,))
    return tensor.new_empty(tensor.numel())


def _as(slot: Tensor, tensor: Tensor) -> Tensor:
    if not _dense(tensor):
        return slot.view(tensor.shape)
    return slot.as_strided(tensor.shape, tensor.stride())


def _dense(tensor: Tensor) -> bool:
    """Return whether the tensor covers its memory without holes or overlaps."""
    # empty_like keeps the strides of dense tensors only, and makes others contiguous.
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()
