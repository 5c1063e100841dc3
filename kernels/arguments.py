"""Check the arguments of each function, in one place for direct calls, plans and operators.

Overlap is checked later, when a call is bound to memory: tensors that are traced have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.call import ORDERS, Call
from kernels.findings import Findings
from kernels.layout import Layout, PackedList, check_buffer, check_packed, lay_out
from kernels.reading import Checked, read
from kernels.validation import (
    check_all_writable,
    check_dtype,
    check_like,
    check_segments,
    check_tensor,
    check_writable,
    read_list,
)

EMPTY = "tensors is empty: pass at least one tensor"


def check_pack(
    tensors: Sequence[Tensor], layout: Layout | None, out: Tensor | None, findings: Findings
) -> Call:
    """Check the arguments of `pack`, and make the buffer if `out` is None."""
    given, chosen = lay_out(tensors, layout, None)
    found = read("pack", given, out, chosen.dtype, chosen, findings)
    if found is None:
        inputs, dtypes = check_packed(given, chosen)
        device, target = device_of(inputs), out
        if out is not None:
            check_tensor("out", out)
            device = device if inputs else out.device
            check_buffer("out", out, chosen, device)
            check_writable("out", out)
        findings.check(device, chosen.dtype)
        if target is None:
            target = torch.empty(chosen.numel, dtype=chosen.dtype, device=device)
        found = Checked(inputs, target, dtypes=dtypes)
    return _packed("pack", found, chosen, findings, out is None)


def check_unpack(
    buffer: Tensor, tensors: Sequence[Tensor], layout: Layout | None, findings: Findings
) -> Call:
    """Check the arguments of `unpack`."""
    check_tensor("buffer", buffer)
    given, chosen = lay_out(tensors, layout, buffer.dtype)
    found = read("unpack", given, buffer, chosen.dtype, chosen, findings)
    if found is None:
        inputs, dtypes = check_packed(given, chosen)
        device = inputs[0].device if inputs else buffer.device
        check_buffer("buffer", buffer, chosen, device)
        check_all_writable("tensors", inputs)
        findings.check(device, *dtypes)
        found = Checked(inputs, buffer, dtypes=dtypes)
    return _packed("unpack", found, chosen, findings, False)


def _packed(function: str, found: Checked, layout: Layout, findings: Findings, made: bool) -> Call:
    return Call(
        *(function, found.inputs, found.out, layout.segments, findings),
        packed=PackedList(layout, list(found.dtypes)),
        made=made,
        addresses=found.addresses,
    )


def check_sum_n(
    tensors: Sequence[Tensor],
    out: Tensor | None,
    dtype: torch.dtype | None,
    order: str,
    accumulate: torch.dtype | None,
    findings: Findings,
) -> Call:
    """Check the arguments of `sum_n`, and make the output if `out` is None."""
    found = read("sum_n", tensors, out, dtype, None, findings, None, order, accumulate)
    if found is None:
        inputs = check_equals(tensors)
        check_order(order)
        check_accumulate(accumulate, inputs[0].dtype)
        target = check_target(out, "tensors[0]", inputs[0], dtype)
        findings.check(inputs[0].device, target.dtype)
        found = Checked(inputs, target)
    return Call(
        *("sum_n", found.inputs, found.out, (0, found.out.numel()), findings),
        order=order,
        accumulate=accumulate,
        made=out is None,
        addresses=found.addresses,
    )


def check_order(order: object) -> None:
    """Raise ValueError unless this is an order of `sum_n`."""
    if not (isinstance(order, str) and order in ORDERS):
        raise ValueError(f"order must be 'list' or 'tree', not {order!r}")


def check_accumulate(accumulate: object, dtype: torch.dtype) -> None:
    """Raise TypeError unless sums of tensors of `dtype` may be rounded to this one, or None."""
    allowed = (dtype,) if dtype == torch.float64 else (dtype, torch.float32)
    if accumulate is None or (isinstance(accumulate, torch.dtype) and accumulate in allowed):
        return
    names = " or ".join(map(str, dict.fromkeys(allowed)))
    raise TypeError(
        f"accumulate is {accumulate!r}, to which sums of {dtype} tensors are not rounded: "
        f"pass {names}, or None for the dtype in which they are computed"
    )


def check_scaled_add(
    a: Tensor, b: Tensor, out: Tensor | None, dtype: torch.dtype | None, findings: Findings
) -> Call:
    """Check the arguments of `scaled_add`, and make the output if `out` is None."""
    found = read("scaled_add", (a, b), out, dtype, None, findings)
    if found is None:
        left = check_tensor("a", a)
        inputs = [left, check_like("b", b, "a", left, any_dtype=True)]
        target = check_target(out, "a", left, dtype)
        findings.check(left.device, target.dtype)
        found = Checked(inputs, target)
    bounds = 0, found.out.numel()
    return Call(
        *("scaled_add", found.inputs, found.out, bounds, findings),
        made=out is None,
        addresses=found.addresses,
    )


def check_dot_and_norms(a: Tensor, b: Tensor, segments: Sequence[int] | None) -> Call:
    """Check the arguments of `dot_and_norms`, and make the rows of dots, as `out`."""
    found = read("dot_and_norms", (a, b), None, None, segments)
    if found is None:
        left = check_tensor("a", a)
        inputs = [left, check_like("b", b, "a", left)]
        bounds = check_segments(segments, left.numel())
        dots = torch.empty(len(bounds) - 1, 3, dtype=torch.float64, device=left.device)
        found = Checked(inputs, dots, bounds=bounds)
    return call_in_segments("dot_and_norms", found, made=True)


def call_in_segments(function: str, found: Checked, **others: Any) -> Call:
    """Return a call whose bounds are those of segments."""
    bounds = found.bounds or (0, found.inputs[0].numel())
    return Call(function, found.inputs, found.out, bounds, addresses=found.addresses, **others)


def check_combine(
    a: Tensor,
    b: Tensor,
    dots: Tensor,
    segments: Sequence[int] | None,
    out: Tensor | None,
    findings: Findings,
) -> Call:
    """Check the arguments of `combine`, and make the output if `out` is None."""
    found = read("combine", (a, b), out, None, segments, findings, dots)
    if found is None:
        inputs, target = _check_pair(a, b, out)
        bounds = check_segments(segments, target.numel())
        check_dots(dots, len(bounds) - 1, target)
        findings.check(target.device, target.dtype)
        found = Checked(inputs, target, bounds=bounds)
    made = out is None
    return call_in_segments("combine", found, findings=findings, dots=dots, made=made)


def check_adasum(
    a: Tensor,
    b: Tensor,
    segments: Sequence[int] | None,
    out: Tensor | None,
    findings: Findings,
    cooperative: bool,
) -> Call:
    """Check the arguments of `adasum`, and make the output if `out` is None."""
    found = read("adasum", (a, b), out, None, segments, findings)
    if found is None:
        inputs, target = _check_pair(a, b, out)
        findings.check(inputs[0].device, inputs[0].dtype)
        bounds = check_segments(segments, inputs[0].numel())
        found = Checked(inputs, target, bounds=bounds)
    made = out is None
    return call_in_segments("adasum", found, findings=findings, cooperative=cooperative, made=made)


def device_of(tensors: Sequence[Tensor]) -> torch.device:
    """Return the device of a list of tensors; the CPU if the list is empty."""
    return tensors[0].device if tensors else torch.device("cpu")


def check_equals(tensors: object) -> list[Tensor]:
    """Return a list's tensors, at least one, if they are equal in shape, dtype and device."""
    given = read_list("tensors", tensors)
    if not given:
        raise ValueError(EMPTY)
    first = check_tensor("tensors[0]", given[0])
    for i, tensor in enumerate(given[1:], 1):
        check_like(f"tensors[{i}]", tensor, "tensors[0]", first)
    return given


def check_target(
    out: object | None,
    like_name: str,
    like: Tensor,
    dtype: torch.dtype | None = None,
    *,
    any_dtype: bool = True,
) -> Tensor:
    """Return the output of an elementwise function, which is made if `out` is None.

    dtype: The output's; None for that of `out`, or of `like` without `out`. any_dtype: Whether the
    dtype of `out` may differ from that of `like`.
    """
    if dtype is not None:
        check_dtype("dtype", dtype)
    if out is None:
        return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)
    target = check_writable("out", check_like("out", out, like_name, like, any_dtype=any_dtype))
    if dtype is not None and target.dtype != dtype:
        raise TypeError(f"out has dtype {target.dtype} but dtype is {dtype}: drop one of them")
    return target


def _check_pair(a: object, b: object, out: object | None) -> tuple[list[Tensor], Tensor]:
    """Return two inputs of equal kind and their output, which is made if `out` is None."""
    left = check_tensor("a", a)
    inputs = [left, check_like("b", b, "a", left)]
    return inputs, check_target(out, "a", left, any_dtype=False)


def check_dots(dots: object, count: int, like: Tensor) -> Tensor:
    """Return `dots` if it is the contiguous float64 [count, 3] tensor `combine` needs."""
    checked = check_tensor("dots", dots)
    if checked.dtype != torch.float64:
        raise TypeError(f"dots has dtype {checked.dtype}: pass what dot_and_norms returns, float64")
    if checked.shape != (count, 3):
        raise ValueError(
            f"dots has shape {tuple(checked.shape)} but segments ask for {(count, 3)}: "
            "call dot_and_norms with the same segments"
        )
    if checked.device != like.device:
        raise ValueError(f"dots is on {checked.device} but a is on {like.device}: move one")
    return checked
