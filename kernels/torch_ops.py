"""How torch sees calls: run at once in eager mode, and as one operator `adasum::*` in traced code.

Eager calls bind a launch and run it; they do not use the operators. In traced code the public
functions check what needs no addresses, while torch traces, and call the operator; overlap, for
which addresses are needed, is checked when the operator runs. An operator's schema says what it
writes, so that torch orders it correctly, and copies tensors where it has to.

The operators are not part of the public interface. If the schema of one changes it gets a new name:
torch's cache of compiled graphs on disk knows operators only by their names.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels import derivatives
from kernels.binding import locate, run_at_once
from kernels.call import FUNCTIONS, LINEAR, UNREAD, Call
from kernels.derivatives import tags
from kernels.findings import SCHEMA, Findings
from kernels.gradients import is_followed, refuse_followed
from kernels.layout import packed_within
from kernels.validation import NoMemory, tracing

_LIBRARY = torch.library.Library("adasum", "FRAGMENT")
# So that torch.compile does not change the strides of contiguous inputs; see also `tags`.
_TAGS = tags("needs_exact_strides", "needs_fixed_stride_order", "cudagraph_unsafe")


def run(call: Call, *scalars: float) -> Any:
    """Run a call, or have torch record it, and return what it writes.

    Raises:
        TypeError: A tensor cannot be read by its address.
        ValueError: A tensor shares memory with one that is written, or requires a gradient and the
            function has none.
    """
    if call.addresses is not UNREAD:
        # All is checked, and no derivative is asked for.
        run_at_once(call, *scalars)
        return call.inputs if call.function == "unpack" else call.out
    # An empty list has no derivative.
    linear = call.function in LINEAR and len(call.inputs) > 0
    followed = is_followed(call)
    if tracing():
        if not followed and not (linear and call.made and not call.findings.given()):
            return _traced(call, *scalars)
        return derivatives.run(call, *scalars)
    try:
        locate(call)
    except NoMemory:
        if not linear or not (call.made or call.function == "unpack"):
            raise
        followed = True
    if followed and linear:
        return derivatives.run(call, *scalars)
    run_at_once(call, *scalars)
    return call.inputs if call.function == "unpack" else call.out


def _traced(call: Call, *scalars: float) -> Any:
    alignment = 0 if call.packed is None else call.packed.layout.alignment
    # Not the ends, which follow from the inputs: Inductor cannot pass on a length it does not know.
    bounds = call.bounds if alignment else call.bounds[1:-1]
    operator = getattr(torch.ops.adasum, f"{call.function}_7").default
    # Nothing that it takes requires a gradient which is asked for: see `is_followed`.
    operator(
        call.inputs,
        bounds,
        call.dots,
        alignment,
        scalars,
        call.cooperative,
        call.out,
        *call.findings,
        call.coefficients,
        call.spread,
        # As floats: an operator takes no rows.
        [float(number) for row in call.tree for number in row],
        call.order,
        call.accumulate,
    )
    return call.inputs if call.function == "unpack" else call.out


def _run_operator(
    function: str,
    inputs: list[Tensor],
    bounds: Sequence[int],
    dots: Tensor | None,
    alignment: int,
    scalars: Sequence[float],
    cooperative: bool,
    out: Tensor,
    found_inf: Tensor | None,
    max_abs: Tensor | None,
    coefficients: Tensor | None = None,
    spread: Tensor | None = None,
    tree: Sequence[float] = (),
    order: str = "list",
    accumulate: torch.dtype | None = None,
) -> None:
    """What the operator of a function does.

    `alignment` is 0 where nothing is packed; then `bounds` are those between segments.
    """
    bounds = bounds if alignment else (0, *bounds, inputs[0].numel())
    packed = packed_within(out, inputs, bounds[:-1], alignment) if alignment else None
    rows = zip(tree[::4], tree[1::4], tree[2::4], tree[3::4], strict=True)
    call = Call(
        function,
        inputs,
        out,
        tuple(bounds),
        Findings(found_inf, max_abs),
        dots=dots,
        coefficients=coefficients,
        spread=spread,
        tree=tuple([(int(left), int(right), p, q) for left, right, p, q in rows]),
        packed=packed,
        cooperative=cooperative,
        order=order,
        accumulate=accumulate,
    )
    # An exported graph runs on tensors that torch did not see while it traced.
    refuse_followed(call, "torch traced this call without gradients")
    locate(call)
    run_at_once(call, *scalars)


def _no_vmap(function: str, *_: object) -> None:
    raise TypeError(
        f"{function} of tensors inside vmap has no rule: call it outside, a row at a time"
        + (", or without out=" if function in LINEAR else "")
    )


for _name in FUNCTIONS:
    _inputs, _out = ("Tensor(a!)[]", "Tensor") if _name == "unpack" else ("Tensor[]", "Tensor(a!)")
    _spread = "Tensor(h!)?" if _name == "adasum_coefficients" else "Tensor?"
    _LIBRARY.define(
        f"{_name}_7({_inputs} inputs, SymInt[] bounds, Tensor? dots, int alignment, "
        f"float[] scalars, bool cooperative, {_out} out, {SCHEMA}, "
        f"Tensor? coefficients=None, {_spread} spread=None, float[] tree=[], "
        "str order='list', ScalarType? accumulate=None) -> ()",
        tags=_TAGS,
    )
    _LIBRARY.impl(f"{_name}_7", partial(_run_operator, _name), "CompositeExplicitAutograd")
    # On tensors without data there is nothing to do: it only writes into its arguments.
    torch.library.register_fake(f"adasum::{_name}_7", lambda *_: None, lib=_LIBRARY)
    torch.library.register_vmap(f"adasum::{_name}_7", partial(_no_vmap, _name), lib=_LIBRARY)
