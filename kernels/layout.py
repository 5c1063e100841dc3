"""Layouts of tensors in a packed buffer: offsets, sizes and alignment, as plain data."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kernels.validation import DTYPES, check_dtype, check_each, read_list, tracing

# In bytes: the alignments of cudaMalloc, and of torch's allocator on the CPU (a cache line).
CUDA_ALIGNMENT = 256
CPU_ALIGNMENT = 64


@dataclass(frozen=True)
class Layout:
    """The places of a list's tensors in one 1-D buffer.

    dtype: The buffer's dtype. shapes, numels, offsets: One entry for each tensor; offsets in
    elements. numel: The length of the buffer in elements, with padding. alignment: The alignment of
    each slot in bytes. Elements between the end of one tensor and the next offset are padding, and
    zero.

    Examples:
        >>> layout = kernels.layout_of([torch.ones(2), torch.ones(1)], alignment=8)
        >>> layout.segments
        (0, 2, 4)
        >>> layout.views(torch.arange(4.0))
        [tensor([0., 1.]), tensor([2.])]
    """

    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]
    numels: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int
    alignment: int

    @property
    def segments(self) -> tuple[int, ...]:
        """Boundaries (0, ..., numel) of tensors with their padding; (0,) without tensors."""
        return (*self.offsets, self.numel)

    @cached_property
    def in_c(self) -> tuple[array[int], array[int]]:
        """The elements of each tensor, and the boundaries of the slots, as int64."""
        return array("q", self.numels), array("q", self.segments)

    @cached_property
    def in_one(self) -> bytes:
        """The layout as int64 for kernels/cpu/reading.h and as a key; empty unless it is `sound`.

        The numbers of tensors, of elements and of the dtype, `in_c`, each shape after its length.
        """
        if not self.sound:
            return b""
        head = len(self.numels), self.numel, DTYPES.index(self.dtype)
        shapes = itertools.chain.from_iterable((len(shape), *shape) for shape in self.shapes)
        return array("q", (*head, *itertools.chain(*self.in_c, shapes))).tobytes()

    @cached_property
    def sound(self) -> bool:
        """Whether the slots are large enough for their tensors, disjoint and inside the buffer.

        True for layouts of `layout_of`. Kernels rely on this, since they do not check addresses.
        """
        rows = (self.shapes, self.numels, self.offsets)
        if not all(type(row) is tuple and len(row) == len(self.numels) for row in rows):
            return False
        numbers = (*itertools.chain(*self.shapes), *self.numels, *self.offsets, self.numel)
        if not all(type(number) is int and number >= 0 for number in numbers):
            return False
        return (
            self.dtype in DTYPES
            and self.segments[0] == 0
            and all(
                map(operator.le, map(operator.add, self.offsets, self.numels), self.segments[1:])
            )
            and self.numels == tuple(map(math.prod, self.shapes))
        )

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return views of `buffer` (1-D, `numel` elements), shaped as the original tensors."""
        if buffer.dim() != 1 or buffer.numel() != self.numel:
            raise ValueError(
                f"buffer has shape {tuple(buffer.shape)} but the layout needs ({self.numel},)"
            )
        return [
            buffer[offset : offset + count].view(shape)
            for offset, count, shape in zip(self.offsets, self.numels, self.shapes, strict=True)
        ]


def layout_of(
    tensors: Iterable[Tensor], *, dtype: torch.dtype | None = None, alignment: int | None = None
) -> Layout:
    """Lay out `tensors` one after the other, each slot starting at a multiple of `alignment`.

    dtype: The buffer's dtype; None for the tensors' dtype, which must then be one (float32 for an
    empty list). alignment: Bytes, a positive multiple of the element size; None for 256 with CUDA
    tensors and 64 with CPU tensors. Raises TypeError (dtypes) or ValueError (alignment, devices,
    contiguity).

    Examples:
        >>> layout = kernels.layout_of([torch.ones(2, 3), torch.ones(4)])  # on a CPU: 64 bytes
        >>> layout.offsets, layout.numel
        ((0, 16), 32)
    """
    given = check_each("tensors", read_list("tensors", tensors), any_order=True)
    if dtype is None:
        dtype = given[0].dtype if given else torch.float32
        for i, other in enumerate(given):
            if other.dtype != dtype:
                raise TypeError(
                    f"tensors[{i}] has dtype {other.dtype} but tensors[0] has {dtype}: "
                    "pass dtype= to convert to one"
                )
    check_dtype("dtype", dtype)
    if alignment is None:
        alignment = CUDA_ALIGNMENT if given and given[0].is_cuda else CPU_ALIGNMENT
    if type(alignment) is not int or alignment <= 0 or alignment % dtype.itemsize:
        raise ValueError(
            f"alignment is {alignment!r}: pass a positive multiple of the {dtype.itemsize} bytes "
            f"of one {dtype}"
        )
    step = alignment // dtype.itemsize
    numels = tuple(map(Tensor.numel, given))
    ends = [0, *itertools.accumulate([-(-numel // step) * step for numel in numels])]
    return Layout(
        dtype=dtype,
        shapes=tuple([tuple(tensor.shape) for tensor in given]),
        numels=numels,
        offsets=tuple(ends[:-1]),
        numel=ends[-1],
        alignment=alignment,
    )


def codes_of(tensors: Iterable[Tensor]) -> Sequence[int]:
    """Return the numbers of the tensors' dtypes in `DTYPES`, as bytes outside of traced code."""
    codes = tuple([DTYPES.index(tensor.dtype) for tensor in tensors])
    return codes if tracing() else bytes(codes)


def lay_out(
    tensors: object, layout: Layout | None, dtype: torch.dtype | None
) -> tuple[list[Any], Layout]:
    """Return a list's elements and a sound layout: `layout` or, if it is None, one in `dtype`."""
    given = read_list("tensors", tensors)
    if layout is None:
        return given, layout_of(given, dtype=dtype)
    check_layout(layout)
    return given, layout


def check_packed(given: list[Any], layout: Layout, *, any_order: bool = True) -> list[Tensor]:
    """Return a list's tensors if they can be read and have a layout's shapes.

    any_order: As in `check_tensor`.

    Raises:
        TypeError: A tensor has another type or dtype.
        ValueError: A tensor cannot be read, or has another shape.
    """
    inputs = check_each("tensors", given, any_order=any_order)
    if tuple([one.shape for one in inputs]) != layout.shapes:
        raise ValueError(
            f"layout holds {len(layout.shapes)} tensors of other shapes than the "
            f"{len(inputs)} given: call kernels.layout_of on these tensors"
        )
    return inputs


@functools.lru_cache(maxsize=128)
def checked_layout(
    dtype: torch.dtype,
    shapes: tuple[tuple[int, ...], ...],
    offsets: tuple[int, ...],
    numel: int,
    alignment: int,
) -> Layout:
    """Return the layout of tensors by their offsets; ValueError if they do not fit."""
    numels = tuple(map(math.prod, shapes))
    layout = Layout(dtype, tuple(map(tuple, shapes)), numels, offsets, numel, alignment)
    check_layout(layout)
    return layout


def check_layout(layout: object) -> None:
    """Raise TypeError if this is not a Layout, ValueError if it is not `sound`."""
    if not isinstance(layout, Layout):
        raise TypeError(f"layout must be a kernels.Layout, got {type(layout).__name__}")
    if not tracing() and not layout.sound:
        raise ValueError("layout's fields contradict each other: make it with kernels.layout_of")


def check_buffer(name: str, buffer: Tensor, layout: Layout, device: torch.device) -> None:
    """Raise TypeError or ValueError unless a readable tensor fits this layout and device."""
    if buffer.dtype != layout.dtype:
        raise TypeError(f"{name} has dtype {buffer.dtype} but the layout has {layout.dtype}")
    if buffer.shape != (layout.numel,):
        raise ValueError(
            f"{name} has shape {tuple(buffer.shape)} but the layout needs ({layout.numel},)"
            f", in which tensors start at multiples of {layout.alignment} bytes: pack makes it, "
            "torch.cat does not"
        )
    if buffer.device != device:
        raise ValueError(f"{name} is on {buffer.device} but the tensors are on {device}: move one")
