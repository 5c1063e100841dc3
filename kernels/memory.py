"""Check tensors' addresses: whether their storages are long enough, and whether they overlap."""

from __future__ import annotations

import itertools
import operator
from array import array
from collections.abc import Iterable, Sequence

import numpy as np
from torch import Tensor, UntypedStorage

# Up to so many numbers, a loop in Python takes less time than one call of numpy.
FEW = 16
# Addresses above this are those of memory. A tensor without memory has the address 0, and a view of
# it the offset in bytes, which is less than this. A lower address of memory is checked more slowly.
_FAR = 2**40
_nbytes, _itemsize = operator.attrgetter("nbytes"), operator.attrgetter("itemsize")


def reach_in_memory(
    tensors: Sequence[Tensor], addresses: Iterable[int], sizes: Sequence[int] = ()
) -> bool:
    """Whether contiguous tensors have memory at these addresses, up to their last element.

    Runs on every call, and is quick instead of exact: False may be a false alarm, on which
    `check_memory_of` decides. Raises NotImplementedError if torch has no storage for a tensor.
    sizes: The bytes of the first tensors, as far as they are known.
    """
    if len(tensors) <= FEW:
        for tensor, address in zip(tensors, addresses, strict=True):
            start = tensor.storage_offset()
            before = start * tensor.itemsize if start else 0
            if address < _FAR or before + tensor.nbytes > tensor.untyped_storage().nbytes():
                return False
        return True
    if min(addresses) < _FAR:
        return False
    held = map(UntypedStorage.nbytes, map(Tensor.untyped_storage, tensors))
    ends: Iterable[int] = itertools.chain(sizes, map(_nbytes, tensors[len(sizes) :]))
    if any(map(Tensor.storage_offset, tensors)):
        starts = map(operator.mul, map(Tensor.storage_offset, tensors), map(_itemsize, tensors))
        ends = map(operator.add, ends, starts)
    return all(map(operator.ge, held, ends))


def byte_range(tensor: Tensor) -> tuple[int, int]:
    """Return the first address of a contiguous tensor, and the first one after it."""
    start = tensor.data_ptr()
    return start, start + tensor.nbytes


def check_no_overlap(name: str, written: Tensor, other_name: str, other: Tensor) -> None:
    """Raise ValueError if any byte of `written` belongs to `other`."""
    low, start = written.data_ptr(), other.data_ptr()
    high, stop = low + written.nbytes, start + other.nbytes
    if low < stop and start < high and low < high and start < stop:
        raise ValueError(f"{name} overlaps {other_name} in memory: pass a separate tensor")


def check_disjoint(name: str, addresses: array[int], sizes: array[int]) -> None:
    """Raise ValueError if two of a list's tensors, all of which are written, share memory.

    Args:
        name: The list's name in errors.
        addresses: The tensors' addresses, as uint64.
        sizes: Their bytes, as uint64.
    """
    if len(addresses) > FEW:
        starts, ends = _numbers(addresses).copy(), _numbers(addresses) + _numbers(sizes)
        # Disjoint tensors end in the order in which they start, so both can be sorted separately.
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
        addresses: The tensors' addresses, as uint64.
        reach: The most bytes that one of them may have.
        buffer: A contiguous tensor.
    """
    low, high = byte_range(buffer)
    low -= reach
    if len(addresses) <= FEW:
        return [i for i, start in enumerate(addresses) if low < start < high]
    starts = _numbers(addresses)
    found: list[int] = ((starts < high) & (starts > max(low, 0))).nonzero()[0].tolist()
    return found
