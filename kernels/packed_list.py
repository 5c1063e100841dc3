"""What pack and unpack check of a list of tensors, its layout and their buffer, and keep of it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kernels._known import Known, Place, given_of
from kernels.layout import Layout, layout_of
from kernels.torch_ops import check_list, tracing
from kernels.validation import check_apart, check_disjoint, check_no_overlap, check_tensor


@dataclass
class PackedList:
    """What the calls on one list of tensors need to know of it, beside addresses."""

    layout: Layout
    dtypes: tuple[torch.dtype, ...]

    @cached_property
    def kinds(self) -> dict[torch.dtype, tuple[int, ...]]:
        """The tensors of each dtype, without those of no elements."""
        kinds: dict[torch.dtype, list[int]] = {}
        for i, (numel, dtype) in enumerate(zip(self.layout.numels, self.dtypes, strict=True)):
            if numel > 0:
                kinds.setdefault(dtype, []).append(i)
        return {dtype: tuple(chosen) for dtype, chosen in kinds.items()}

    @cached_property
    def dtype_set(self) -> set[torch.dtype]:
        return set(self.dtypes)

    @cached_property
    def in_c(self) -> tuple[array[int], array[int]]:
        """int64: elements of each tensor; where the slots start, and end."""
        return array("q", self.layout.numels), array("q", self.layout.segments)


def check_packed(
    tensors: Sequence[Tensor], layout: Layout | None, dtype: torch.dtype | None
) -> PackedList:
    """What is to be known of the tensors.

    Raises TypeError or ValueError where they cannot be read, or do not fit the layout.
    """
    if layout is None:
        layout = layout_of(tensors, dtype=dtype)
        checked: Sequence[Tensor] = tensors
    else:
        check_layout(layout)
        checked = check_list("tensors", tensors)
        if not layout.fits(checked):
            raise ValueError(
                f"layout holds {len(layout.shapes)} tensors of other shapes than the "
                f"{len(checked)} given: call kernels.layout_of on these tensors"
            )
    return PackedList(layout, tuple([tensor.dtype for tensor in checked]))


def check_layout(layout: object) -> None:
    """Raise TypeError for what is no Layout, ValueError for one whose slots leave its buffer."""
    if not isinstance(layout, Layout):
        raise TypeError(f"layout must be a kernels.Layout, not {type(layout).__name__}")
    if not tracing() and not layout.sound:
        raise ValueError("layout's fields contradict each other: make it with kernels.layout_of")


def check_buffer(name: str, buffer: Tensor, layout: Layout, device: torch.device) -> None:
    check_tensor(name, buffer)
    if buffer.dtype != layout.dtype:
        raise TypeError(f"{name} has dtype {buffer.dtype} but the layout has {layout.dtype}")
    if buffer.shape != (layout.numel,):
        raise ValueError(
            f"{name} has shape {tuple(buffer.shape)} but the layout needs ({layout.numel},)"
        )
    if buffer.device != device:
        raise ValueError(f"{name} is on {buffer.device} but the tensors are on {device}: move one")


def place_of(
    tensors: list[Tensor],
    known: Known[PackedList],
    name: str,
    buffer: Tensor | None,
    written: bool,
    found_inf: Tensor | None,
) -> Place:
    """Where all that are given lie; ValueError where two share memory of which one is written.

    name: the buffer's, None where it is to be made. written: whether the tensors are.
    """
    layout = known.value.layout
    addresses = tuple(map(Tensor.data_ptr, tensors))
    if buffer is not None:
        check_apart("tensors", tensors, addresses, layout.largest, name, buffer)
    if written:
        check_disjoint("tensors", tensors, addresses, layout.numels)
    if found_inf is not None:
        check_apart("tensors", tensors, addresses, layout.largest, "found_inf", found_inf)
        if buffer is not None:
            check_no_overlap("found_inf", found_inf, name, buffer)
    return known.found_apart(given_of(tensors, (buffer, found_inf), None), len(tensors))
