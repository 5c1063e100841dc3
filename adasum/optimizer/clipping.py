"""Clipping of gradients by their norm, sparse ones included."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adasum.optimizer.buckets.planning import Named


def norm_of(named: Sequence[Named], norm_type: float, foreach: bool | None) -> Tensor:
    """Return the norm of all gradients that this rank has."""
    gradients = [p.grad.detach() for _, p in named if p.grad is not None]
    values = [each.coalesce().values() if each.is_sparse else each for each in gradients]
    # Of no elements there is no largest.
    values = [each for each in values if each.numel()]
    return torch.nn.utils.get_total_norm(values, norm_type, foreach=foreach)


def clip(named: Sequence[Named], max_norm: float, total: Tensor, foreach: bool | None) -> None:
    """Scale the gradients, whose norm is `total`, so that it is `max_norm` at most."""
    dense = [p for _, p in named if p.grad is None or not p.grad.is_sparse]
    torch.nn.utils.clip_grads_with_norm_(dense, max_norm, total, foreach)
    # As torch's function computes it, which cannot scale sparse gradients.
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for _, parameter in named:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad * coefficient.to(parameter.grad)
