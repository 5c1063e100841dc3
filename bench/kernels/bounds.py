"""How far kernels may be from float64: bounds that the benches and the tests of a GPU share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

import kernels


def rounding(dtype: torch.dtype, terms: int) -> float:
    """Bound for `terms` products summed wide: one rounding to the dtype, three wide ones a term."""
    return 0.505 * torch.finfo(dtype).eps + (3 * terms + 1) * _wide_eps(dtype)


def _wide_eps(dtype: torch.dtype) -> float:
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps


def dots_bound(dtype: torch.dtype, numel: int) -> float:
    """Error of a dot over the product of the norms: 32 additions a thread, then log2 n."""
    return (33 + math.log2(numel)) * _wide_eps(dtype)


def magnitudes(a: Tensor, b: Tensor, dots: Tensor, segments: Sequence[int] | None) -> Tensor:
    """Return for each element the magnitude by which errors of the coefficients count.

    With -2|a||b| for d a coefficient is 1 + |b|/|a|, which covers its size and its error.
    """
    worst = dots.clone()
    worst[:, 0] = -2 * (dots[:, 1] * dots[:, 2]).sqrt()
    return kernels.combine_reference(a.abs(), b.abs(), worst, segments)
