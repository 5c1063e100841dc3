"""Calls as torch sees them: run at once in eager mode, in traced code one operator `adasum::*`.

Eager calls bind a launch and run it, and never come to the operators. In traced code the public
functions make the checks that need no addresses while torch traces, and call the operator; overlap,
which needs addresses, is checked when the operator runs. What an operator writes is in its schema,
so that torch copies and orders it rightly.

The operators are not part of the public interface. One whose schema changes takes a new name:
torch's cache of compiled graphs on disk knows an operator by its name alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from kernels.arguments import FUNCTIONS, Call
from kernels.binding import bind
from kernels.findings import SCHEMA, Findings
from kernels.layout import packed_within
from kernels.validation import tracing

_LIBRARY = torch.library.Library("adasum", "DEF")
# Tags that some supported version of torch lacks are left out there. Contiguous inputs must stay
# so. Address tables and scratch outlive a call, which the memory pool of torch's own CUDA graphs
# (mode="reduce-overhead") takes for a leak: the calls run between those graphs.
_TAGS = tuple(
    getattr(torch.Tag, name)
    for name in ("needs_exact_strides", "needs_fixed_stride_order", "cudagraph_unsafe")
    if hasattr(torch.Tag, name)
)


def run(call: Call, *scalars: float) -> Any:
    """Run a call, or have torch record it, and return what it writes."""
    if tracing():
        alignment = 0 if call.packed is None else call.packed.layout.alignment
        operator = getattr(torch.ops.adasum, f"{call.function}_4").default
        # No kernel has a derivative: no result requires grad.
        with torch.no_grad():
            operator(
                call.inputs,
                call.bounds,
                call.dots,
                alignment,
                scalars,
                call.cooperative,
                call.out,
                *call.findings,
            )
    else:
        _run_at_once(call, *scalars)
    return call.inputs if call.function == "unpack" else call.out


def _run_at_once(call: Call, *scalars: float) -> None:
    bind(call)(*scalars)
    # Without it a backward pass that had saved one of them would use the new values in silence.
    # Those made in inference mode have no version, which torch knows.
    increment_version(call.written)


def _run_operator(
    function: str,
    inputs: list[Tensor],
    bounds: Sequence[int],
    dots: Tensor | None,
    alignment: int,
    scalars: Sequence[float],
    cooperative: bool,
    out: Tensor,
    *findings: Tensor | None,
) -> None:
    """What the operator of a function does; `alignment` is 0 where nothing is packed."""
    packed = packed_within(out, inputs, bounds[:-1], alignment) if alignment else None
    call = Call(
        function, inputs, out, tuple(bounds), Findings(*findings), dots, packed, cooperative
    )
    _run_at_once(call, *scalars)


for _name in FUNCTIONS:
    _inputs, _out = ("Tensor(a!)[]", "Tensor") if _name == "unpack" else ("Tensor[]", "Tensor(a!)")
    _LIBRARY.define(
        f"{_name}_4({_inputs} inputs, SymInt[] bounds, Tensor? dots, int alignment, "
        f"float[] scalars, bool cooperative, {_out} out, {SCHEMA}) -> ()",
        tags=_TAGS,
    )
    _LIBRARY.impl(f"{_name}_4", partial(_run_operator, _name), "CompositeExplicitAutograd")
    # On tensors without data there is nothing to do: it only writes into its arguments.
    torch.library.register_fake(f"adasum::{_name}_4", lambda *_: None, lib=_LIBRARY)
