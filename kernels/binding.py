"""Bind calls to memory: read addresses, refuse overlap, and prepare the launch or C function."""

from __future__ import annotations

import functools
import itertools
import operator
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version

from kernels.arguments import read_again
from kernels.call import SCALARS, UNREAD, Call
from kernels.cpu import dispatch
from kernels.gpu import (
    copy_kernel,
    double_double_kernels,
    gram_kernels,
    launcher,
    projection_kernels,
    sum_kernels,
)
from kernels.validation import check_memory_of, tracing

Run = Callable[..., None]
_ON_TRITON: dict[str, Callable[[Call], Run]] = {
    "pack": copy_kernel.copies,
    "unpack": copy_kernel.copies,
    "sum_n": sum_kernels.sum_n,
    "weighted_sum": sum_kernels.weighted_sum,
    "gram": gram_kernels.gram,
    "scaled_add": sum_kernels.scaled_add,
    "dot_and_norms": projection_kernels.dot_and_norms,
    "combine": projection_kernels.combine,
    "adasum": projection_kernels.adasum,
    "adasum_coefficients": double_double_kernels.adasum_coefficients,
}


def bind(call: Call) -> Run:
    """Bind a call to the memory of its tensors.

    Args:
        call: The checked call. If it has no addresses yet, memory is checked, too.

    Returns:
        A function of the call's scalars that runs it, any number of times.

    Raises:
        TypeError: A tensor cannot be read by its address.
        ValueError: A tensor that is written shares memory with another one.
    """
    if call.addresses is UNREAD:
        locate(call)
    return _bound(call)


def run_direct(function: str, given: tuple[Any, ...]) -> Any:
    """Check a call in one pass of C and run it; return its result.

    Args:
        function: The function's name.
        given: The arguments of kernels/cpu/reading.h, in that order.

    Returns:
        The tensors of `Call.result`; None if nothing was written and Python is to check the call.
    """
    if tracing() or (library := dispatch.library()) is None:
        return None
    take = (library.reads if launcher.emulated else library.calls).get(function)
    found = None if take is None else take(*given)
    if isinstance(found, Call):
        return run_at_once(found, *given[3 : 3 + SCALARS.get(function, 0)])
    return found


def run_at_once(call: Call, *scalars: float | Tensor) -> Any:
    """Run the call once and return its result; `locate` must have been called on it."""
    _bound(call)(*scalars)
    # Autograd does not see these writes. Without a new version, a backward pass that has saved one
    # of these tensors would silently use the new values. torch ignores inference tensors here.
    increment_version(call.written)
    return call.result


def locate(call: Call) -> None:
    """Read the addresses of a call's tensors, and check that they can be used.

    Raises:
        TypeError: A tensor has no memory of its own, or reaches beyond its storage.
        ValueError: A tensor that is written shares memory with another one.
    """
    if (found := read_again(call, call.inputs, call.out)) is not None:
        call.addresses, call.aligned = found.addresses, found.aligned
        return
    others, inputs = call.others(), call.inputs
    named = ((call.name(i), tensor) for i, tensor in enumerate(inputs))
    for name, tensor in itertools.chain(named, others):
        check_memory_of(name, tensor)
    _check_overlap(call, others)
    call.addresses = array("Q", map(Tensor.data_ptr, inputs))
    call.aligned = functools.reduce(operator.or_, call.addresses, call.out.data_ptr()) % 16 == 0


def _bound(call: Call) -> Run:
    if not launcher.on_triton(call.out):
        return dispatch.bind(call)
    with launcher.on_device_of(call.out):
        return _ON_TRITON[call.function](call)


def _check_overlap(call: Call, others: list[tuple[str, Tensor]]) -> None:
    """Raise ValueError for overlap, except that an elementwise output may equal an input."""
    for (name, tensor), (other_name, other) in itertools.combinations(others, 2):
        _check_no_overlap(name, tensor, other_name, other)
    for name, tensor in others:
        if tensor is not call.table:
            in_place = tensor is call.out and call.in_place
            for i, one in enumerate(call.inputs):
                if not (in_place and _byte_range(one) == _byte_range(tensor)):
                    _check_no_overlap(name, tensor, call.name(i), one)
    if call.function == "unpack":
        check_disjoint("tensors", call.inputs)


def _byte_range(tensor: Tensor) -> tuple[int, int]:
    """Return the first address of a tensor that fills its memory, and the first one after it."""
    start = tensor.data_ptr()
    return start, start + tensor.nbytes


def _check_no_overlap(name: str, written: Tensor, other_name: str, other: Tensor) -> None:
    """Raise ValueError if any byte of `written` belongs to `other`."""
    (low, high), (start, stop) = _byte_range(written), _byte_range(other)
    if low < stop and start < high and low < high and start < stop:
        raise ValueError(f"{name} overlaps {other_name} in memory: pass a separate tensor")


def check_disjoint(name: str, tensors: Sequence[Tensor]) -> None:
    """Raise ValueError if two tensors of a list share memory; all of them are written."""
    last, owner = 0, 0
    for (start, end), i in sorted((_byte_range(one), i) for i, one in enumerate(tensors)):
        if start < end and start < last:
            raise ValueError(
                f"{name}[{min(i, owner)}] and {name}[{max(i, owner)}] overlap in memory: "
                "pass separate ones"
            )
        if start < end:
            last, owner = end, i
