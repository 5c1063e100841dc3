"""sum_n and scaled_add: n tensors to one in a single pass, accumulated wider than stored."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import _recall
from kernels._known import Known, KnownCalls, Place, place_of
from kernels.cpu import dispatch
from kernels.gpu import launcher, sum_kernels
from kernels.torch_ops import call, check_list, operator, read_list, returns_nothing, tracing
from kernels.validation import (
    check_dtype,
    check_found_inf,
    check_like,
    check_place,
    check_scalar,
    check_sequence,
    check_sized,
    check_target,
    check_tensor,
    new_like,
)


@operator(
    "sum_n(Tensor[] tensors, float scale, Tensor(a!) out, Tensor(b!)? found_inf) -> ()",
    fake=returns_nothing,
)
def _run_sum_n(
    tensors: list[Tensor],
    scale: float,
    out: Tensor,
    found_inf: Tensor | None,
) -> None:
    known = Known(dispatch.compute_dtype(tensors[0].dtype, out.dtype))
    place = place_of(tensors, known, out, found_inf, _TENSOR)
    _sum_known(tensors, known, place, scale, out, found_inf)


def _sum_known(
    tensors: list[Tensor],
    known: Known[torch.dtype],
    place: Place,
    scale: float,
    out: Tensor,
    found_inf: Tensor | None,
) -> None:
    if launcher.on_triton(out):
        sum_kernels.sum_n(tensors, place.inputs, known.value, out, scale, found_inf)
    else:
        dispatch.sum_n(tensors, place, known, out, scale, found_inf)


@operator(
    "scaled_add(Tensor a, Tensor b, float alpha, float beta, Tensor(a!) out, "
    "Tensor(b!)? found_inf) -> ()",
    fake=returns_nothing,
)
def _run_scaled_add(
    a: Tensor, b: Tensor, alpha: float, beta: float, out: Tensor, found_inf: Tensor | None
) -> None:
    known = Known(dispatch.compute_dtype(a.dtype, b.dtype, out.dtype))
    place = place_of((a, b), known, out, found_inf, _A_OR_B)
    _scaled_add_known(a, b, known, place, alpha, beta, out, found_inf)


def _scaled_add_known(
    a: Tensor,
    b: Tensor,
    known: Known[torch.dtype],
    place: Place,
    alpha: float,
    beta: float,
    out: Tensor,
    found_inf: Tensor | None,
) -> None:
    if launcher.on_triton(out):
        sum_kernels.scaled_add(a, b, known.value, alpha, beta, out, found_inf)
    else:
        dispatch.scaled_add(a, b, place, known, alpha, beta, out, found_inf)


def sum_n(
    tensors: Sequence[Tensor],
    *,
    out: Tensor | None = None,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
    found_inf: Tensor | None = None,
) -> Tensor:
    """scale * (tensors[0] + tensors[1] + ...), added in list order.

    tensors: at least one, equal in shape, dtype and device. out: written and returned; may be one
    of the tensors. dtype: of the output, None for that of `out` or, without one, of the tensors.
    found_inf: float32 of one element, set to 1 where an output is not finite, else left. Sums are
    taken in float32 (float64 where either dtype is float64) and rounded once. Raises TypeError or
    ValueError before anything is written.
    """
    done: Tensor | None = None
    if not tracing():
        done = _recall.sum_n(_SUMS.calls, dtype, tensors, scale, out, found_inf)
    return _sum_n(tensors, out, scale, dtype, found_inf) if done is None else done


def _sum_n(
    tensors: Sequence[Tensor],
    out: Tensor | None,
    scale: float,
    dtype: torch.dtype | None,
    found_inf: Tensor | None,
) -> Tensor:
    def check() -> torch.dtype:
        first = _check_equals(tensors)[0]
        check_found_inf(found_inf, first.device)
        return dispatch.compute_dtype(first.dtype, check_target(out, "tensors[0]", first, dtype))

    tensors, scale = read_list("tensors", tensors), check_scalar("scale", scale)
    traced = tracing()
    if traced:
        known, place = Known(check()), None
    else:
        known, place = _SUMS.checked(check, dtype, tensors, (found_inf,), out)
    target = new_like(tensors[0], dtype) if out is None else out
    if traced:
        call("sum_n", tensors, scale, target, found_inf)
    else:
        place = place or place_of(tensors, known, out, found_inf, _TENSOR)
        _sum_known(tensors, known, place, scale, target, found_inf)
    return target


def scaled_add(
    a: Tensor,
    b: Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    found_inf: Tensor | None = None,
) -> Tensor:
    """alpha*a + beta*b, in float32 (float64 where a dtype is float64), rounded once.

    a, b: equal in shape and device, each of its own dtype. out: written and returned; may be a or
    b. dtype: of the output, None for that of `out` or, without one, of a. found_inf: as in
    `sum_n`. Raises TypeError or ValueError before anything is written.
    """
    done: Tensor | None = None
    if not tracing():
        done = _recall.scaled_add(_SCALED_ADDS.calls, dtype, a, b, alpha, beta, out, found_inf)
    return _scaled_add(a, b, alpha, beta, out, dtype, found_inf) if done is None else done


def _scaled_add(
    a: Tensor,
    b: Tensor,
    alpha: float,
    beta: float,
    out: Tensor | None,
    dtype: torch.dtype | None,
    found_inf: Tensor | None,
) -> Tensor:
    def check() -> torch.dtype:
        left = check_tensor("a", a)
        right = check_place("b", b, "a", left)
        check_found_inf(found_inf, left.device)
        target = check_target(out, "a", left, dtype)
        return dispatch.compute_dtype(left.dtype, right.dtype, target)

    alpha, beta = check_scalar("alpha", alpha), check_scalar("beta", beta)
    traced = tracing()
    if traced:
        known, place = Known(check()), None
    else:
        known, place = _SCALED_ADDS.checked(check, dtype, (a, b), (found_inf,), out)
    target = new_like(a, dtype) if out is None else out
    if traced:
        call("scaled_add", a, b, alpha, beta, target, found_inf)
    else:
        place = place or place_of((a, b), known, out, found_inf, _A_OR_B)
        _scaled_add_known(a, b, known, place, alpha, beta, target, found_inf)
    return target


_EMPTY = "tensors is empty: pass at least one tensor to sum"
# How messages call what a function was given.
_TENSOR, _A_OR_B = "tensors[{}]".format, "ab".__getitem__
# The dtype in which they compute.
_SUMS: KnownCalls[torch.dtype] = KnownCalls()
_SCALED_ADDS: KnownCalls[torch.dtype] = KnownCalls()


def _check_equals(tensors: Sequence[Tensor]) -> list[Tensor]:
    checked = check_list("tensors", tensors)
    if not checked:
        raise ValueError(_EMPTY)
    first = checked[0]
    dtype, shape = first.dtype, first.shape
    for i in range(1, len(checked)):
        if checked[i].dtype != dtype or checked[i].shape != shape:
            check_like(f"tensors[{i}]", checked[i], "tensors[0]", first)
    return checked


def sum_n_bytes(tensors: Sequence[Tensor], *, dtype: torch.dtype | None = None) -> int:
    """Least traffic of `sum_n`, in bytes: every tensor read once, one of `dtype` written."""
    given = check_sequence("tensors", tensors)
    sized = [check_sized(f"tensors[{i}]", tensor) for i, tensor in enumerate(given)]
    if not sized:
        raise ValueError(_EMPTY)
    read = sum(tensor.numel() * tensor.element_size() for tensor in sized)
    return read + sized[0].numel() * _written(sized[0], dtype).itemsize


def scaled_add_bytes(a: Tensor, b: Tensor, *, dtype: torch.dtype | None = None) -> int:
    """Least traffic of `scaled_add`, in bytes: two tensors read, one of `dtype` written."""
    left, right = check_sized("a", a), check_sized("b", b)
    read = left.numel() * left.element_size() + right.numel() * right.element_size()
    return read + left.numel() * _written(left, dtype).itemsize


def _written(like: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is None:
        return like.dtype
    check_dtype("dtype", dtype)
    return dtype


def sum_n_reference(tensors: Sequence[Tensor], *, scale: float = 1.0) -> Tensor:
    """`sum_n` evaluated in float64 and left there; arguments and errors as there."""
    checked, scale = _check_equals(tensors), check_scalar("scale", scale)
    total = torch.zeros_like(checked[0], dtype=torch.float64, requires_grad=False)
    for tensor in checked:
        total += tensor.detach().double()
    return total * scale


def scaled_add_reference(a: Tensor, b: Tensor, *, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    """`scaled_add` evaluated in float64 and left there; arguments and errors as there."""
    left = check_tensor("a", a)
    right = check_place("b", b, "a", left)
    alpha, beta = check_scalar("alpha", alpha), check_scalar("beta", beta)
    return alpha * left.detach().double() + beta * right.detach().double()
