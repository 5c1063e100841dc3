"""Where tensors lie: whether their storages reach to their ends, and whether they overlap."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence

import numpy as np
from torch import Tensor, UntypedStorage

# So many numbers Python compares one by one in less time than numpy takes to start.
_FEW = 16
# Where memory begins: more bytes than any tensor has. Most addresses are higher; without memory a
# tensor's address is where it starts, 0, or of a view more.
_FAR = 2**40
_nbytes, _itemsize = operator.attrgetter("nbytes"), operator.attrgetter("itemsize")


def reach_in_memory(tensors: Sequence[Tensor], addresses: Sequence[int]) -> bool:
    """Whether contiguous tensors are found at these addresses, to their last element.

    No word on what is wrong where not, nor is that sure: `check_memory_of` tells. It runs on every
    call. Raises NotImplementedError where torch has no storage.
    """
    if len(tensors) <= _FEW:
        for tensor, address in zip(tensors, addresses, strict=True):
            start = tensor.storage_offset()
            before = start * tensor.itemsize if start else 0
            if address < _FAR or before + tensor.nbytes > tensor.untyped_storage().nbytes():
                return False
        return True
    if min(addresses) < _FAR:
        return False
    held = list(map(UntypedStorage.nbytes, map(Tensor.untyped_storage, tensors)))
    ends = list(map(_nbytes, tensors))
    if any(map(Tensor.storage_offset, tensors)):
        starts = map(operator.mul, map(Tensor.storage_offset, tensors), map(_itemsize, tensors))
        ends = list(map(operator.add, ends, starts))
    # Most often each has a storage of its own size.
    return held == ends or all(map(operator.ge, held, ends))


def byte_range(tensor: Tensor) -> tuple[int, int]:
    """First address and the one past the last of a contiguous tensor."""
    start = tensor.data_ptr()
    return start, start + tensor.nbytes


def check_no_overlap(name: str, written: Tensor, other_name: str, other: Tensor) -> None:
    """Raise ValueError if any byte of `written` belongs to `other`."""
    low, start = written.data_ptr(), other.data_ptr()
    high, stop = low + written.nbytes, start + other.nbytes
    if low < stop and start < high and low < high and start < stop:
        raise ValueError(f"{name} overlaps {other_name} in memory: pass a separate tensor")


def check_disjoint(name: str, addresses: array[int], sizes: array[int]) -> None:
    """Raise ValueError if two of the tensors of a list, all about to be written, share memory.

    Args:
        name: Of the list.
        addresses: Where the tensors lie, as uint64.
        sizes: Their bytes, as uint64.
    """
    if len(addresses) > _FEW:
        starts, ends = _numbers(addresses).copy(), _numbers(addresses) + _numbers(sizes)
        # Apart, the tensors end in the order in which they start.
        starts.sort()
        ends.sort()
        if (ends[:-1] <= starts[1:]).all():
            return
    last, owner = 0, 0
    for start, size, i in sorted(zip(addresses, sizes, range(len(sizes)), strict=True)):
        if size and start < last:
            raise ValueError(
                f"{name}[{min(i, owner)}] and {name}[{max(i, owner)}] overlap in memory: "
                "pass separate ones"
            )
        if size:
            last, owner = start + size, i


def _numbers(values: array[int]) -> np.ndarray:
    return np.frombuffer(values, dtype=np.uint64)


def near(addresses: array[int], reach: int, buffer: Tensor) -> list[int]:
    """Return which of a list's tensors may overlap `buffer`, by their addresses.

    Args:
        addresses: Where the tensors lie, as uint64.
        reach: More bytes than none of them has.
        buffer: Contiguous.
    """
    low, high = byte_range(buffer)
    low -= reach
    if len(addresses) <= _FEW:
        return [i for i, start in enumerate(addresses) if low < start < high]
    starts = _numbers(addresses)
    found: list[int] = ((starts < high) & (starts > max(low, 0))).nonzero()[0].tolist()
    return found
