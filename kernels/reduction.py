"""sum_n and scaled_add: n tensors to one in a single pass, accumulated wider than stored."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import _cpu
from kernels._check import check_in_place, check_like, check_pair, check_scalar, check_tensors


@torch.no_grad()
def sum_n(tensors: Sequence[Tensor], *, out: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """scale * (tensors[0] + tensors[1] + ...), added in list order.

    tensors: at least one, equal in shape, dtype and device. out: written and returned; may be one
    of the tensors. Sums are taken in float32 (float64 for float64) and rounded once. Raises
    TypeError or ValueError before anything is written.
    """
    checked, target = _check_sum(tensors, out)
    scale = check_scalar("scale", scale)
    _cpu.sum_n(checked, target, scale)
    return target


@torch.no_grad()
def scaled_add(
    a: Tensor, b: Tensor, *, alpha: float = 1.0, beta: float = 1.0, out: Tensor | None = None
) -> Tensor:
    """alpha*a + beta*b, in float32 (float64 for float64), rounded once.

    a, b: equal in shape, dtype and device. out: written and returned; may be a or b. Raises
    TypeError or ValueError before anything is written.
    """
    left, right, target = check_pair(a, b, out)
    alpha, beta = check_scalar("alpha", alpha), check_scalar("beta", beta)
    _cpu.scaled_add(left, right, alpha, beta, target, (0, left.numel()))
    return target


def _check_sum(tensors: Sequence[Tensor], out: Tensor | None) -> tuple[list[Tensor], Tensor]:
    checked = check_tensors("tensors", tensors)
    if not checked:
        raise ValueError("tensors is empty: pass at least one tensor to sum")
    first = checked[0]
    for i, tensor in enumerate(checked):
        check_like(f"tensors[{i}]", tensor, "tensors[0]", first)
    if out is None:
        return checked, torch.empty_like(first, memory_format=torch.contiguous_format)
    check_like("out", out, "tensors[0]", first)
    for i, tensor in enumerate(checked):
        check_in_place("out", out, f"tensors[{i}]", tensor)
    return checked, out


def sum_n_bytes(tensors: Sequence[Tensor]) -> int:
    """Least traffic of `sum_n`, in bytes: every tensor read once, one written."""
    return (len(tensors) + 1) * tensors[0].numel() * tensors[0].element_size()


def scaled_add_bytes(a: Tensor, b: Tensor) -> int:
    """Least traffic of `scaled_add`, in bytes: two tensors read, one written."""
    return 2 * a.numel() * a.element_size() + b.numel() * b.element_size()


def sum_n_reference(tensors: Sequence[Tensor], *, scale: float = 1.0) -> Tensor:
    """`sum_n` evaluated in float64 and left there."""
    total = torch.zeros_like(tensors[0], dtype=torch.float64)
    for tensor in tensors:
        total += tensor.detach().double()
    return total * scale


def scaled_add_reference(a: Tensor, b: Tensor, *, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    """`scaled_add` evaluated in float64 and left there."""
    return alpha * a.detach().double() + beta * b.detach().double()
