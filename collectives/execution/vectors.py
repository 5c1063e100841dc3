"""The tensors of an all-reduce as one vector: in one tensor, or packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from collectives.execution.executor import Workspace
from collectives.fused_buffer import buffer_of
from collectives.reducers import kernels

__all__ = ["FlatVector", "PackedVector", "flatten", "vector_of"]

Tensor = torch.Tensor


@dataclass
class FlatVector:
    """A vector that lies in one tensor, of `segments`."""

    flat: Tensor
    segments: Sequence[int] | None
    rows: int
    postscale: float

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.flat.numel()

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype."""
        return self.flat.dtype

    def fill(self, buffer: Tensor) -> None:
        """Copy the vector to `buffer`."""
        buffer.copy_(self.flat)

    def target(self, workspace: Workspace) -> Tensor:
        """Return where a result may be written that `store` takes."""
        return self.flat

    def store(self, result: Tensor) -> None:
        """Copy `result` to the tensor and scale it."""
        if result is not self.flat:
            self.flat.copy_(result)
        else:
            # Plans of kernels do not tell autograd that they have written it.
            torch.autograd.graph.increment_version(self.flat)
        if self.postscale != 1.0:
            self.flat.mul_(self.postscale)


@dataclass
class PackedVector:
    """A vector of several tensors, each in its slot."""

    tensors: Sequence[Tensor]
    layout: Any
    postscale: float

    @property
    def numel(self) -> int:
        """Number of elements, with padding."""
        numel: int = self.layout.numel
        return numel

    @property
    def dtype(self) -> torch.dtype:
        """The tensors' dtype."""
        return self.tensors[0].dtype

    @property
    def rows(self) -> int:
        """Number of tensors."""
        return len(self.tensors)

    @property
    def segments(self) -> Sequence[int]:
        """Element boundaries of the slots."""
        segments: Sequence[int] = self.layout.segments
        return segments

    def fill(self, buffer: Tensor) -> None:
        """Pack the tensors into `buffer`."""
        kernels.pack(self.tensors, layout=self.layout, out=buffer)

    def target(self, workspace: Workspace) -> Tensor:
        """Return where a result may be written that `store` takes."""
        return workspace.take(self.numel, self.tensors[0])

    def store(self, result: Tensor) -> None:
        """Unpack `result` to the tensors and scale them."""
        kernels.unpack(result, self.tensors, layout=self.layout, scale=self.postscale)


def vector_of(
    tensors: Sequence[Tensor], segments: Sequence[int] | None, postscale: float, max_bytes: int
) -> FlatVector | PackedVector | None:
    """Return the tensors of an all-reduce as one vector; None where a buffer cannot hold it."""
    first = tensors[0]
    if len(tensors) == 1:
        if not (first.is_cpu and 0 < first.nbytes <= max_bytes):
            return None
        rows = 1 if segments is None else len(segments) - 1
        return FlatVector(flatten(first), segments, rows, postscale)
    if not all(t.is_cpu and t.dtype == first.dtype for t in tensors):
        return None
    if not 0 < sum(tensor.nbytes for tensor in tensors) <= max_bytes:
        return None
    if first.dtype not in kernels.DTYPES:
        return None
    fused = buffer_of(tensors)
    layout = kernels.layout_of(tensors) if fused is None else fused.layout
    if layout.numel * first.element_size() > max_bytes:
        return None
    if fused is not None:
        return FlatVector(fused.buffer, layout.segments, len(tensors), postscale)
    return PackedVector([tensor.detach() for tensor in tensors], layout, postscale)


def flatten(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's elements in one dimension, apart from autograd."""
    if type(tensor) is Tensor and tensor.dim() == 1 and not tensor.requires_grad:
        return tensor
    return tensor.detach().view(-1)
