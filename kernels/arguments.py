"""Check the arguments of each function, in one place for direct calls, plans and operators.

C checks them in one pass (kernels/cpu/reading.h). If it leaves a call undecided, Python checks it
again, and describes errors. Overlap is checked later, when the call is bound to memory, since
traced tensors have no memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from kernels.call import ORDERS, UNREAD, Call, check_tree
from kernels.cpu import dispatch
from kernels.layout import Layout, check_buffer, check_packed, codes_of, lay_out
from kernels.validation import (
    check_all_writable,
    check_dtype,
    check_found_inf,
    check_like,
    check_segments,
    check_sized,
    check_tensor,
    check_writable,
    read_list,
    tracing,
)

_EMPTY = "tensors is empty: pass at least one tensor"


class Takes(NamedTuple):
    """The requirements on a function's tensors; kernels/cpu/reading.h has the same.

    Attributes:
        pair: Whether the arguments are a and b, instead of a list of tensors of one dtype.
        alike: Whether a and b must have one dtype.
        out: The kind of output: "any" dtype in the first tensor's shape; the "same" shape and
        dtype;
            "rows" or "matrices" of dot products, float64, one per segment.
    """

    pair: bool
    alike: bool
    out: Literal["any", "same", "rows", "matrices"]


TAKES = {
    "sum_n": Takes(pair=False, alike=True, out="any"),
    "scaled_add": Takes(pair=True, alike=False, out="any"),
    "dot_and_norms": Takes(pair=True, alike=True, out="rows"),
    "combine": Takes(pair=True, alike=True, out="same"),
    "adasum": Takes(pair=True, alike=True, out="same"),
    "gram": Takes(pair=False, alike=True, out="matrices"),
    "weighted_sum": Takes(pair=False, alike=True, out="same"),
}


def read(
    function: str, tensors: object, out: object, dtype: object, place: object, *others: object
) -> Call | None:
    """Check a function's arguments in C, with memory; return None if Python is to check them.

    Args:
        function: The function's name.
        tensors: A list or tuple.
        out: As in `Call`.
        dtype: The output's dtype, if given.
        place: As in `Call`.
        others: `found_inf`, `table`, `kind` and `accumulate`, as in `Call`.
    """
    if tracing() or (library := dispatch.library()) is None or function not in library.reads:
        return None
    found: Call | None = library.reads[function](tensors, out, dtype, 1.0, 1.0, place, *others)
    return found


def read_again(call: Call, inputs: list[Tensor], out: Tensor) -> Call | None:
    """`read` the arguments of `call` with these tensors instead of its own."""
    others = call.found_inf, call.table, call.kind, call.accumulate
    return read(call.function, inputs, out, None, call.place, *others)


def check_pack(
    tensors: Iterable[Tensor],
    layout: Layout | None,
    out: Tensor | None,
    found_inf: Tensor | None,
    *,
    copies: bool,
) -> Call:
    """Check the arguments of `pack`, and make the buffer if `out` is None.

    copies: Whether tensors that are not contiguous are copied.
    """
    given, chosen = lay_out(tensors, layout, None)
    if (call := read("pack", given, out, None, chosen, found_inf)) is not None:
        return call
    inputs, target = check_packed(given, chosen, any_order=copies), out
    device = device_of(inputs)
    if out is not None:
        check_tensor("out", out)
        device = device if inputs else out.device
        check_buffer("out", out, chosen, device)
        check_writable("out", out)
    check_found_inf(found_inf, device)
    if target is None:
        target = torch.empty(chosen.numel, dtype=chosen.dtype, device=device)
    inputs = [one.contiguous() for one in inputs]
    codes = codes_of(inputs)
    return Call("pack", inputs, target, chosen, out is None, codes=codes, found_inf=found_inf)


def check_unpack(
    buffer: Tensor, tensors: Iterable[Tensor], layout: Layout | None, found_inf: Tensor | None
) -> Call:
    """Check the arguments of `unpack`."""
    check_tensor("buffer", buffer)
    given, chosen = lay_out(tensors, layout, buffer.dtype)
    if (call := read("unpack", given, buffer, None, chosen, found_inf)) is not None:
        return call
    inputs = check_packed(given, chosen, any_order=False)
    device = inputs[0].device if inputs else buffer.device
    check_buffer("buffer", buffer, chosen, device)
    check_all_writable("tensors", inputs)
    check_found_inf(found_inf, device)
    return Call("unpack", inputs, buffer, chosen, codes=codes_of(inputs), found_inf=found_inf)


def check(
    function: str,
    tensors: object,
    out: Tensor | None,
    dtype: torch.dtype | None = None,
    segments: Sequence[int] | None = None,
    found_inf: Tensor | None = None,
    table: Tensor | None = None,
    kind: str | bool = "list",
    accumulate: torch.dtype | None = None,
) -> Call:
    """Check the arguments of a function of `TAKES`, and make the output if `out` is None.

    Args:
        function: The function's name.
        tensors: The list, or the pair (a, b).
        out: The output.
        dtype: The output's dtype; if None, the dtype of `out` or of the first tensor.
        segments: The boundaries of segments; None for one segment.
        found_inf: As in `Call`.
        table: The dots for `combine`, the coefficients for `weighted_sum`.
        kind: The order for `sum_n`; whether the matrices are precise for `gram`; for `adasum`,
            whether it may be cooperative.
        accumulate: As in `Call`.
    """
    others = found_inf, table, kind, accumulate
    if (call := read(function, tensors, out, dtype, segments, *others)) is not None:
        return call
    takes = TAKES[function]
    inputs = _check_pair(tensors, takes) if takes.pair else check_equals(tensors)
    first, name = inputs[0], "a" if takes.pair else "tensors[0]"
    if function == "sum_n":
        check_order(kind)
        check_accumulate(accumulate, first.dtype)
    bounds = check_segments(segments, first.numel())
    rows, count = len(bounds) - 1, len(inputs)
    if rows != 1 and not first.is_contiguous():
        raise ValueError(
            f"{name} is not contiguous, and segments are of contiguous elements: pass .contiguous()"
        )
    shapes = {"rows": (rows, 3), "matrices": (rows, count, count, *((2,) if kind else ()))}
    if (shape := shapes.get(takes.out)) is not None:
        target = check_written("out", out, shape, first.device)
    else:
        target = check_target(out, name, first, dtype, any_dtype=takes.out == "any")
    if function == "combine":
        check_table("dots", table, (rows, 3), target.device)
    elif function == "weighted_sum":
        check_table("coefficients", table, (rows, count), target.device)
    check_found_inf(found_inf, target.device)
    return Call(function, inputs, target, bounds, out is None, UNREAD, False, b"", *others)


def check_order(order: object) -> None:
    """Raise ValueError unless this is an order of `sum_n`."""
    if not (isinstance(order, str) and order in ORDERS):
        raise ValueError(f"order must be 'list' or 'tree', got {order!r}")


def check_accumulate(accumulate: object, dtype: torch.dtype) -> None:
    """Raise TypeError unless sums of tensors of `dtype` may be rounded to this one, or None."""
    allowed = (dtype,) if dtype == torch.float64 else (dtype, torch.float32)
    if accumulate is None or (isinstance(accumulate, torch.dtype) and accumulate in allowed):
        return
    names = " or ".join(map(str, dict.fromkeys(allowed)))
    raise TypeError(
        f"accumulate of {dtype} tensors must be {names}, or None for the dtype in which sums are "
        f"computed, got {accumulate!r}"
    )


def device_of(tensors: Sequence[Tensor]) -> torch.device:
    """Return the device of a list of tensors; the CPU if the list is empty."""
    return tensors[0].device if tensors else torch.device("cpu")


def check_equals(tensors: object) -> list[Tensor]:
    """Return a list's tensors, at least one, if they are equal in shape, dtype and device."""
    given = read_list("tensors", tensors)
    if not given:
        raise ValueError(_EMPTY)
    first = check_tensor("tensors[0]", given[0], any_order=True)
    for i, tensor in enumerate(given[1:], 1):
        check_like(f"tensors[{i}]", tensor, "tensors[0]", first)
    return given


def check_all_sized(tensors: object) -> list[Tensor]:
    """Return a list's tensors, at least one, if `check_sized` accepts each."""
    given = read_list("tensors", tensors)
    if not given:
        raise ValueError(_EMPTY)
    return [check_sized(f"tensors[{i}]", tensor) for i, tensor in enumerate(given)]


def check_target(
    out: object | None,
    like_name: str,
    like: Tensor,
    dtype: torch.dtype | None = None,
    *,
    any_dtype: bool = True,
) -> Tensor:
    """Return the output of an elementwise function, which is made if `out` is None.

    dtype: The output's dtype; if None, the dtype of `out` or of `like`. any_dtype: Whether `out`
    and `like` may differ in dtype.
    """
    if dtype is not None:
        check_dtype("dtype", dtype)
    if out is None:
        order = torch.contiguous_format if like.is_contiguous() else torch.preserve_format
        return torch.empty_like(like, dtype=dtype, memory_format=order)
    target = check_writable("out", check_like("out", out, like_name, like, any_dtype=any_dtype))
    if dtype is not None and target.dtype != dtype:
        raise TypeError(f"out has dtype {target.dtype} but dtype is {dtype}: drop one of them")
    return target


def _check_pair(tensors: object, takes: Takes) -> list[Tensor]:
    """Return the tensors a and b if they are equal in shape and device and, if asked, dtype."""
    a, b = cast("tuple[object, object]", tensors)
    left = check_tensor("a", a, any_order=True)
    return [left, check_like("b", b, "a", left, any_dtype=not takes.alike)]


def check_table(name: str, table: object, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return `table` if it is a readable float64 tensor of this shape and device."""
    checked = check_tensor(name, table)
    if checked.dtype != torch.float64:
        raise TypeError(f"{name} has dtype {checked.dtype}: pass float64")
    if checked.shape != shape:
        raise ValueError(
            f"{name} has shape {tuple(checked.shape)} but the other arguments ask for {shape}"
        )
    if checked.device != device:
        raise ValueError(f"{name} is on {checked.device} but the others are on {device}: move one")
    return checked


def check_written(
    name: str, table: Tensor | None, shape: tuple[int, ...], device: torch.device
) -> Tensor:
    """Return a table to write, which is made if it is None."""
    if table is None:
        return torch.empty(shape, dtype=torch.float64, device=device)
    return check_writable(name, check_table(name, table, shape, device))


def check_adasum_coefficients(
    partials: Tensor,
    tree: Sequence[tuple[int, int, float, float]],
    out: Tensor | None,
    spread: Tensor | None,
) -> Call:
    """Check the arguments of `adasum_coefficients`, and make the output if `out` is None."""
    given = check_partials(check_tensor("partials", partials))
    _, count, size, *_ = given.shape
    device, rows = given.device, check_tree(tree, size)
    target = check_written("out", out, (count, size), device)
    if spread is not None:
        check_written("spread", spread, (count,), device)
    made = out is None
    return Call("adasum_coefficients", [given], target, (), made, spread=spread, tree=rows)


def check_partials(given: Tensor) -> Tensor:
    """Return `given` if it has the dtype and shape of stacked results of `gram`."""
    if given.dtype != torch.float64:
        raise TypeError(f"partials has dtype {given.dtype}: pass what gram returns, float64")
    shape = tuple(given.shape)
    square = len(shape) in (4, 5) and shape[2] == shape[3] and shape[4:] in ((), (2,))
    if not square or 0 in (shape[0], shape[2]):
        raise ValueError(
            f"partials has shape {shape}: pass gram's results stacked, [R, S, n, n] or, precise, "
            "[R, S, n, n, 2]"
        )
    return given
