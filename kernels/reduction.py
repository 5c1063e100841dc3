"""sum_n and scaled_add: sums of n tensors in one pass, in a wider dtype than they are stored in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from kernels.arguments import (
    check,
    check_accumulate,
    check_all_sized,
    check_equals,
    check_order,
)
from kernels.arithmetic import joined
from kernels.binding import run_direct
from kernels.plans import ScaledAddPlan, ScaledPlan
from kernels.torch_ops import check_and_run
from kernels.validation import (
    check_dtype,
    check_factor,
    check_like,
    check_sized,
    check_tensor,
)


def sum_n(
    tensors: Iterable[Tensor],
    *more: Tensor,
    out: Tensor | None = None,
    scale: float | Tensor = 1.0,
    dtype: torch.dtype | None = None,
    order: Literal["list", "tree"] = "list",
    accumulate: torch.dtype | None = None,
    found_inf: Tensor | None = None,
) -> Tensor:
    """Return scale * (tensors[0] + tensors[1] + ...), added in a specified order.

    Sums are computed in float32 (float64 if either dtype is float64) and rounded once, at the end,
    or after every addition to `accumulate`. The bits depend only on the values, the order and
    `accumulate`. Errors are those of `pack`.

    Args:
        tensors: At least one, equal in shape, dtype and device, and contiguous or in one order in
            memory, such as `torch.channels_last`, which `out` has, too.
        more: An error: tensors are passed as one list.
        out: The tensor to write and return, which may be one of the tensors. None makes one.
        scale: The factor of the sum, as in `pack`.
        dtype: The output's dtype; if None, the dtype of `out` or of the tensors.
        order: "list" adds from left to right. "tree" adds as a balanced tree: with P the largest
            power of two that is at most their number n, the first 2 (n - P) tensors pair, then
            neighbours pair, then neighbouring pairs, and so on.
        accumulate: The dtype to which every addition is rounded: the tensors' dtype, which gives
            the bits of repeated `torch.add`; torch.float32, except for float64 tensors; or None for
            the dtype of the computation.
        found_inf: As in `pack`.

    Examples:
        >>> kernels.sum_n([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])], scale=0.5)
        tensor([2., 3.])
    """
    if more:
        raise TypeError("sum_n takes its tensors as one list: sum_n([a, b])")
    scale = check_factor("scale", scale)
    given = tensors, out, dtype, scale, 1.0, None, found_inf, None, order, accumulate
    total = run_direct("sum_n", given)
    return check_and_run("sum_n", *given) if total is None else total


def plan_sum_n(
    tensors: Iterable[Tensor],
    *,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    order: Literal["list", "tree"] = "list",
    accumulate: torch.dtype | None = None,
    found_inf: Tensor | None = None,
) -> ScaledPlan[Tensor]:
    """Plan `sum_n` of these tensors: run it as plan(scale).

    Examples:
        >>> a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
        >>> plan = kernels.plan_sum_n([a, b], out=a)
        >>> plan()
        tensor([4., 6.])
        >>> plan()  # reads the result of the last run
        tensor([ 7., 10.])
    """
    others = found_inf, None, order, accumulate
    return ScaledPlan(check("sum_n", tensors, out, dtype, None, *others))


def scaled_add(
    a: Tensor,
    b: Tensor,
    *,
    alpha: float | Tensor = 1.0,
    beta: float | Tensor = 1.0,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    found_inf: Tensor | None = None,
) -> Tensor:
    """Return alpha*a + beta*b, computed in float32 (float64 if a dtype is), rounded once.

    Errors are those of `pack`.

    Args:
        a: A tensor of any supported dtype, in memory as the tensors of `sum_n`.
        b: Equal to a in shape and device, of any supported dtype.
        alpha: The factor of a, as `scale` in `pack`.
        beta: The factor of b, as `scale` in `pack`.
        out: The tensor to write and return, which may be a or b. None makes one.
        dtype: The output's dtype; if None, the dtype of `out` or of a.
        found_inf: As in `pack`.

    Examples:
        >>> a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
        >>> kernels.scaled_add(a, b, alpha=2.0, beta=-1.0)
        tensor([-1.,  0.])
    """
    alpha, beta = check_factor("alpha", alpha), check_factor("beta", beta)
    given = (a, b), out, dtype, alpha, beta, None, found_inf
    total = run_direct("scaled_add", given)
    return check_and_run("scaled_add", *given) if total is None else total


def plan_scaled_add(
    a: Tensor,
    b: Tensor,
    *,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    found_inf: Tensor | None = None,
) -> ScaledAddPlan:
    """Plan `scaled_add` of a and b: run it as plan(alpha, beta).

    Examples:
        >>> plan = kernels.plan_scaled_add(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
        >>> plan(alpha=2.0, beta=-1.0)
        tensor([-1.,  0.])
    """
    return ScaledAddPlan(check("scaled_add", (a, b), out, dtype, None, found_inf))


def sum_n_bytes(tensors: Iterable[Tensor], *, dtype: torch.dtype | None = None) -> int:
    """Return the least traffic of `sum_n` in bytes: all tensors read, one of `dtype` written.

    Examples:
        >>> kernels.sum_n_bytes([torch.ones(2), torch.ones(2), torch.ones(2)])  # 24 read, 8 written
        32
    """
    sized = check_all_sized(tensors)
    written = sized[0].numel() * _written(sized[0], dtype).itemsize
    return sum(tensor.nbytes for tensor in sized) + written


def scaled_add_bytes(a: Tensor, b: Tensor, *, dtype: torch.dtype | None = None) -> int:
    """Return the least traffic of `scaled_add` in bytes: a and b read, one of `dtype` written.

    Examples:
        >>> kernels.scaled_add_bytes(torch.ones(2), torch.ones(2))  # 16 read, 8 written
        24
    """
    left, right = check_sized("a", a), check_sized("b", b)
    return left.nbytes + right.nbytes + left.numel() * _written(left, dtype).itemsize


def _written(like: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is None:
        return like.dtype
    check_dtype("dtype", dtype)
    return dtype


def sum_n_reference(
    tensors: Iterable[Tensor],
    *,
    scale: float | Tensor = 1.0,
    order: Literal["list", "tree"] = "list",
    accumulate: torch.dtype | None = None,
) -> Tensor:
    """Return `sum_n`, computed and returned in float64.

    Each sum of two is rounded to `accumulate`, if that is given.

    Examples:
        >>> kernels.sum_n_reference([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])])
        tensor([4., 6.], dtype=torch.float64)
    """
    checked = check_equals(tensors)
    scale = check_factor("scale", scale)
    check_order(order)
    check_accumulate(accumulate, checked[0].dtype)

    def add(left: Tensor, right: Tensor) -> Tensor:
        return (left + right).to(accumulate or torch.float64).double()

    return joined(order, len(checked), lambda i: checked[i].detach().double(), add) * scale


def scaled_add_reference(
    a: Tensor, b: Tensor, *, alpha: float | Tensor = 1.0, beta: float | Tensor = 1.0
) -> Tensor:
    """Return `scaled_add`, computed and returned in float64.

    Examples:
        >>> kernels.scaled_add_reference(torch.tensor([1.0]), torch.tensor([3.0]), alpha=2.0)
        tensor([5.], dtype=torch.float64)
    """
    left = check_tensor("a", a, any_order=True)
    right = check_like("b", b, "a", left, any_dtype=True)
    alpha, beta = check_factor("alpha", alpha), check_factor("beta", beta)
    return alpha * left.detach().double() + beta * right.detach().double()
