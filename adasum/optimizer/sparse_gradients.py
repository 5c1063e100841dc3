"""Sparse gradients made dense for a reduction, and sparse again for SparseAdam."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def densify(parameters: Iterable[Tensor]) -> None:
    """Make sparse gradients dense."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()


def resparsify(parameters: Iterable[Tensor]) -> None:
    """Make dense gradients sparse by rows."""
    for parameter in parameters:
        if parameter.grad is not None and not parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_sparse(1)
