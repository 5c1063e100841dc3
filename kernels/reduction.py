"""sum_n and scaled_add: n tensors to one in a single pass, accumulated wider than stored."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.arguments import EMPTY, check_equals, check_scaled_add, check_sum_n
from kernels.findings import Findings
from kernels.plans import ScaledAddPlan, SumPlan
from kernels.torch_ops import run
from kernels.validation import (
    check_dtype,
    check_like,
    check_scalar,
    check_sized,
    check_tensor,
    read_list,
)


def sum_n(
    tensors: Sequence[Tensor],
    *,
    out: Tensor | None = None,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
    found_inf: Tensor | None = None,
    max_abs: Tensor | None = None,
) -> Tensor:
    """Return scale * (tensors[0] + tensors[1] + ...), added in list order.

    Sums are taken in float32 (float64 where either dtype is float64) and rounded once.

    Args:
        tensors: At least one, equal in shape, dtype and device.
        out: Written and returned; may be one of the tensors. None makes one.
        scale: Factor of the sum.
        dtype: Of the output, None for that of `out` or, without one, of the tensors.
        found_inf: float32 of one element, set to 1 where an output is not finite, else left.
        max_abs: One element, float64 where the output is, else float32; set to the largest
            magnitude written, NaN if any is.

    Raises:
        TypeError: An argument has another type or dtype. Nothing has been written.
        ValueError: One cannot be used, or overlaps what is written. Nothing has been written.
    """
    scale = check_scalar("scale", scale)
    total: Tensor = run(check_sum_n(tensors, out, dtype, Findings(found_inf, max_abs)), scale)
    return total


def plan_sum_n(
    tensors: Sequence[Tensor],
    *,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    found_inf: Tensor | None = None,
    max_abs: Tensor | None = None,
) -> SumPlan:
    """Plan `sum_n` of these tensors: run it as plan(scale).

    Arguments and errors as there, and of every plan: see `Plan`. Without `out` the plan has one of
    its own, the same at each run.
    """
    return SumPlan(check_sum_n(tensors, out, dtype, Findings(found_inf, max_abs)))


def scaled_add(
    a: Tensor,
    b: Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    found_inf: Tensor | None = None,
    max_abs: Tensor | None = None,
) -> Tensor:
    """Return alpha*a + beta*b, in float32 (float64 where a dtype is float64), rounded once.

    Args:
        a: Of any supported dtype.
        b: Equal to a in shape and device, of any supported dtype.
        alpha: Factor of a.
        beta: Factor of b.
        out: Written and returned; may be a or b. None makes one.
        dtype: Of the output, None for that of `out` or, without one, of a.
        found_inf: As in `sum_n`.
        max_abs: As in `sum_n`.

    Raises:
        TypeError: An argument has another type or dtype. Nothing has been written.
        ValueError: One cannot be used, or overlaps what is written. Nothing has been written.
    """
    alpha, beta = check_scalar("alpha", alpha), check_scalar("beta", beta)
    call = check_scaled_add(a, b, out, dtype, Findings(found_inf, max_abs))
    total: Tensor = run(call, alpha, beta)
    return total


def plan_scaled_add(
    a: Tensor,
    b: Tensor,
    *,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    found_inf: Tensor | None = None,
    max_abs: Tensor | None = None,
) -> ScaledAddPlan:
    """Plan `scaled_add` of a and b: run it as plan(alpha, beta).

    Arguments and errors as there, and of every plan: see `Plan`. Without `out` the plan has one of
    its own, the same at each run.
    """
    return ScaledAddPlan(check_scaled_add(a, b, out, dtype, Findings(found_inf, max_abs)))


def sum_n_bytes(tensors: Sequence[Tensor], *, dtype: torch.dtype | None = None) -> int:
    """Least traffic of `sum_n`, in bytes: every tensor read once, one of `dtype` written."""
    given = read_list("tensors", tensors)
    sized = [check_sized(f"tensors[{i}]", tensor) for i, tensor in enumerate(given)]
    if not sized:
        raise ValueError(EMPTY)
    written = sized[0].numel() * _written(sized[0], dtype).itemsize
    return sum(tensor.nbytes for tensor in sized) + written


def scaled_add_bytes(a: Tensor, b: Tensor, *, dtype: torch.dtype | None = None) -> int:
    """Least traffic of `scaled_add`, in bytes: two tensors read, one of `dtype` written."""
    left, right = check_sized("a", a), check_sized("b", b)
    return left.nbytes + right.nbytes + left.numel() * _written(left, dtype).itemsize


def _written(like: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is None:
        return like.dtype
    check_dtype("dtype", dtype)
    return dtype


def sum_n_reference(tensors: Sequence[Tensor], *, scale: float = 1.0) -> Tensor:
    """`sum_n` evaluated in float64 and left there; arguments and errors as there."""
    checked = check_equals(tensors)
    scale = check_scalar("scale", scale)
    total = torch.zeros_like(checked[0], dtype=torch.float64, requires_grad=False)
    for tensor in checked:
        total += tensor.detach().double()
    return total * scale


def scaled_add_reference(a: Tensor, b: Tensor, *, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    """`scaled_add` evaluated in float64 and left there; arguments and errors as there."""
    left = check_tensor("a", a)
    right = check_like("b", b, "a", left, any_dtype=True)
    alpha, beta = check_scalar("alpha", alpha), check_scalar("beta", beta)
    return alpha * left.detach().double() + beta * right.detach().double()
