"""Check a call's arguments in one pass of C, kernels/cpu/reading.h, and run it there on a CPU.

Whatever C leaves undecided is checked in Python, which finds the words for what is wrong.
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
        addresses: Those of the inputs, as uint64, once memory was checked, too; else none.
        dtypes: Of the inputs; none if these are equal or Python has checked.
        bounds: The boundaries of segments as a tuple; None where none were given.
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
    """Check a function's arguments in C; None where Python is to check them.

    Args:
        function: Its name.
        tensors: A list or tuple.
        out: What it writes; of `unpack` what it reads.
        dtype: That of `out`, if it is given.
        place: A sound layout or the boundaries of segments.
        findings: As in `Call`.
        table: As in `Call`.
        kind: Of `sum_n` the order; of `gram` whether it is precise.
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
    """`read` the arguments of a call with these tensors in the place of its own."""
    others = call.findings, call.table, call.kind, call.accumulate
    return read(call.function, inputs, out, None, call.place, *others)


def in_c(function: str) -> Callable[..., Any]:
    """Return what checks and runs a call on CPU tensors in C, as kernels/cpu/calls.h says.

    It returns what it writes, or None: then nothing is written, and Python is to check the call.
    """
    if tracing() or launcher.emulated or (library := dispatch.library()) is None:
        return _undecided
    return library.calls.get(function, _undecided)


def _undecided(*_: object) -> None:
    """In the place of C's function, where C is not to run."""
