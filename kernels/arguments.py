"""Check the arguments of each function, in one place for direct calls, plans and operators.

Overlap is checked later, when a call is bound to memory: tensors that are traced have none.
"""

from __future__ import annotations

import itertools
import operator
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling as is_compiling

from kernels.arithmetic import compute_dtype
from kernels.findings import Findings
from kernels.layout import Layout, PackedList, check_buffer, check_packed
from kernels.validation import (
    MANY,
    UNREAD,
    all_like,
    check_all_writable,
    check_dtype,
    check_like,
    check_tensor,
    check_writable,
    read_list,
    tracing,
)

FUNCTIONS = (
    *("pack", "unpack", "sum_n", "scaled_add", "dot_and_norms", "combine", "adasum"),
    *("gram", "adasum_coefficients", "weighted_sum"),
)
# Of its tensors: these have derivatives.
LINEAR = FUNCTIONS[:4]
# Of `sum_n`.
ORDERS = ("list", "tree")
# Of equal tensors.
_OF_EQUALS = ("sum_n", "gram", "weighted_sum")
_NO_FINDINGS = Findings()
EMPTY = "tensors is empty: pass at least one tensor"


Tree = tuple[tuple[int, int, float, float], ...]


@dataclass
class Call:
    """A function's arguments, checked: what plans, operators and both backends take.

    Attributes:
        function: Its name.
        inputs: What it reads; of `unpack` what it writes.
        out: What it writes; of `unpack` what it reads.
        bounds: Elements of `out`, or of the inputs, where segments start, and end; of a packed
            buffer where slots do; of `adasum_coefficients` none.
        findings: What it writes beside `out`.
        dots: Of `combine`.
        coefficients: Of `weighted_sum`.
        spread: Of `adasum_coefficients`: how far vectors cancel, which it writes.
        tree: Of `adasum_coefficients`: rows (left, right, p, q).
        packed: Of `pack` and `unpack`.
        cooperative: Of `adasum`: whether one cooperative launch may do it.
        order: Of `sum_n`: "list", from left to right, or "tree", the balanced tree.
        accumulate: Of `sum_n`: the dtype to which each sum of two is rounded; None for the one in
            which it is computed.
        made: Whether `out` was made for it.
        rebound: Whether `Plan.rebind` was given the tensors, as its `tensors` and `out`.
        addresses: Where the inputs lie, as uint64, once they are read.
    """

    function: str
    inputs: list[Tensor]
    out: Tensor
    bounds: tuple[int, ...]
    findings: Findings = _NO_FINDINGS
    dots: Tensor | None = None
    coefficients: Tensor | None = None
    spread: Tensor | None = None
    tree: Tree = ()
    packed: PackedList | None = None
    cooperative: bool = True
    order: str = "list"
    accumulate: torch.dtype | None = None
    made: bool = False
    rebound: bool = False
    addresses: array[int] = field(default_factory=lambda: UNREAD)

    @property
    def out_name(self) -> str:
        """How messages call `out`."""
        return "buffer" if self.function == "unpack" and not self.rebound else "out"

    def name(self, i: int) -> str:
        """How messages call an input."""
        if self.rebound or self.packed is not None or self.function in _OF_EQUALS:
            return f"tensors[{i}]"
        return "partials" if self.function == "adasum_coefficients" else "ab"[i]

    def others(self) -> list[tuple[str, Tensor]]:
        """Name and tensor of all but the inputs."""
        named = [*self.findings.given(), (self.out_name, self.out)]
        if self.dots is not None:
            named.append(("dots", self.dots))
        if self.coefficients is not None:
            named.append(("coefficients", self.coefficients))
        if self.spread is not None:
            named.append(("spread", self.spread))
        return named

    @property
    def dtypes(self) -> list[torch.dtype]:
        """Of the inputs."""
        if self.packed is not None:
            return self.packed.dtypes
        if self.function in _OF_EQUALS:
            return [self.inputs[0].dtype] * len(self.inputs)
        return [one.dtype for one in self.inputs]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of the inputs, which are equal where they are not packed."""
        if self.packed is not None:
            return list(self.packed.layout.shapes)
        return [self.inputs[0].shape] * len(self.inputs)

    @property
    def packing(self) -> bool:
        """Whether it writes into a packed buffer."""
        return self.function == "pack"

    @property
    def accumulated(self) -> torch.dtype:
        """Of `sum_n`: the dtype to which each sum of two is rounded."""
        return self.accumulate or compute_dtype(self.inputs[0].dtype, self.out.dtype)

    @property
    def precise(self) -> bool:
        """Of `gram` and `adasum_coefficients`: whether the matrices are double-double."""
        return self.out.dim() == 4 if self.function == "gram" else self.inputs[0].dim() == 5

    @property
    def in_place(self) -> bool:
        """Whether `out` may be one of the inputs, since it is made element by element."""
        return self.packed is None and self.function not in ("gram", "adasum_coefficients")

    @property
    def written(self) -> list[Tensor]:
        """The tensors that it writes."""
        main = self.inputs if self.function == "unpack" else [self.out]
        return [*main, *[one for one in (*self.findings, self.spread) if one is not None]]


def check_pack(
    tensors: Sequence[Tensor], layout: Layout | None, out: Tensor | None, findings: Findings
) -> Call:
    """Check the arguments of `pack`, and make the buffer if `out` is None."""
    inputs, packed, addresses = check_packed(tensors, layout, None)
    chosen, device = packed.layout, device_of(inputs)
    if out is not None:
        check_tensor("out", out)
        device = device if inputs else out.device
        check_buffer("out", out, chosen, device)
        check_writable("out", out)
    findings.check(device, chosen.dtype)
    made = out is None
    if out is None:
        out = torch.empty(chosen.numel, dtype=chosen.dtype, device=device)
    bounds = chosen.segments
    return Call(
        *("pack", inputs, out, bounds, findings), packed=packed, made=made, addresses=addresses
    )


def check_unpack(
    buffer: Tensor, tensors: Sequence[Tensor], layout: Layout | None, findings: Findings
) -> Call:
    """Check the arguments of `unpack`."""
    check_tensor("buffer", buffer)
    inputs, packed, addresses = check_packed(tensors, layout, buffer.dtype)
    device = inputs[0].device if inputs else buffer.device
    check_buffer("buffer", buffer, packed.layout, device)
    check_all_writable("tensors", inputs)
    findings.check(device, *packed.dtypes)
    bounds = packed.layout.segments
    return Call("unpack", inputs, buffer, bounds, findings, packed=packed, addresses=addresses)


def check_sum_n(
    tensors: Sequence[Tensor],
    out: Tensor | None,
    dtype: torch.dtype | None,
    order: str,
    accumulate: torch.dtype | None,
    findings: Findings,
) -> Call:
    """Check the arguments of `sum_n`, and make the output if `out` is None."""
    inputs, addresses = check_equals(tensors)
    check_order(order)
    check_accumulate(accumulate, inputs[0].dtype)
    target = check_target(out, "tensors[0]", inputs[0], dtype)
    findings.check(inputs[0].device, target.dtype)
    return Call(
        "sum_n",
        inputs,
        target,
        (0, target.numel()),
        findings,
        order=order,
        accumulate=accumulate,
        made=out is None,
        addresses=addresses,
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
    left = check_tensor("a", a)
    inputs = [left, check_like("b", b, "a", left, any_dtype=True)]
    target = check_target(out, "a", left, dtype)
    findings.check(left.device, target.dtype)
    bounds = 0, target.numel()
    return Call("scaled_add", inputs, target, bounds, findings, made=out is None)


def check_dot_and_norms(a: Tensor, b: Tensor, segments: Sequence[int] | None) -> Call:
    """Check the arguments of `dot_and_norms`, and make the rows of dots, as `out`."""
    left = check_tensor("a", a)
    inputs = [left, check_like("b", b, "a", left)]
    bounds = check_segments(segments, left.numel())
    dots = torch.empty(len(bounds) - 1, 3, dtype=torch.float64, device=left.device)
    return Call("dot_and_norms", inputs, dots, bounds, made=True)


def check_combine(
    a: Tensor,
    b: Tensor,
    dots: Tensor,
    segments: Sequence[int] | None,
    out: Tensor | None,
    findings: Findings,
) -> Call:
    """Check the arguments of `combine`, and make the output if `out` is None."""
    inputs, target = _check_pair(a, b, out)
    bounds = check_segments(segments, target.numel())
    check_dots(dots, len(bounds) - 1, target)
    findings.check(target.device, target.dtype)
    return Call("combine", inputs, target, bounds, findings, dots=dots, made=out is None)


def check_adasum(
    a: Tensor,
    b: Tensor,
    segments: Sequence[int] | None,
    out: Tensor | None,
    findings: Findings,
    cooperative: bool,
) -> Call:
    """Check the arguments of `adasum`, and make the output if `out` is None."""
    inputs, target = _check_pair(a, b, out)
    findings.check(inputs[0].device, inputs[0].dtype)
    bounds = check_segments(segments, inputs[0].numel())
    made = out is None
    return Call("adasum", inputs, target, bounds, findings, cooperative=cooperative, made=made)


def device_of(tensors: Sequence[Tensor]) -> torch.device:
    """Return the device of a list of tensors; the CPU if the list is empty."""
    return tensors[0].device if tensors else torch.device("cpu")


def check_equals(tensors: object) -> tuple[list[Tensor], array[int]]:
    """Return a list's tensors, at least one, if they are equal in shape, dtype and device.

    With their addresses, or none where these are yet to be read.
    """
    given = read_list("tensors", tensors)
    if not given:
        raise ValueError(EMPTY)
    first = check_tensor("tensors[0]", given[0])
    count = len(given)
    if count >= MANY and not tracing():
        addresses = all_like(given, [first.dtype] * count, [first.shape] * count, first.device)
        if addresses is not None:
            return given, addresses
    for i, tensor in enumerate(given[1:], 1):
        check_like(f"tensors[{i}]", tensor, "tensors[0]", first)
    return given, UNREAD


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


def _all_rise(bounds: tuple[Any, ...], numel: int) -> bool:
    """Whether these are ints that rise from 0 to `numel`; fast, since a model has hundreds."""
    return (
        {*map(type, bounds)} == {int}
        and bounds[0] == 0
        and bounds[-1] == numel
        and all(map(operator.le, bounds, bounds[1:]))
    )


def check_segments(segments: object, numel: int) -> tuple[int, ...]:
    """Return the boundaries (0, e1, ..., numel) as a tuple; None means one segment.

    Raises:
        TypeError: A boundary is not an int.
        ValueError: The boundaries do not rise from 0 to `numel`.
    """
    if segments is None:
        return (0, numel)
    if isinstance(segments, Tensor) or not isinstance(segments, Sequence):
        raise TypeError(
            f"segments must be a list or tuple of ints, not {type(segments).__name__}: "
            "pass tensor.tolist()"
        )
    bounds = tuple(segments)
    if not is_compiling() and _all_rise(bounds, numel):
        return bounds
    if not all(type(bound) is int for bound in bounds):
        bad = next(bound for bound in bounds if type(bound) is not int)
        raise TypeError(f"segments must hold ints, not {type(bad).__name__}")
    if not bounds or bounds[0] != 0 or bounds[-1] != numel:
        ends = f"{bounds[0]} and {bounds[-1]}" if bounds else "nothing"
        raise ValueError(
            f"segments must start at 0 and end at the {numel} elements of a tensor, not {ends}"
        )
    for i, (low, high) in enumerate(itertools.pairwise(bounds)):
        if high < low:
            raise ValueError(f"segments must not decrease, but [{i + 1}] = {high} < [{i}] = {low}")
    return bounds


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
