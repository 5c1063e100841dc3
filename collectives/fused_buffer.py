"""Tensors that lie in one buffer, each in an aligned slot: reduced as one, with nothing packed."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from collectives import validation
from collectives.reducers import kernels

Tensor = torch.Tensor
_Place = tuple[int, tuple[int, ...]]


class FusedBuffer:
    """One buffer with a slot for each of several tensors of one dtype and device.

    Slots follow each other as `kernels.layout_of` lays them out, padding between them is zero.
    views: the slots with the shapes and strides of the tensors (contiguous where a tensor is not
    dense). tensors: the same memory as contiguous tensors, for collectives; 1-D where a view is
    not contiguous. A grouped all-reduce of `tensors` works in the buffer itself.

    memory: at least layout.numel elements to lie in, whose use ends with this one's (padding is
    zeroed by `clear_padding`); memory of its own, all zeros, unless given.
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
        validation.tensor("memory", memory)
        self.buffer = memory[: self.layout.numel]
        slots = self.layout.views(self.buffer)
        self.views = [_as(slot, tensor) for slot, tensor in zip(slots, tensors, strict=True)]
        self.tensors = [
            view if view.is_contiguous() else slot
            for view, slot in zip(self.views, slots, strict=True)
        ]
        ends = [o + n for o, n in zip(self.layout.offsets, self.layout.numels, strict=True)]
        self._padding = [
            self.buffer[end:stop]
            for end, stop in zip(ends, self.layout.segments[1:], strict=True)
            if stop > end
        ]
        self.addresses = [tensor.data_ptr() for tensor in self.tensors]
        if self.layout.numel:
            _known[_place(self.tensors)] = self

    def clear_padding(self) -> None:
        """Zeroes what lies between the slots: memory shared with other buffers holds their data."""
        if self._padding:
            torch._foreach_zero_(self._padding)


# Buffers by where they are and the sizes of their slots: finding one costs no look at the device.
_known: weakref.WeakValueDictionary[_Place, FusedBuffer] = weakref.WeakValueDictionary()


def buffer_of(tensors: Sequence[Tensor]) -> FusedBuffer | None:
    """The buffer whose slots are just these contiguous tensors, in their order; else None."""
    if not isinstance(tensors, Sequence):
        raise TypeError(f"tensors must be a list or tuple, got {type(tensors).__name__}")
    if not tensors:
        return None
    if not isinstance(tensors[0], Tensor):
        raise TypeError(f"tensors[0] must be a torch.Tensor, got {type(tensors[0]).__name__}")
    if tensors[0].layout is not torch.strided:
        return None
    found = _known.get(_place(tensors))
    if found is None or found.addresses != [tensor.data_ptr() for tensor in tensors]:
        return None
    same = tensors[0].dtype == found.buffer.dtype and tensors[0].device == found.buffer.device
    return found if same else None


def _place(tensors: Sequence[Tensor]) -> _Place:
    return Tensor.data_ptr(tensors[0]), tuple(map(Tensor.numel, tensors))


def _flat(tensor: Tensor) -> Tensor:
    """As many elements of the same kind, 1-D: only for its size."""
    return (
        tensor.detach().as_strided((tensor.numel(),), (1,))
        if _dense(tensor)
        else (tensor.new_empty(tensor.numel()))
    )


def _as(slot: Tensor, tensor: Tensor) -> Tensor:
    if not _dense(tensor):
        return slot.view(tensor.shape)
    return slot.as_strided(tensor.shape, tensor.stride())


def _dense(tensor: Tensor) -> bool:
    """Whether the tensor covers a stretch of memory without holes or overlaps."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length == 1:
            continue
        if stride != expected:
            return False
        expected *= length
    return True
