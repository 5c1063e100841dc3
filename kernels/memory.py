"""Check where tensors lie in memory: whether those that are written overlap others."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def byte_range(tensor: Tensor) -> tuple[int, int]:
    """Return the first address of a contiguous tensor, and the first one after it."""
    start = tensor.data_ptr()
    return start, start + tensor.nbytes


def check_no_overlap(name: str, written: Tensor, other_name: str, other: Tensor) -> None:
    """Raise ValueError if any byte of `written` belongs to `other`."""
    (low, high), (start, stop) = byte_range(written), byte_range(other)
    if low < stop and start < high and low < high and start < stop:
        raise ValueError(f"{name} overlaps {other_name} in memory: pass a separate tensor")


def check_disjoint(name: str, tensors: Sequence[Tensor]) -> None:
    """Raise ValueError if two of a list's tensors, all of which are written, share memory."""
    last, owner = 0, 0
    for (start, end), i in sorted((byte_range(one), i) for i, one in enumerate(tensors)):
        if start < end and start < last:
            raise ValueError(
                f"{name}[{min(i, owner)}] and {name}[{max(i, owner)}] overlap in memory: "
                "pass separate ones"
            )
        if start < end:
            last, owner = end, i
