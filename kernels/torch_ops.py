"""Calls and torch: run directly in eager mode, recorded as one operator `adasum::*` in traced code.

Eager calls bind a launch and run it; they do not use the operators. While torch traces, the public
functions make all checks that need no addresses, and call the operator; overlap is checked when the
operator runs, since that needs addresses. An operator's schema names the arguments that it writes,
so that torch orders it correctly and copies tensors if necessary. If gradients are asked for, an
autograd.Function is around both.

The operators are not part of the public interface. If an operator's schema changes, its name must
change: torch's cache of compiled graphs on disk knows operators only by their names.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling as is_compiling

from kernels.arithmetic import compute_dtype
from kernels.binding import locate, run_at_once
from kernels.call import FUNCTIONS, UNREAD, Call
from kernels.findings import SCHEMA, Findings
from kernels.gradients import is_followed, refuse_followed
from kernels.layout import packed_within
from kernels.reading import in_c
from kernels.validation import tracing

Scalar = float | Tensor
_LIBRARY = torch.library.Library("adasum", "FRAGMENT")
# The arguments of each function's operator, in addition to `inputs` and `out`.
_BOUNDS, _FIRST = "SymInt[] bounds=[]", "float first=1, Tensor? first_at=None"
_BOTH = f"{_FIRST}, float second=1, Tensor? second_at=None"
_TAKES = {
    "pack": f"{_BOUNDS}, int alignment=1, {_FIRST}, {SCHEMA}",
    "unpack": f"{_BOUNDS}, int alignment=1, {_FIRST}, {SCHEMA}",
    "sum_n": f"{_FIRST}, {SCHEMA}, str order='list', ScalarType? accumulate=None",
    "scaled_add": f"{_BOTH}, {SCHEMA}",
    "dot_and_norms": _BOUNDS,
    "combine": f"Tensor dots, {_BOUNDS}, {_BOTH}, {SCHEMA}",
    "adasum": f"{_BOUNDS}, {_BOTH}, {SCHEMA}, bool cooperative=True",
    "gram": _BOUNDS,
    "adasum_coefficients": "float[] tree=[], Tensor(d!)? spread=None",
    "weighted_sum": f"Tensor coefficients, {_BOUNDS}, {SCHEMA}",
}
_FIELDS = {
    name: [field.split("=")[0].split()[-1] for field in takes.split(", ")]
    for name, takes in _TAKES.items()
}
# Functions whose calls leave nothing on the device. Tables and scratch memory outlive calls, and
# torch would take them for leaks in its CUDA graphs' memory pool (mode="reduce-overhead").
_SAFE_IN_GRAPHS = ("sum_n", "scaled_add")


def run(call: Call, *scalars: Scalar) -> Any:
    """Run the call, or have torch record it, and return the tensors that it writes.

    Raises:
        TypeError: A tensor cannot be read by its address.
        ValueError: A tensor shares memory with one that is written, or requires a gradient that the
            call cannot give.
    """
    # A call with addresses has been checked completely, and no derivative is asked for.
    if call.addresses is not UNREAD:
        run_at_once(call, *scalars)
        return call.inputs if call.function == "unpack" else call.out
    followed = is_followed(call)
    if not tracing():
        locate(call)
    if followed and call.function != "unpack":
        return cast("Any", _Linear).apply(call, scalars, *call.inputs)
    if followed:
        assert call.packed is not None
        # With torch's copies, which autograd records.
        for tensor, slot in zip(call.inputs, call.packed.layout.views(call.out), strict=True):
            tensor.copy_(slot.to(compute_dtype(slot.dtype, tensor.dtype)) * scalars[0])
    elif tracing():
        _trace(call, *scalars)
    else:
        run_at_once(call, *scalars)
    return call.inputs if call.function == "unpack" else call.out


class _Linear(torch.autograd.Function):
    """pack, sum_n and scaled_add as autograd sees them: the transpose of each is another function.

    It keeps no tensor. Its backward has a derivative, too, outside of compiled code.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, scalars: tuple[Scalar, ...], *inputs: Tensor) -> Tensor:
        ctx.function, ctx.packed, ctx.scalars = call.function, call.packed, scalars
        ctx.dtypes = call.dtypes
        call.inputs = list(inputs)
        (_trace if tracing() else run_at_once)(call, *scalars)
        return call.out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, None, *_transposed(ctx, grad.contiguous())


def _transposed(ctx: Any, grad: Tensor) -> list[Tensor | None]:
    """Return the gradients of the inputs from the gradient of the result."""
    if ctx.function == "pack":
        layout = ctx.packed.layout
        slots = zip(layout.shapes, ctx.dtypes, strict=True)
        made = [grad.new_empty(shape, dtype=dtype) for shape, dtype in slots]
        call = Call("unpack", made, grad, layout.segments, packed=ctx.packed)
        return cast("Any", _run_made(call, *ctx.scalars))
    numel = grad.numel()

    def one(function: str, inputs: list[Tensor], dtype: torch.dtype, *scalars: Scalar) -> Tensor:
        target = torch.empty_like(grad, dtype=dtype)
        return cast(
            "Any", _run_made(Call(function, inputs, target, (0, numel), made=True), *scalars)
        )

    if ctx.function == "sum_n":
        return [one("sum_n", [grad], ctx.dtypes[0], *ctx.scalars)] * len(ctx.dtypes)
    # scaled_add with zeros instead of sum_n, since its factors may exceed float32's range.
    pair, needed = [grad, torch.zeros_like(grad)], ctx.needs_input_grad[2:]
    return [
        one("scaled_add", pair, dtype, factor, 0.0) if wanted else None
        for dtype, factor, wanted in zip(ctx.dtypes, ctx.scalars, needed, strict=True)
    ]


def _run_made(call: Call, *scalars: Scalar) -> Any:
    """`run` on gradients: dynamo does not say whether these require gradients themselves."""
    if not is_compiling():
        return run(call, *scalars)
    _trace(call, *scalars)
    return call.inputs if call.function == "unpack" else call.out


def _as_arguments(scalar: Scalar) -> tuple[float, Tensor | None]:
    """Return a scalar as an operator's arguments: a constant, or a tensor.

    A number that changes between calls must be a tensor that torch computes: torch would compile
    the graph again for each value of a float argument.
    """
    # Not at the top: it takes a third of the time of importing torch, which does not import it.
    from torch.fx.experimental.symbolic_shapes import has_static_value

    if isinstance(scalar, Tensor):
        return 1.0, scalar
    if has_static_value(scalar):
        return scalar, None
    return 1.0, torch.ones((), dtype=torch.float64, device="cpu") * scalar


def _trace(call: Call, first: Scalar = 1.0, second: Scalar = 1.0) -> None:
    """Have torch record the call's operator."""
    (first, first_at), (second, second_at) = _as_arguments(first), _as_arguments(second)
    packed = call.packed
    every = {
        # Without the ends, which follow from the inputs: Inductor cannot pass an unknown length.
        "bounds": call.bounds[1:-1] if packed is None else call.bounds,
        "alignment": 0 if packed is None else packed.layout.alignment,
        "first": first,
        "first_at": first_at,
        "second": second,
        "second_at": second_at,
        "found_inf": call.findings.found_inf,
        "max_abs": call.findings.max_abs,
        "order": call.order,
        "accumulate": call.accumulate,
        "dots": call.dots,
        "cooperative": call.cooperative,
        # A flat list of floats, since operators take no rows.
        "tree": [float(number) for row in call.tree for number in row],
        "spread": call.spread,
        "coefficients": call.coefficients,
    }
    operator = getattr(torch.ops.adasum, f"{call.function}_8").default
    operator(call.inputs, call.out, **{name: every[name] for name in _FIELDS[call.function]})


def _run_operator(function: str, inputs: list[Tensor], out: Tensor, *values: Any) -> None:
    """Run a function's operator. values: In the schema's order; defaults at the end are omitted."""
    given = dict(zip(_FIELDS[function], values, strict=False))
    # AOTInductor passes None for an empty list.
    bounds, tree = given.pop("bounds", None) or (), given.pop("tree", None) or ()
    scalars = []
    for name in ("first", "second"):
        number, tensor = given.pop(name, 1.0), given.pop(f"{name}_at", None)
        if name in _FIELDS[function]:
            scalars.append(number if tensor is None else tensor)
    findings = Findings(given.pop("found_inf", None), given.pop("max_abs", None))
    packed = None
    if alignment := given.pop("alignment", None):
        packed = packed_within(out, inputs, bounds[:-1], alignment)
    else:
        bounds = (0, *bounds, inputs[0].numel())
    table, kind = given.get("dots", given.get("coefficients")), given.get("order", "list")
    if function == "gram":
        kind = out.dim() == 4
    elif function == "adasum":
        kind = given.get("cooperative", True)
    place = packed.layout if packed else bounds
    others = *findings, table, kind, given.get("accumulate")
    found = in_c(function)(inputs, out, None, *[*scalars, 1.0, 1.0][:2], place, *others)
    if isinstance(found, Call):
        run_at_once(found, *scalars)
    if found is not None:
        return
    rows = zip(tree[::4], tree[1::4], tree[2::4], tree[3::4], strict=True)
    tree = tuple([(int(left), int(right), p, q) for left, right, p, q in rows])
    call = Call(function, inputs, out, tuple(bounds), findings, tree=tree, packed=packed, **given)
    # An exported graph may run on other tensors than torch has traced it with.
    refuse_followed(call, "torch traced this call without gradients")
    locate(call)
    run_at_once(call, *scalars)


def _no_vmap(function: str, *_: object) -> None:
    raise TypeError(f"{function} of tensors inside vmap has no rule: call it outside, row by row")


for _name in FUNCTIONS:
    _inputs, _out = ("Tensor(a!)[]", "Tensor") if _name == "unpack" else ("Tensor[]", "Tensor(a!)")
    # Keep torch.compile from changing the strides of contiguous inputs.
    _tags = ["needs_exact_strides", "needs_fixed_stride_order"]
    if _name not in _SAFE_IN_GRAPHS:
        _tags.append("cudagraph_unsafe")
    _LIBRARY.define(
        f"{_name}_8({_inputs} inputs, {_out} out, {_TAKES[_name]}) -> ()",
        tags=tuple(getattr(torch.Tag, tag) for tag in _tags if hasattr(torch.Tag, tag)),
    )
    _LIBRARY.impl(f"{_name}_8", partial(_run_operator, _name), "CompositeExplicitAutograd")
    # Nothing to do for tensors without data, since operators only write to their arguments.
    torch.library.register_fake(f"adasum::{_name}_8", lambda *_, **__: None, lib=_LIBRARY)
    torch.library.register_vmap(f"adasum::{_name}_8", partial(_no_vmap, _name), lib=_LIBRARY)
