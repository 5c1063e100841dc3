"""Trees of Adasum for the tests, and what they give without rounding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from decimal import Context, Decimal, localcontext

from torch import Tensor

from kernels.arithmetic import TINY

Rows = list[tuple[int, int, int, int]]
DIGITS = Context(prec=120)


def balanced(count: int) -> Rows:
    """The contract's tree: of no power of two the first pairs fold, then adjacent ones pair."""
    rows: Rows = []
    leaves = [1] * count

    def join(left: int, right: int) -> int:
        rows.append((left, right, leaves[left], leaves[right]))
        leaves[left] += leaves[right]
        return left

    extra = count - (1 << (count.bit_length() - 1))
    standing = [join(2 * i, 2 * i + 1) for i in range(extra)] + [*range(2 * extra, count)]
    while len(standing) > 1:
        standing = [join(*pair) for pair in zip(standing[::2], standing[1::2], strict=True)]
    return rows


def in_line(count: int) -> Rows:
    return [(0, i, i, 1) for i in range(1, count)]


def unweighted(rows: Rows) -> Rows:
    return [(left, right, 1, 1) for left, right, _, _ in rows]


def exactly(tensor: Tensor) -> list[Decimal]:
    return [Decimal(value) for value in tensor.double().view(-1).tolist()]


def dot(a: Sequence[Decimal], b: Sequence[Decimal]) -> Decimal:
    with localcontext(DIGITS):
        return sum((x * y for x, y in zip(a, b, strict=True)), Decimal(0))


def _join(a: list[Decimal], b: list[Decimal], p: float, q: float) -> list[Decimal]:
    """The pairwise formula on the vectors themselves."""
    product, whole = dot(a, b), Decimal(p) + Decimal(q)
    factors = []
    for vector, weight in ((a, p), (b, q)):
        norm = dot(vector, vector)
        share = Decimal(weight) / whole
        factors.append(Decimal(1) if norm < Decimal(TINY) else 1 - share * product / norm)
    return [factors[0] * x + factors[1] * y for x, y in zip(a, b, strict=True)]


def adasum_of(tensors: Sequence[Tensor], rows: Rows, segments: Sequence[int]) -> list[Decimal]:
    """Adasum by these pairs, a segment at a time, with 120 digits."""
    found: list[Decimal] = []
    with localcontext(DIGITS):
        for low, high in itertools.pairwise(segments):
            vectors = [exactly(tensor.view(-1)[low:high]) for tensor in tensors]
            last = 0
            for left, right, p, q in rows:
                vectors[left], last = _join(vectors[left], vectors[right], p, q), left
            found += vectors[last]
    return found


def distance(tensor: Tensor, expected: Sequence[Decimal]) -> float:
    """|tensor - expected|."""
    with localcontext(DIGITS):
        gaps = [got - want for got, want in zip(exactly(tensor), expected, strict=True)]
        return float(dot(gaps, gaps).sqrt())


def length(vector: Sequence[Decimal]) -> float:
    return math.sqrt(float(dot(vector, vector)))
