"""Buckets of parameters, and the memory that their tensors are packed into and reduced in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor

import kernels
from adasum.compression import Compressor, cast_dtype
from adasum.optimizer.errors import changed_under_way
from adasum.optimizer.record import Record
from adasum.real_pairs import as_reals
from collectives import FusedBuffer

Member: TypeAlias = tuple[Record, Tensor]
# Divides a vector of counts into tensors that are reduced one by one.
Counts: TypeAlias = Callable[[Tensor], list[Tensor]]
# Makes memory, given the number of elements, dtype and device.
Allocate: TypeAlias = Callable[[int, torch.dtype, torch.device], Tensor]

_dtype = attrgetter("dtype")
# `kernels.layout_of` aligns tensors on a GPU to this number of bytes.
_SLOT = 256


class Bucket:
    """Parameters that are reduced together.

    Attributes:
        name: Its name, the same on all ranks.
        members: (record, parameter) of each parameter, in the order of the plan.
        waiting: The number of trainable parameters that backward has yet to reach.
        parts: Its memory, by number: several if dtypes or devices have become different.
        place: Memory for the first part, if it fits: bytes at the same place on all ranks.
    """

    def __init__(self, number: int, members: list[Member]) -> None:
        self.name = f"bucket {number}: {members[0][0].name} to {members[-1][0].name}"
        self.members = members
        self.waiting = 0
        self.parts: dict[int, Part] = {}
        self.place: Tensor | None = None

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Make the memory of the first part."""
        place, nbytes = self.place, numel * dtype.itemsize
        if place is not None and place.device == device and nbytes <= place.nbytes:
            return place[:nbytes].view(dtype)
        return _allocate(numel, dtype, device)

    def active(self) -> list[Member]:
        """Return the members that take part in this step: the same list if all do."""
        chosen = [member for member in self.members if member[0].active]
        return self.members if len(chosen) == len(self.members) else chosen

    def part_name(self, number: int) -> str:
        """Return the name of a part's reduction."""
        return f"{self.name}, {number}" if number else self.name


class Part:
    """Flat memory for tensors of one dtype and device.

    Args:
        name: The name of the reduction, the same on all ranks.
        members: (record, parameter) of each tensor.
        tensors: Tensors like the ones to pack: contiguous, complex ones as pairs.
        compression: The none compression, or one that casts.
        counts: If given, the ranks that have each tensor are counted, behind the tensors; divides
            the vector of counts into tensors that are reduced one by one.
        owners: The rank that gets each tensor's result; all ranks for None.
        allocate: Makes the memory.

    Attributes:
        flat: The memory that is reduced in place.
        slots: Each tensor's part of the memory.
        sent: The slots, and then the parts for the counts.
        names: The names of the tensors in `sent`, for errors.
        tensors: The tensors that were packed last, which receive the results.
        counts: Whether ranks are counted.
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
        # Tells the group that the tensors lie in one memory.
        self._fused = FusedBuffer(self.layout.views(self.flat), self.flat)
        self.sent = self._fused.tensors
        self.slots = self.sent[:size]
        self.tensors: Sequence[Tensor] = tensors

    def fits(
        self,
        name: str,
        members: Sequence[Member],
        tensors: Sequence[Tensor],
        owners: tuple[int, ...] | None = None,
    ) -> bool:
        """Return whether these members' present tensors fit this memory."""
        return (
            owners == self.owners
            and in_format(name, members) == self.name
            and [record for record, _ in members] == self.records
            and [each.shape for each in tensors] == self.shapes
            and list(map(_dtype, tensors)) == self.dtypes
            and tensors[0].device == self.flat.device
        )

    def pack_plain(self, members: list[Member], tensors: list[Tensor | None], scale: float) -> bool:
        """Pack tensors that need no conversion and can receive the results.

        Returns False, and packs nothing, if there is any other.
        """
        if members is not self.members or not self._is_plain or self.owners is not None:
            return False
        try:
            given: Any = tensors
            if list(map(_dtype, given)) != self.dtypes or any(map(Tensor.is_inference, given)):
                return False
            self.pack(given, scale)
        except (AttributeError, TypeError, ValueError):
            # A tensor is missing or sparse, or has another shape or strides.
            return False
        return True

    def pack(
        self, tensors: Sequence[Tensor], scale: float, had: Sequence[bool] | None = None
    ) -> None:
        """Pack the tensors, times `scale`, with a cast if there is compression.

        had: which tensors this rank has (by default all); the others are zeros.
        """
        ones = self._ones
        if had is not None and ones:
            flags = torch.tensor(had, dtype=ones[0].dtype, device="cpu")
            if self.flat.is_cuda:
                flags = flags.pin_memory().to(self.flat.device, non_blocking=True)
            ones = list(flags.split([len(each) for each in ones]))
        kernels.pack([*tensors, *ones], layout=self.layout, out=self.flat, scale=scale)
        self.tensors = tensors

    def unpack(self, scale: float, rank: int = 0) -> None:
        """Write the results, times `scale`, to the tensors that were packed.

        With owners, only the results that `rank` owns.
        """
        if self.owners is None:
            targets = [*self.tensors, *self._counts]
            kernels.unpack(self.flat, targets, layout=self.layout, scale=scale)
            return
        mine = [i for i, owner in enumerate(self.owners) if owner == rank]
        if mine:
            targets = [self.tensors[i] for i in mine]
            torch._foreach_copy_(targets, [self.slots[i] for i in mine])
            for target in targets if scale != 1.0 else ():
                target.mul_(scale)

    def any_had(self) -> list[bool]:
        """Return, for each tensor, whether any rank has it; waits for a GPU."""
        return [count > 0 for count in torch.cat(self._counts).tolist()]


def _allocate(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(numel, dtype=dtype, device=device)


def place_buckets(
    buckets: Sequence[Bucket], memory: Tensor | None, make: Callable[[int, Tensor], Tensor | None]
) -> Tensor | None:
    """Give buckets places in memory that the ranks' GPUs share, if possible; return the memory.

    Places depend only on the parameters, not on earlier packing. `memory` is the memory of earlier
    buckets. If it is too small, `make` is called, collectively, with the number of bytes and a
    tensor whose device to use; it returns None if GPUs cannot share memory.
    """
    first = buckets[0].members[0][1]
    here = [bucket for bucket in buckets if bucket.members[0][1].device == first.device]
    # Slots for each tensor and its count, and one more slot for all counts together.
    sizes = [
        sum(-(-p.nbytes // _SLOT) * _SLOT + _SLOT for _, p in bucket.members) + _SLOT
        for bucket in here
    ]
    if memory is None or memory.nbytes < sum(sizes):
        memory = make(sum(sizes), first)
    if memory is not None:
        for bucket, place in zip(here, memory[: sum(sizes)].split(sizes), strict=True):
            bucket.place = place
            bucket.parts.clear()
    return memory


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
    """Return the name of a reduction with the parameters' memory formats, unless contiguous.

    Elements are sent in memory order, which must be the same on all ranks, and ranks compare names.
    """
    orders = {order for _, p in members if (order := memory_order(p)) is not None}
    return f"{name}, in memory formats {sorted(orders)}" if orders else name


def versions_of(gradients: Sequence[Tensor | None]) -> list[int | None]:
    """Return torch's count of each gradient's changes; None if there is no useful count.

    Views count changes of all tensors in their memory, and inference tensors count no changes.
    """
    return [
        None if each is None or each.is_inference() or each._is_view() else each._version
        for each in gradients
    ]


def refuse_changed(
    members: Sequence[Member], gradients: Sequence[Tensor | None], versions: Sequence[int | None]
) -> None:
    """Raise OptimizerOrderError if a gradient was replaced or changed after it was packed."""
    for (record, parameter), gradient, version in zip(members, gradients, versions, strict=True):
        now = parameter.grad
        if now is gradient and (now is None or version is None or now._version == version):
            continue
        raise changed_under_way(record.name)


def tensors_to_pack(
    members: Sequence[Member], *, copies: bool
) -> tuple[list[Tensor], dict[int, Tensor]]:
    """Return the tensor to pack for each gradient, and copies to install as `p.grad`, by index.

    A copy, or zeros, is packed in place of a gradient that is missing, has strides that differ from
    its parameter's, or cannot be written to; with `copies`, in place of every gradient. Raises
    ValueError if a gradient's shape differs from its parameter's.
    """
    tensors: list[Tensor] = []
    apart: dict[int, Tensor] = {}
    for i, (record, parameter) in enumerate(members):
        gradient, order, tensor = parameter.grad, memory_order(parameter), None
        if gradient is not None and gradient.shape != parameter.shape:
            raise ValueError(
                f"the gradient of {record.name} has shape {tuple(gradient.shape)} and the "
                f"parameter {tuple(parameter.shape)}: after a change of a parameter's shape, set "
                "its grad to None, and update its state in the optimizer"
            )
        if gradient is not None and not copies and _is_writable(gradient):
            tensor = in_memory_order(gradient.detach(), order)
        if tensor is None or not tensor.is_contiguous():
            apart[i] = torch.zeros_like(parameter, dtype=dtype_of_gradient(parameter))
            if gradient is not None:
                apart[i].copy_(gradient)
            tensor = in_memory_order(apart[i], order)
        tensors.append(tensor)
    return tensors, apart


def dtype_of_gradient(parameter: Tensor) -> torch.dtype:
    """Return the dtype of the parameter's present or future gradient."""
    if parameter.grad is not None:
        return parameter.grad.dtype
    dtype: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return dtype or parameter.dtype


def copy_to_gradient(parameter: Tensor, result: Tensor) -> None:
    """Write a result to the parameter's gradient, or replace a gradient that cannot be written."""
    gradient = parameter.grad
    if gradient is None or gradient.is_inference() or 0 in gradient.stride():
        parameter.grad = result
    else:
        gradient.copy_(result)


def _is_writable(gradient: Tensor) -> bool:
    """Return whether a result can be written to the gradient's memory as it is."""
    odd = gradient.is_conj() or gradient.is_neg() or gradient.is_inference()
    return not odd and 0 not in gradient.stride()
