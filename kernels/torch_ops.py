"""Calls and torch: run directly in eager mode, recorded as one operator `adasum::*` in traced code.

Eager calls bind a launch and run it; they do not use the operators. torch.compile records an
operator that checks its arguments twice: without data while torch traces, and when it runs, since
overlap needs addresses. So dynamo traces little of this package, and guards little of it at each
call. Other tracers run the checks themselves, as dynamo does for packed lists and gradients. An
operator's schema names the arguments that it writes, so that torch orders it correctly and copies
tensors if necessary. If gradients are asked for, an autograd.Function is around all of it.

The operators are not part of the public interface. If an operator's schema changes, its name must
change: torch's cache of compiled graphs on disk knows operators only by their names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.compiler import is_dynamo_compiling as is_compiling

from kernels.arguments import TAKES, check
from kernels.binding import locate, run_at_once, run_direct
from kernels.call import SCALARS, UNREAD, Call
from kernels.cpu import torch_fallback
from kernels.gradients import is_followed, refuse_followed
from kernels.layout import checked_layout, codes_of
from kernels.validation import check_segments, tracing

Scalar = float | Tensor
_LIBRARY = torch.library.Library("adasum", "FRAGMENT")
# No argument has a default: Inductor would pass it by its name, which takes 0.3 us.
_FLAG = "Tensor(b!)? found_inf"
_SLOTS = f"SymInt[] starts, int alignment, float first, Tensor? first_at, {_FLAG}"
_OPTIONS = (
    "ScalarType? dtype, SymInt[]? starts, Tensor? table, str kind, ScalarType? accumulate, "
    "float first, Tensor? first_at, float second, Tensor? second_at"
)
# Functions whose calls leave nothing on the device. Tables and scratch memory outlive calls, and
# torch would take them for leaks in its CUDA graphs' memory pool (mode="reduce-overhead").
_SAFE_IN_GRAPHS = ("sum_n", "scaled_add")


def check_and_run(
    function: str,
    tensors: Any,
    out: Tensor | None,
    dtype: torch.dtype | None,
    first: Scalar,
    second: Scalar,
    *options: Any,
) -> Any:
    """Check a call of a function of `TAKES`, run it or have torch record it, and return `out`.

    For calls that `run_direct` has not run, with the same arguments. first, second: The function's
    scalars, if it has any. options: The arguments of `check` from `segments` on.

    Raises:
        TypeError: An argument has another type or dtype.
        ValueError: An argument is unusable, or a gradient is required that the call cannot give.
    """
    if is_compiling() and _is_recordable(tensors, out, dtype, *options):
        return _record(function, tensors, out, first, second, dtype, *options)
    call = check(function, tensors, out, dtype, *options)
    return run(call, *(first, second)[: SCALARS.get(function, 0)])


def run(call: Call, *scalars: Scalar) -> Any:
    """Run the call, or have torch record it, and return the tensors that it writes.

    Raises:
        TypeError: A tensor cannot be read by its address.
        ValueError: A tensor shares memory with one that is written, or requires a gradient that the
            call cannot give.
    """
    # A call with addresses has been checked completely, and no derivative is asked for.
    if call.addresses is not UNREAD:
        return run_at_once(call, *scalars)
    followed = is_followed(call)
    if not tracing():
        locate(call)
    if followed and call.function != "unpack":
        return cast("Any", _Linear).apply(call, scalars, *call.inputs)
    if followed:
        # By torch's copies, which autograd records.
        torch_fallback.unpack(call, *scalars)
    elif tracing():
        _trace(call, *scalars)
    else:
        run_at_once(call, *scalars)
    return call.result


class _Linear(torch.autograd.Function):
    """pack, sum_n and scaled_add as autograd sees them: the transpose of each is another function.

    It keeps no tensor. Its backward has a derivative, too, outside of compiled code.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, scalars: tuple[Scalar, ...], *inputs: Tensor) -> Tensor:
        ctx.function, ctx.place, ctx.scalars = call.function, call.place, scalars
        ctx.dtypes, ctx.codes = call.dtypes, call.codes
        call.inputs = list(inputs)
        (_trace if tracing() else run_at_once)(call, *scalars)
        return call.out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, None, *_transposed(ctx, grad.contiguous())


def _transposed(ctx: Any, grad: Tensor) -> list[Tensor | None]:
    """Return the gradients of the inputs from the gradient of the result."""
    if ctx.function == "pack":
        slots = zip(ctx.place.shapes, ctx.dtypes, strict=True)
        made = [grad.new_empty(shape, dtype=dtype) for shape, dtype in slots]
        call = Call("unpack", made, grad, ctx.place, codes=ctx.codes)
        return cast("Any", _run_made(call, *ctx.scalars))

    def one(function: str, inputs: list[Tensor], dtype: torch.dtype, *scalars: Scalar) -> Tensor:
        target = torch.empty_like(grad, dtype=dtype)
        return cast("Any", _run_made(Call(function, inputs, target, None, made=True), *scalars))

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
    return call.result


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


def _is_recordable(tensors: Any, out: object, dtype: object, *options: object) -> bool:
    """Whether an operator takes these unchecked arguments, and no derivative is asked for."""
    _, found_inf, table, _, accumulate = (*options, None, None, None, None)[:5]
    # torch does not compile an operator that both returns a tensor and writes one.
    if type(tensors) not in (list, tuple) or not tensors or (out is None and found_inf is not None):
        return False
    followed = torch.is_grad_enabled()
    for one in (*tensors, *[one for one in (out, found_inf, table) if one is not None]):
        if not isinstance(one, Tensor) or one.is_meta or (followed and one.requires_grad):
            return False
    # The primal is another object only inside a forward-mode level.
    return unpack_dual(tensors[0]).primal is tensors[0] and all(
        one is None or isinstance(one, torch.dtype) for one in (dtype, accumulate)
    )


def _record(
    function: str,
    tensors: Sequence[Tensor],
    out: Tensor | None,
    first: Scalar,
    second: Scalar,
    dtype: torch.dtype | None,
    segments: Sequence[int] | None,
    found_inf: Tensor | None = None,
    table: Tensor | None = None,
    kind: str | bool = "list",
    accumulate: torch.dtype | None = None,
) -> Any:
    """Have torch record the operator of a function of `TAKES`, and return `out`."""
    if segments is not None:
        # Without the end, which follows from the tensors: Inductor cannot pass an unknown length.
        segments = check_segments(segments, tensors[0].numel())[:-1]
    scalars = *_as_arguments(first), *_as_arguments(second)
    given = list(tensors), dtype, segments, table, str(kind), accumulate, *scalars
    packet = getattr(torch.ops.adasum, f"{function}_10")
    if out is None:
        return packet.default(*given)
    packet.out(*given, out, found_inf)
    return out


def _trace(call: Call, first: Scalar = 1.0, second: Scalar = 1.0) -> None:
    """Have torch record a checked call's operator."""
    given, packet = (call.inputs, call.out), getattr(torch.ops.adasum, f"{call.function}_10")
    if call.layout is not None:
        starts, alignment = call.layout.offsets, call.layout.alignment
        packet.default(*given, starts, alignment, *_as_arguments(first), call.found_inf)
    elif call.function == "adasum_coefficients":
        # A flat list of floats, since operators take no rows.
        packet.default(*given, [float(one) for row in call.tree for one in row], call.spread)
    else:
        others: tuple[Any, ...] = call.table, call.kind, call.accumulate
        _record(call.function, *given, first, second, None, call.bounds, call.found_inf, *others)


def _run_operator(function: str, inputs: list[Tensor], *given: Any, fake: bool = False) -> Any:
    """Run the operator of a function of `TAKES`, and return `out` if it was not given.

    given: In the schema's order. fake: Only check the arguments, as far as that needs no data. If
    they are wrong, dynamo leaves the call to eager mode.
    """
    dtype, starts, table, kind, accumulate, *passed = given[:9]
    out, found_inf = given[9:] or (None, None)
    segments = None if starts is None else (*starts, inputs[0].numel())
    scalars = [by if at is None else at for by, at in (passed[:2], passed[2:])]
    if function in ("gram", "adasum"):
        kind = kind == "True"
    options = segments, found_inf, table, kind, accumulate
    if fake:
        try:
            found = check(function, inputs, out, dtype, *options).out
        except (TypeError, ValueError) as error:
            raise NotImplementedError(str(error)) from error
    elif (found := run_direct(function, (inputs, out, dtype, *scalars, *options))) is None:
        call = check(function, inputs, out, dtype, *options)
        found = _run_checked(call, *scalars[: SCALARS.get(function, 0)])
    return found if out is None else None


def _run_checked(call: Call, *scalars: Scalar) -> Any:
    if call.addresses is UNREAD:
        # An exported graph may run on other tensors than torch has traced it with.
        refuse_followed(call, "torch traced this call without gradients")
        locate(call)
    return run_at_once(call, *scalars)


def _run_packed(
    function: str,
    inputs: list[Tensor],
    buffer: Tensor,
    starts: Sequence[int],
    alignment: int,
    first: Scalar,
    first_at: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Run the operator of `pack` or `unpack`."""
    shapes = tuple([one.shape for one in inputs])
    # AOTInductor passes None for an empty list.
    layout = checked_layout(buffer.dtype, shapes, tuple(starts or ()), buffer.numel(), alignment)
    scale = first if first_at is None else first_at
    if run_direct(function, (inputs, buffer, None, scale, 1.0, layout, found_inf)) is None:
        codes = codes_of(inputs)
        _run_checked(
            Call(function, inputs, buffer, layout, codes=codes, found_inf=found_inf), scale
        )


def _run_coefficients(
    inputs: list[Tensor], out: Tensor, tree: list[float], spread: Tensor | None
) -> None:
    """Run the operator of `adasum_coefficients`."""
    flat = tree or []
    rows = zip(flat[::4], flat[1::4], flat[2::4], flat[3::4], strict=True)
    joins = tuple([(int(left), int(right), p, q) for left, right, p, q in rows])
    _run_checked(Call("adasum_coefficients", inputs, out, (), spread=spread, tree=joins))


def _define(
    schema: str, run: Callable[..., Any], check: Callable[..., Any] = lambda *_: None
) -> None:
    """Define an operator. check: What to do for tensors without data."""
    name = schema.partition("(")[0]
    # Keep torch.compile from changing the strides of contiguous inputs.
    tags = ["needs_exact_strides", "needs_fixed_stride_order"]
    if not name.startswith(_SAFE_IN_GRAPHS):
        tags.append("cudagraph_unsafe")
    known = tuple(getattr(torch.Tag, tag) for tag in tags if hasattr(torch.Tag, tag))
    _LIBRARY.define(schema, tags=known)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"adasum::{name}", check, lib=_LIBRARY)


for _name in TAKES:
    for _schema in (
        f"{_name}_10(Tensor[] inputs, {_OPTIONS}) -> Tensor",
        f"{_name}_10.out(Tensor[] inputs, {_OPTIONS}, Tensor(a!) out, {_FLAG}) -> ()",
    ):
        _define(_schema, partial(_run_operator, _name), partial(_run_operator, _name, fake=True))
for _schema in (
    f"pack_10(Tensor[] inputs, Tensor(a!) out, {_SLOTS}) -> ()",
    f"unpack_10(Tensor(a!)[] inputs, Tensor out, {_SLOTS}) -> ()",
):
    _define(_schema, partial(_run_packed, _schema.partition("_")[0]))
_JOINS = "float[] tree, Tensor(d!)? spread"
_define(
    f"adasum_coefficients_10(Tensor[] inputs, Tensor(a!) out, {_JOINS}) -> ()", _run_coefficients
)
