"""Adasum and sums by NumPy alone, with bounds on what rounding may do to them.

Values are numpy.longdouble (64 bits of mantissa on x86, float64 elsewhere); nothing of the library
is used. With u = a/|a|, d/|a|^2 a is the projection (b.u)u of b on a, so that, of p and q ranks,

    adasum(a, b) = a + b - v P_a b - w P_b a with v = p/(p+q) and w = q/(p+q).

A change of a by da turns P_a by at most 2|da|/|a|, so changes of |da| and |db| change the answer by
at most (1 + w)|da| + (1 + v)|db| + 2v |da||b|/|a| + 2w |db||a|/|b|. A node of the tree adds its own
rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from tests.kernels.trees import Rows

Array = np.ndarray
# The contract: a coefficient whose squared norm is below sqrt(DBL_MIN) is 1.
SMALLEST = np.sqrt(np.longdouble(np.finfo(np.float64).tiny))


class Node(NamedTuple):
    """A value of a reduction, how far (L2) the computed one may be from it, and of how many ranks.

    Of nodes of a machine, which are equal, it may be how many nodes.
    """

    value: Array
    error: float
    ranks: int = 1


class Rounding(NamedTuple):
    """How results are rounded: to `dtype` once, from `wide` arithmetic.

    eps: of the dtype. wide: of the arithmetic. spacing: of the dtype's subnormals.
    """

    eps: float
    wide: float
    spacing: float

    @staticmethod
    def of(dtype: torch.dtype) -> Rounding:
        info = torch.finfo(dtype)
        wide = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
        # A coefficient smaller than 2^-60 or so is applied in float64, and products that are
        # subnormal in float32 lose at most float32's spacing, which is no more than the dtype's.
        return Rounding(info.eps, wide, info.smallest_normal * info.eps)


def exact(tensor: torch.Tensor) -> Array:
    """The values, without rounding."""
    return tensor.double().numpy().astype(np.longdouble)


def norm(vector: Array) -> float:
    return float(np.sqrt((vector * vector).sum()))


def pair(a: Node, b: Node, rounding: Rounding) -> Node:
    """adasum(a, b), by the formula with its dot products."""
    x, y = a.value, b.value
    dot, xx, yy = (x * y).sum(), (x * x).sum(), (y * y).sum()
    ranks = a.ranks + b.ranks
    v, w = (np.longdouble(each.ranks) / ranks for each in (a, b))
    left = 1 - v * dot / xx if xx >= SMALLEST else np.longdouble(1)
    right = 1 - w * dot / yy if yy >= SMALLEST else np.longdouble(1)
    value = left * x + right * y
    long, short = norm(x), norm(y)
    carried = float(1 + w) * a.error + float(1 + v) * b.error
    carried += float(2 * v) * a.error * short / long if long else 0.0
    carried += float(2 * w) * b.error * long / short if short else 0.0
    # Half a unit in the last place an element at the end; before that two products and an addition
    # in the wide dtype, and two coefficients rounded to it: 3 half units of each product's size.
    products = abs(float(left)) * long + abs(float(right)) * short
    own = 0.5 * rounding.eps * norm(value) + 1.5 * rounding.wide * products
    # Below the normal numbers a half unit is half the spacing; three such roundings an element.
    own += 1.5 * rounding.spacing * np.sqrt(x.size)
    return Node(value, carried + own, ranks)


def replay(leaves: Sequence[Node], rows: Rows, rounding: Rounding) -> Node:
    """Adasum by the pairs of these rows."""
    nodes, last = [*leaves], 0
    for left, right, _, _ in rows:
        nodes[left], last = pair(nodes[left], nodes[right], rounding), left
    return nodes[last]


def averages(vectors: Sequence[Array], local_size: int, rounding: Rounding) -> list[Node]:
    """The average of each node's vectors, as the leaves of what runs across nodes.

    Each vector is scaled and rounded, then local_size - 1 additions round: so many half units of
    the sum of the sizes, twice for what comes of products of these.
    """
    leaves = []
    for first in range(0, len(vectors), local_size):
        node = vectors[first : first + local_size]
        size = sum(map(norm, node)) / local_size
        error = local_size * rounding.eps * size
        error += local_size * rounding.spacing * np.sqrt(node[0].size)
        leaves.append(Node(sum(node) / local_size, error))
    return leaves
