"""The precision of computations, common to GPU and CPU: results differ only by rounding."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import TypeVar

import torch

_Operand = TypeVar("_Operand")

# A vector whose squared norm is below this has no meaningful direction: its coefficient is 1.
TINY = math.sqrt(sys.float_info.min)
# If |alpha a + beta b|^2 is below this part of |alpha a|^2 + |beta b|^2, the blend is computed in
# float64. In float32, rounded coefficients and products make an error of eps (|alpha a| + |beta b|)
# together: above the limit, no more than eps sqrt(2 / CANCELLED) = 12 eps of the sum's length.
CANCELLED = 1 / 64
# If (sum |c_i| |g_i|)^2 may exceed this times |v|^2 for v = sum c_i g_i, a float64 Gram matrix
# would give |v|^2 to fewer than 23 bits, so it must be computed in double-double.
SPREAD_LIMIT = 2.0**30


def compute_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype of computations on tensors of these dtypes: float32 or float64."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def joined(
    order: str,
    count: int,
    operand: Callable[[int], _Operand],
    join: Callable[[_Operand, _Operand], _Operand],
) -> _Operand:
    """Return the result of joining `count` operands two at a time, each read when it is needed.

    Args:
        order: "list", from left to right; or "tree", the balanced tree: with P the largest power of
            two that is at most `count`, the first 2 (count - P) operands pair; these pairs and the
            other operands are P leaves. Neighbouring leaves pair, then neighbouring pairs, and so
            on.
        count: At least one.
        operand: Returns an operand by its index.
        join: Returns the join of two operands.
    """
    if order == "list":
        return functools.reduce(join, map(operand, range(count)))
    leaves = 1 << (count.bit_length() - 1)
    extra = count - leaves

    def branch(leaf: int, width: int) -> _Operand:
        if width > 1:
            half = width // 2
            return join(branch(leaf, half), branch(leaf + half, half))
        if leaf < extra:
            return join(operand(2 * leaf), operand(2 * leaf + 1))
        return operand(leaf + extra)

    return branch(0, leaves)
