"""The tensors of an all-reduce as one vector: in one tensor, or packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from collectives.execution.executor import Workspace
from collectives.fused_buffer import buffer_of, memory_of
from collectives.reducers import as_real, kernels
from kernels import Layout
from kernels.validation import PLAIN

Tensor = torch.Tensor


@dataclass(eq=False)
class Vector:
    """Tensors as one vector.

    Attributes:
        tensors: One tensor that is the vector, or several tensors, each with a slot in it.
        numel: Number of elements, with the padding between slots.
        segments: Element boundaries that operators work by; None for one segment.
        layout: The places of the slots; None if one tensor is the vector.
        padding: The elements between a FusedBuffer's slots. They have no meaning, but an earlier
            reduction may have left NaN there, and operators that work by segments read them, so
            they are zeroed before each reduction. The FusedBuffer itself is not kept here, since
            its request may hold this vector.
    """

    tensors: Sequence[Tensor]
    numel: int
    dtype: torch.dtype
    segments: Sequence[int] | None
    layout: Layout | None = None
    padding: list[Tensor] | None = None

    def rebind(self, tensors: Sequence[Tensor]) -> bool:
        """Take another tensor of the same shape; return False if there are several.

        Several tensors may lie in memory otherwise: then they are another vector.
        """
        if len(tensors) != 1:
            return False
        self.tensors = [flatten(tensors[0])]
        return True

    def release(self) -> None:
        """Drop the tensors."""
        self.tensors, self.padding = (), None

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.numel * self.dtype.itemsize

    def buffer(self, packed: Workspace) -> Tensor:
        """Return the buffer to reduce in place: the one tensor, or memory to fill."""
        first = self.tensors[0]
        return first if self.layout is None else packed.take(self.numel, first)

    def fill(self, buffer: Tensor, scale: float = 1.0) -> None:
        """Copy the vector to `buffer`, unless it is `buffer`, and scale it there."""
        if self.padding:
            torch._foreach_zero_(self.padding)
        if self.layout is not None:
            kernels.pack(self.tensors, layout=self.layout, scale=scale, out=buffer)
        elif buffer is self.tensors[0]:
            multiply(buffer, scale)
        elif scale == 1.0:
            buffer.copy_(self.tensors[0])
        else:
            torch.mul(as_real(self.tensors[0]), scale, out=as_real(buffer))

    def fill_around(self, start: int, stop: int, buffer: Tensor) -> None:
        """Copy the one tensor to `buffer`, except for elements [start, stop)."""
        if self.padding:
            torch._foreach_zero_(self.padding)
        (flat,) = self.tensors
        buffer[:start].copy_(flat[:start])
        buffer[stop:].copy_(flat[stop:])

    def store(self, result: Tensor, scale: float) -> None:
        """Copy `result` to the tensors, multiplied by `scale`."""
        if self.layout is not None:
            kernels.unpack(result, self.tensors, layout=self.layout, scale=scale)
            return
        (flat,) = self.tensors
        if result is not flat:
            flat.copy_(result)
        if scale != 1.0:
            multiply(flat, scale)


def vector_of(tensors: Sequence[Tensor], segments: Sequence[int] | None) -> Vector | None:
    """Return tensors of one dtype and device as one vector; None if no kernel packs their dtype.

    segments: Segments of a single tensor; of several tensors each is a segment. Tensors that lie in
    a FusedBuffer, or in one block of memory at the offsets of a layout without padding, are a
    vector already.
    """
    first = tensors[0]
    dtype = first.dtype
    if len(tensors) == 1:
        return Vector([flatten(first)], first.numel(), dtype, segments)
    if dtype not in kernels.DTYPES:
        return None
    if not PLAIN.issuperset(map(type, tensors)):
        tensors = [*map(as_plain, tensors)]
    fused = buffer_of(tensors)
    if fused is not None:
        buffer, segments = fused.buffer, fused.layout.segments
        return Vector([buffer], buffer.numel(), dtype, segments, padding=fused.padding)
    layout = kernels.layout_of(tensors)
    memory = memory_of(tensors, layout)
    if memory is not None:
        return Vector([memory], layout.numel, dtype, layout.segments)
    flat = [tensor.detach() for tensor in tensors]
    return Vector(flat, layout.numel, dtype, layout.segments, layout)


def multiply(tensor: Tensor, factor: float) -> None:
    """Multiply a tensor in place; integers in float64, truncated towards zero, as Horovod does."""
    if factor == 1.0:
        return
    tensor = as_real(tensor)
    if tensor.is_floating_point():
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.double().mul_(factor))


def flatten(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as a 1-D view, of class Tensor and detached from autograd."""
    if type(tensor) not in PLAIN:
        tensor = as_plain(tensor)
    return tensor.detach().view(-1)


def as_plain(tensor: Tensor) -> Tensor:
    """Return a subclass's tensor as a plain Tensor on the same memory, for the kernels."""
    # Otherwise the subclass would wrap the result.
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)
