"""Buckets of parameters, and the memory into which a bucket's tensors are packed to be reduced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TypeAlias

import torch
from torch import Tensor

import kernels
from adasum.compression import Compressor, cast_dtype
from adasum.optimizer.record import Record
from adasum.real_pairs import as_reals
from collectives import FusedBuffer

Member: TypeAlias = tuple[Record, Tensor]
# Divides a vector of counts into tensors that are reduced each by itself.
Counts: TypeAlias = Callable[[Tensor], list[Tensor]]
# Makes memory of so many elements, of a dtype, on a device.
Allocate: TypeAlias = Callable[[int, torch.dtype, torch.device], Tensor]

_dtype = attrgetter("dtype")


class Bucket:
    """Parameters that are reduced together.

    Attributes:
        name: What ranks call it, the same on all.
        members: (record, parameter) of each, in the order of their names.
        waiting: How many trainable parameters backward has yet to reach.
        parts: Its memory, by number: more than one if dtypes or devices have come to differ.
    """

    def __init__(self, number: int, members: list[Member]) -> None:
        self.name = f"bucket {number}: {members[0][0].name} to {members[-1][0].name}"
        self.members = members
        self.waiting = 0
        self.parts: dict[int, Part] = {}

    def active(self) -> list[Member]:
        """Return the members that take part in this step: the same list if all do."""
        chosen = [member for member in self.members if member[0].active]
        return self.members if len(chosen) == len(self.members) else chosen


class Part:
    """Flat memory for tensors of one dtype and device.

    Args:
        name: What ranks call the reduction, the same on all.
        members: (record, parameter) of each tensor.
        tensors: Tensors like those that will be packed: contiguous, complex ones as pairs.
        compression: None or one that casts.
        counts: How ranks count, behind the tensors, who has each: divides the vector of counts
            into what is reduced by itself; they do not for None.
        owners: The rank that gets each tensor's result; all ranks for None.
        allocate: Makes the memory.

    Attributes:
        flat: The memory that is reduced in place.
        slots: Each tensor's part of the memory.
        sent: And those of the counts.
        names: What they are called, for errors.
        tensors: What was packed last, to which results go.
        counts: Whether ranks count.
    """

    def __init__(
        self,
        name: str,
        members: list[Member],
        tensors: Sequence[Tensor],
        compression: type[Compressor],
        *,
        counts: Counts | None = None,
        owners: tuple[int, ...] | None = None,
        allocate: Allocate | None = None,
    ) -> None:
        first, size = tensors[0], len(tensors)
        self.members, self.owners, self.counts = members, owners, counts is not None
        self.records = [record for record, _ in members]
        self.name = in_format(name, members)
        self.dtypes, self.shapes = [first.dtype] * size, [each.shape for each in tensors]
        self._is_plain = self.name == name and not any(p.is_complex() for _, p in members)
        self._ones, self._counts, names = list[Tensor](), list[Tensor](), list[str]()
        if counts is not None:
            ones = torch.ones(size, dtype=first.dtype, device=first.device)
            self._ones, self._counts = counts(ones), counts(torch.empty_like(ones))
            names = [f"{len(each)} counts of gradients" for each in self._counts]
        self.names = [*(record.name for record in self.records), *names]
        dtype = cast_dtype(compression, first.dtype) or first.dtype
        self.layout = kernels.layout_of([*tensors, *self._ones], dtype=dtype)
        self.flat = (allocate or _allocate)(self.layout.numel, dtype, first.device)
        # By this the group knows that the tensors lie in one memory.
        self._fused = FusedBuffer(self.layout.views(self.flat), self.flat)
        self.sent = self._fused.tensors
        self.slots = self.sent[:size]
        self.tensors: Sequence[Tensor] = tensors

    @property
    def of_flat(self) -> tuple[int, torch.dtype, torch.device]:
        """Elements, dtype and device of the memory."""
        return self.flat.numel(), self.flat.dtype, self.flat.device

    def fits(self, name: str, members: Sequence[Member], tensors: Sequence[Tensor]) -> bool:
        """Return whether tensors of these members, as they are now, go into this memory."""
        return (
            in_format(name, members) == self.name
            and [record for record, _ in members] == self.records
            and [each.shape for each in tensors] == self.shapes
            and list(map(_dtype, tensors)) == self.dtypes
            and tensors[0].device == self.flat.device
        )

    def pack_plain(self, members: list[Member], tensors: list[Tensor | None], scale: float) -> bool:
        """Pack if the tensors are what the memory was made for, so that results can go to them.

        Returns whether it has.
        """
        if members is not self.members or not self._is_plain or self.owners is not None:
            return False
        try:
            if list(map(_dtype, tensors)) != self.dtypes:
                return False
            self.pack(tensors, scale)  # type: ignore[arg-type]
        except (AttributeError, TypeError, ValueError):
            # One is missing or sparse, or has another shape, or strides.
            return False
        return True

    def pack(
        self, tensors: Sequence[Tensor], scale: float, had: Sequence[bool] | None = None
    ) -> None:
        """Pack the tensors, times `scale`, with a cast if there is compression.

        had: which of them this rank has; the others are zeros. All if not given.
        """
        ones = self._ones
        if had is not None and ones:
            flags = torch.tensor(had, dtype=ones[0].dtype, device="cpu")
            if self.flat.is_cuda:
                flags = flags.pin_memory().to(self.flat.device, non_blocking=True)
            ones = list(flags.split([len(each) for each in ones]))
        kernels.pack([*tensors, *ones], layout=self.layout, out=self.flat, scale=scale)
        self.tensors = tensors

    def unpack(self, scale: float) -> bool:
        """Write the results, times `scale`, to the tensors that were packed.

        Returns False if those cannot be written, as tensors that overlap: then it has written to
        others, which are its `tensors` now.
        """
        try:
            kernels.unpack(
                self.flat, [*self.tensors, *self._counts], layout=self.layout, scale=scale
            )
        except (TypeError, ValueError, RuntimeError):
            self.tensors = [torch.empty_like(each) for each in self.tensors]
            kernels.unpack(
                self.flat, [*self.tensors, *self._counts], layout=self.layout, scale=scale
            )
            return False
        return True

    def unpack_of(self, rank: int, scale: float) -> None:
        """Write the results that a rank owns, times `scale`, to the tensors that were packed."""
        assert self.owners is not None
        mine = [i for i, owner in enumerate(self.owners) if owner == rank]
        if mine:
            targets = [self.tensors[i] for i in mine]
            torch._foreach_copy_(targets, [self.slots[i] for i in mine])
            for target in targets if scale != 1.0 else ():
                target.mul_(scale)

    def any_had(self) -> list[bool]:
        """Return which tensors any rank has; waits for a GPU."""
        return [count > 0 for count in torch.cat(self._counts).tolist()]


def _allocate(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(numel, dtype=dtype, device=device)


def memory_order(parameter: Tensor) -> tuple[int, ...] | None:
    """Return the dimensions in the order of memory; None for a contiguous parameter."""
    if parameter.is_contiguous():
        return None
    stride = parameter.stride()
    return tuple(sorted(range(parameter.dim()), key=lambda i: -stride[i]))


def in_memory_order(tensor: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """Return a view of a tensor's reals with its dimensions in this order."""
    reals = as_reals(tensor)
    if order is None:
        return reals
    return reals.permute(*order, len(order)) if reals is not tensor else reals.permute(order)


def in_format(name: str, members: Sequence[Member]) -> str:
    """Return the name of a reduction whose elements go in the order of the parameters' memory.

    Ranks compare names, and that order has to be the same on all.
    """
    orders = {order for _, p in members if (order := memory_order(p)) is not None}
    return f"{name}, in memory formats {sorted(orders)}" if orders else name
