"""Combine tensors for fewer messages: pack small ones, and group a model's gradients.

Ranges, packing and device groups come from the all-reduce in TensorFlow's benchmarks; groups
limited by memory and by number come from Paddle's fused all-reduce.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TypeVar

import torch

from collectives import validation
from collectives.reducers import kernels

Tensor = torch.Tensor
T = TypeVar("T")
_MIB = 2**20


@dataclass(frozen=True)
class Packing:
    """The record of `pack_small_tensors` that `unpack_small_tensors` needs to undo it.

    Attributes:
        ranges: First and last index of each packed buffer, in the order of the buffers.
        shapes: The shape of each tensor of the list.

    Examples:
        >>> _, packing = collectives.pack_small_tensors([torch.ones(4), torch.ones(2, 2)], 16, 2)
        >>> packing.ranges
        ((0, 1),)
    """

    ranges: tuple[tuple[int, int], ...]
    shapes: tuple[torch.Size, ...]

    @property
    def sound(self) -> bool:
        """Whether the ranges are ascending, disjoint and inside the list."""
        ends = [-1, *(end for pair in self.ranges for end in pair), len(self.shapes)]
        return all(a < b for a, b in pairwise(ends))


def extract_ranges(
    indices: Sequence[int], range_size_limit: int = 32
) -> tuple[list[list[int]], list[int]]:
    """Split indices into runs of consecutive indices and single ones.

    Args:
        indices: Ascending.
        range_size_limit: The most indices in a run; longer runs are split.

    Returns:
        [first, last] of each run, and the single indices.

    Raises:
        TypeError: The indices are not ints.
        ValueError: The indices do not ascend, or the limit is below 1.

    Examples:
        >>> collectives.extract_ranges([1, 3, 4, 6, 7, 8, 9])
        ([[3, 4], [6, 9]], [1])
    """
    validation.integer("range_size_limit", range_size_limit, 1)
    try:
        checked = [*map(operator.index, indices)]
    except TypeError as error:
        raise TypeError(f"indices must be a list of ints: {error}") from None
    ranges: list[list[int]] = []
    for index in checked:
        if ranges and index <= ranges[-1][1]:
            raise ValueError(f"indices must ascend, got {index} after {ranges[-1][1]}")
        fits = ranges and index - ranges[-1][0] < range_size_limit
        if fits and index == ranges[-1][1] + 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    return [each for each in ranges if each[0] < each[1]], [a for a, b in ranges if a == b]


def split_by_size(tensors: Sequence[Tensor], threshold: int) -> tuple[list[Tensor], list[Tensor]]:
    """Split tensors by size, keeping their order.

    Returns:
        The tensors with up to `threshold` elements, and the others.

    Examples:
        >>> small, large = collectives.split_by_size([torch.ones(2), torch.ones(9)], threshold=4)
        >>> len(small), large[0].numel()
        (1, 9)
    """
    tensors = validation.tensors("tensors", tensors)
    validation.integer("threshold", threshold)
    small = [tensor for tensor in tensors if tensor.numel() <= threshold]
    return small, [tensor for tensor in tensors if tensor.numel() > threshold]


def group_devices(devices: Sequence[T], group_size: int) -> list[list[T]]:
    """Distribute n devices over ceil(n / group_size) groups of `group_size` devices.

    The list of devices is repeated until all groups are full; entry i goes to group i modulo the
    number of groups. So some devices may be in two groups.

    Raises:
        ValueError: `group_size` is below 1 or above the number of devices.

    Examples:
        >>> collectives.group_devices([0, 1, 2, 3, 4], 2)
        [[0, 3], [1, 4], [2, 0]]
    """
    validation.instance("devices", devices, Sequence, "a list or tuple")
    validation.integer("group_size", group_size)
    count = len(devices)
    if not 1 <= group_size <= count:
        raise ValueError(
            f"group_size must be from 1 to the number of devices, got {group_size} of {count}"
        )
    number = -(-count // group_size)
    return [
        [devices[i % count] for i in range(group, number * group_size, number)]
        for group in range(number)
    ]


def pack_small_tensors(
    tensors: Sequence[Tensor], max_bytes: int = 0, max_group: int = 0
) -> tuple[list[Tensor], Packing | None]:
    """Pack adjacent small tensors of one dtype and device into 1-D buffers without gaps.

    Small tensors are only packed if they are next to another one of their dtype and device.

    Args:
        tensors: Dense tensors, contiguous or not.
        max_bytes: The largest size of a small tensor; 0 packs nothing.
        max_group: The most tensors in a buffer; 0 for any number.

    Returns:
        The packed buffers followed by all other tensors, and the Packing to undo it (None if
        nothing was packed).

    Raises:
        ValueError: A limit is negative.

    Examples:
        >>> tensors = [torch.ones(4), torch.ones(4), torch.ones(3, 3)]
        >>> packed, packing = collectives.pack_small_tensors(tensors, max_bytes=16, max_group=2)
        >>> [tuple(each.shape) for each in packed]
        [(8,), (3, 3)]
    """
    tensors = validation.tensors("tensors", tensors, dense=True)
    validation.integer("max_bytes", max_bytes, 0)
    validation.integer("max_group", max_group, 0)
    small = [i for i, tensor in enumerate(tensors) if max_bytes and _nbytes(tensor) <= max_bytes]
    ranges = [
        (first, last)
        for _, indices in groupby(small, lambda i: _kind(tensors[i]))
        for first, last in extract_ranges(list(indices), max_group or len(tensors))[0]
    ]
    if not ranges:
        return list(tensors), None
    packed = {i for first, last in ranges for i in range(first, last + 1)}
    buffers = [_joined(tensors[first : last + 1]) for first, last in ranges]
    others = [tensor for i, tensor in enumerate(tensors) if i not in packed]
    shapes = tuple(tensor.shape for tensor in tensors)
    return buffers + others, Packing(tuple(ranges), shapes)


def unpack_small_tensors(tensors: Sequence[Tensor], packing: Packing | None) -> list[Tensor]:
    """Undo `pack_small_tensors`.

    Args:
        tensors: The list from `pack_small_tensors`, with the same or other values.
        packing: Its Packing; if None, the list is returned.

    Returns:
        The tensors in their original order and shapes; packed ones are views of their buffers.

    Raises:
        ValueError: `tensors` does not fit `packing`.

    Examples:
        >>> tensors = [torch.ones(4), torch.ones(2, 2)]
        >>> packed, packing = collectives.pack_small_tensors(tensors, max_bytes=16, max_group=2)
        >>> [tuple(each.shape) for each in collectives.unpack_small_tensors(packed, packing)]
        [(4,), (2, 2)]
    """
    tensors = validation.tensors("tensors", tensors)
    if packing is None:
        return tensors
    validation.instance("packing", packing, Packing, "a Packing or None")
    if not packing.sound:
        raise ValueError("packing's fields contradict each other: take pack_small_tensors' own")
    count = len(packing.ranges)
    inside = sum(last - first + 1 for first, last in packing.ranges)
    if len(tensors) != count + len(packing.shapes) - inside:
        raise ValueError(
            f"tensors: expected {count} packed and {len(packing.shapes) - inside} other tensors, "
            f"got {len(tensors)}"
        )
    restored: dict[int, Tensor] = {}
    for buffer, (first, last) in zip(tensors, packing.ranges, strict=False):
        shapes = packing.shapes[first : last + 1]
        sizes = [shape.numel() for shape in shapes]
        if buffer.shape != (sum(sizes),):
            raise ValueError(
                f"tensors: expected a packed tensor of shape {(sum(sizes),)}, got "
                f"{tuple(buffer.shape)}"
            )
        for i, (part, shape) in enumerate(zip(buffer.split(sizes), shapes, strict=True)):
            restored[first + i] = part.view(shape)
    rest = iter(tensors[count:])
    return [restored[i] if i in restored else next(rest) for i in range(len(packing.shapes))]


def plan_groups(
    tensors: Sequence[Tensor], *, memory_size: float | None = None, groups_size: int | None = None
) -> list[list[int]]:
    """Group tensors to reduce together: each group has one dtype and one device.

    Args:
        tensors: In the order of backward.
        memory_size: The most MiB in a group; larger tensors get their own group. None for any size.
        groups_size: The most tensors in a group; None for any number.

    Returns:
        For each group the indices of its tensors. Groups are in the order of their last tensors,
        since backward completes them in this order.

    Raises:
        ValueError: A limit is not positive.

    Examples:
        >>> collectives.plan_groups([torch.ones(4), torch.ones(2), torch.ones(3)], groups_size=2)
        [[0, 1], [2]]
    """
    tensors = validation.tensors("tensors", tensors)
    if groups_size is not None:
        validation.integer("groups_size", groups_size, 1)
    if memory_size is not None:
        validation.instance("memory_size", memory_size, int | float, "a number")
        if not memory_size > 0:
            raise ValueError(f"memory_size must be a positive number of MiB, got {memory_size}")
    groups: list[list[int]] = []
    # By dtype and device, the group to fill, and its bytes.
    open_groups: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for i, tensor in enumerate(tensors):
        nbytes = _nbytes(tensor)
        group, held = open_groups.get(_kind(tensor), ([], 0))
        full = memory_size is not None and held + nbytes > memory_size * _MIB
        if not group or full or len(group) == groups_size:
            group, held = [], 0
            groups.append(group)
        group.append(i)
        open_groups[_kind(tensor)] = group, held + nbytes
    return sorted(groups, key=lambda group: group[-1])


def _kind(tensor: Tensor) -> tuple[torch.dtype, torch.device]:
    return tensor.dtype, tensor.device


def _nbytes(tensor: Tensor) -> int:
    """Return the bytes of all elements, for a sparse tensor as if it were dense."""
    return tensor.numel() * tensor.element_size()


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    # Our kernel packs all tensors in one launch, but only supports some dtypes.
    if tensors[0].dtype not in kernels.DTYPES:
        return torch.cat([tensor.reshape(-1) for tensor in tensors])
    dense = [tensor.contiguous() for tensor in tensors]
    layout = kernels.layout_of(dense, alignment=dense[0].element_size())
    return kernels.pack(dense, layout=layout)
