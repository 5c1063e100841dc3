"""Check a call's arguments in one pass of C, kernels/cpu/reading.h, and run it there on a CPU.

If C leaves a call undecided, Python checks it again, and describes errors.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.call import NO_FINDINGS, UNREAD, Call
from kernels.cpu import dispatch
from kernels.findings import Findings
from kernels.gpu import launcher
from kernels.layout import Layout
from kernels.validation import tracing


class Checked(NamedTuple):
    """Arguments that were checked.

    Attributes:
        inputs: The tensors of the list or pair.
        out: The output, which was made if none was given.
        addresses: The inputs' addresses as uint64 if memory was checked, too; otherwise empty.
        dtypes: The inputs' dtypes; empty if Python has checked the arguments.
        bounds: The boundaries of segments as a tuple; None if not given.
    """

    inputs: list[Tensor]
    out: Tensor
    addresses: array[int] = UNREAD
    dtypes: Sequence[torch.dtype] = ()
    bounds: tuple[int, ...] | None = None


def read(
    function: str,
    tensors: object,
    out: object,
    dtype: object,
    place: object,
    findings: Findings = NO_FINDINGS,
    table: object = None,
    kind: object = None,
    accumulate: object = None,
) -> Checked | None:
    """Check a function's arguments in C; return None if Python is to check them.

    Args:
        function: The function's name.
        tensors: A list or tuple.
        out: As in `Call`.
        dtype: The output's dtype, if given.
        place: A sound layout or the boundaries of segments.
        findings: As in `Call`.
        table: As in `Call`.
        kind: The order for `sum_n`; whether the matrices are precise for `gram`.
        accumulate: As in `Call`.
    """
    if tracing() or (library := dispatch.library()) is None or function not in library.reads:
        return None
    where = place.in_one.buffer_info()[0] if isinstance(place, Layout) else place
    found = library.reads[function](
        tensors, out, dtype, 1.0, 1.0, where, *findings, table, kind, accumulate
    )
    if found is None:
        return None
    inputs, target, addresses, dtypes, bounds = found
    return Checked(inputs, target, array("Q", addresses), dtypes, bounds)


def read_again(call: Call, inputs: list[Tensor], out: Tensor) -> Checked | None:
    """`read` the arguments of `call` with these tensors instead of its own."""
    others = call.findings, call.table, call.kind, call.accumulate
    return read(call.function, inputs, out, None, call.place, *others)


def in_c(function: str) -> Callable[..., Any]:
    """Return a C function of kernels/cpu/calls.h that checks and runs calls on CPU tensors.

    It returns the call's output, or None if nothing was written and Python is to check the call.
    """
    if tracing() or launcher.emulated or (library := dispatch.library()) is None:
        return _undecided
    return library.calls.get(function, _undecided)


def _undecided(*_: object) -> None:
    """Stand for the C function if C must not run."""
