"""The arguments of each function, checked: one definition for direct calls, plans and operators.

Overlap is checked where a plan is bound to memory, which tensors that are traced do not have.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.findings import Findings
from kernels.layout import Layout, PackedList, check_buffer, check_packed
from kernels.torch_ops import check_list, read_list, tracing
from kernels.validation import (
    check_all_writable,
    check_dots,
    check_like,
    check_pair,
    check_place,
    check_segments,
    check_target,
    check_tensor,
    check_writable,
    new_like,
)

__all__ = [
    "EMPTY",
    "check_adasum",
    "check_combine",
    "check_dot_and_norms",
    "check_equals",
    "check_pack",
    "check_scaled_add",
    "check_sum_n",
    "check_unpack",
    "device_of",
]

EMPTY = "tensors is empty: pass at least one tensor to sum"
_dtype, _shape = operator.attrgetter("dtype"), operator.attrgetter("shape")


def check_pack(
    tensors: Sequence[Tensor], layout: Layout | None, out: Tensor | None, findings: Findings
) -> tuple[list[Tensor], PackedList, Tensor]:
    """Return the tensors, their layout and the buffer, made where `out` is None."""
    inputs = read_list("tensors", tensors)
    packed = check_packed(inputs, layout, None)
    chosen, device = packed.layout, device_of(inputs)
    if out is not None:
        if not inputs:
            device = check_tensor("out", out).device
        check_buffer("out", out, chosen, device)
        check_writable("out", out)
    findings.check(device, chosen.dtype)
    if out is None:
        out = torch.empty(chosen.numel, dtype=chosen.dtype, device=device)
    return inputs, packed, out


def check_unpack(
    buffer: Tensor, tensors: Sequence[Tensor], layout: Layout | None, findings: Findings
) -> tuple[list[Tensor], PackedList, Tensor]:
    """Return the tensors, their layout and the buffer."""
    inputs = read_list("tensors", tensors)
    check_tensor("buffer", buffer)
    packed = check_packed(inputs, layout, buffer.dtype)
    device = inputs[0].device if inputs else buffer.device
    check_buffer("buffer", buffer, packed.layout, device)
    check_all_writable("tensors", inputs)
    findings.check(device, *packed.dtypes)
    return inputs, packed, buffer


def check_sum_n(
    tensors: Sequence[Tensor], out: Tensor | None, dtype: torch.dtype | None, findings: Findings
) -> tuple[list[Tensor], Tensor]:
    """Return the tensors and the output, made where `out` is None."""
    inputs = check_equals(read_list("tensors", tensors))
    first = inputs[0]
    findings.check(first.device, check_target(out, "tensors[0]", first, dtype))
    return inputs, new_like(first, dtype) if out is None else out


def check_scaled_add(
    a: Tensor, b: Tensor, out: Tensor | None, dtype: torch.dtype | None, findings: Findings
) -> tuple[list[Tensor], Tensor]:
    """Return (a, b) and the output, made where `out` is None."""
    left = check_tensor("a", a)
    right = check_place("b", b, "a", left)
    findings.check(left.device, check_target(out, "a", left, dtype))
    return [left, right], new_like(left, dtype) if out is None else out


def check_dot_and_norms(a: Tensor, b: Tensor, segments: Sequence[int] | None) -> tuple[int, ...]:
    """Return the segments' boundaries."""
    return check_segments(segments, check_pair(a, b, None).numel())


def check_combine(
    a: Tensor,
    b: Tensor,
    dots: Tensor,
    segments: Sequence[int] | None,
    out: Tensor | None,
    findings: Findings,
) -> tuple[tuple[int, ...], Tensor]:
    """Return the segments' boundaries and the output, made where `out` is None."""
    left = check_tensor("a", a)
    bounds = check_segments(segments, left.numel())
    check_dots(dots, len(bounds) - 1, left)
    check_pair(a, b, out)
    findings.check(left.device, left.dtype)
    return bounds, new_like(left) if out is None else out


def check_adasum(
    a: Tensor,
    b: Tensor,
    segments: Sequence[int] | None,
    out: Tensor | None,
    findings: Findings,
) -> tuple[tuple[int, ...], Tensor]:
    """Return the segments' boundaries and the output, made where `out` is None."""
    left = check_pair(a, b, out)
    findings.check(left.device, left.dtype)
    bounds = check_segments(segments, left.numel())
    return bounds, new_like(left) if out is None else out


def device_of(tensors: Sequence[Tensor]) -> torch.device:
    """The device of a list of tensors; the CPU's where it is empty."""
    return tensors[0].device if tensors else torch.device("cpu")


def check_equals(tensors: object) -> list[Tensor]:
    """Check that a list's tensors, at least one, are equal in shape, dtype and device."""
    checked = check_list("tensors", tensors)
    if not checked:
        raise ValueError(EMPTY)
    first = checked[0]
    # dynamo reads no `map` over a C function, which is faster, and fixes shapes that are in a set.
    if not tracing() and ({*map(_dtype, checked)}, {*map(_shape, checked)}) == (
        {first.dtype},
        {first.shape},
    ):
        return checked
    for i, tensor in enumerate(checked[1:], 1):
        check_like(f"tensors[{i}]", tensor, "tensors[0]", first)
    return checked
