"""Check a call's arguments in one pass of C, kernels/cpu/reading.h.

If C leaves a call undecided, Python checks it again, and describes errors.
"""

from __future__ import annotations

from torch import Tensor

from kernels.call import Call
from kernels.cpu import dispatch
from kernels.validation import tracing


def read(
    function: str,
    tensors: object,
    out: object,
    dtype: object,
    place: object,
    found_inf: object = None,
    table: object = None,
    kind: object = None,
    accumulate: object = None,
) -> Call | None:
    """Check a function's arguments in C, with memory; return None if Python is to check them.

    Args:
        function: The function's name.
        tensors: A list or tuple.
        out: As in `Call`.
        dtype: The output's dtype, if given.
        place: As in `Call`.
        found_inf: As in `Call`.
        table: As in `Call`.
        kind: As in `Call`.
        accumulate: As in `Call`.
    """
    if tracing() or (library := dispatch.library()) is None or function not in library.reads:
        return None
    others = found_inf, table, kind, accumulate
    found: Call | None = library.reads[function](tensors, out, dtype, 1.0, 1.0, place, *others)
    return found


def read_again(call: Call, inputs: list[Tensor], out: Tensor) -> Call | None:
    """`read` the arguments of `call` with these tensors instead of its own."""
    others = call.found_inf, call.table, call.kind, call.accumulate
    return read(call.function, inputs, out, None, call.place, *others)
