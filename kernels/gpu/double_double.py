"""Device functions of double-double: numbers that are an unevaluated sum high + low of float64.

They have about 106 bits (T. J. Dekker: A floating-point technique for extending the available
precision, 1971). Products are written as fused multiply-adds, so that the compiler cannot fuse them
with sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kernels.gpu.launcher import jit, tl


class Double(NamedTuple):
    """A number, or a tile of numbers."""

    high: Any
    low: Any


@jit
def two_sum(a, b):
    """The rounded sum of two float64 and its rounding error (Knuth)."""
    total = a + b
    other = total - a
    return Double(total, (a - (total - other)) + (b - other))


@jit
def normalised(high, low):
    """The same number with `low` at most half a unit in the last place of `high`."""
    total = high + low
    return Double(total, low - (total - high))


@jit
def exact_product(a, b):
    """The rounded product of two float64 and its rounding error."""
    high = tl.fma(a, b, 0.0)
    return Double(high, tl.fma(a, b, -high))


@jit
def add(a, b):
    """The sum, with a relative error of 2**-104."""
    high, low = two_sum(a.high, b.high), two_sum(a.low, b.low)
    total = normalised(high.high, high.low + low.high)
    return normalised(total.high, total.low + low.low)


@jit
def multiply(a, b):
    """The product, with a relative error of 2**-103."""
    product = exact_product(a.high, b.high)
    return normalised(product.high, tl.fma(a.high, b.low, tl.fma(a.low, b.high, product.low)))


@jit
def divide(a, b):
    """The quotient, by long division: each part divides the remainder of the parts before."""
    first = a.high / b.high
    a = add(a, multiply(b, Double(-first, 0.0)))
    second = a.high / b.high
    a = add(a, multiply(b, Double(-second, 0.0)))
    return add(normalised(first, second), Double(a.high / b.high, 0.0))


@jit
def subtract(a, b):
    """The difference, as accurate as `add`."""
    return add(a, Double(-b.high, -b.low))


@jit
def choose(condition, a, b):
    """The elements of a for which the condition is true, and of b for which it is false."""
    return Double(tl.where(condition, a.high, b.high), tl.where(condition, a.low, b.low))


@jit
def _add_parts(a, a_low, b, b_low):
    return add(Double(a, a_low), Double(b, b_low))


@jit
def total(tile):
    """The sum of all elements of a one-dimensional tile."""
    high, low = tl.reduce(tile, 0, _add_parts)
    return Double(high, low)


@jit
def zeros(SHAPE: tl.constexpr):
    """A tile of zeros."""
    # Made separately, since Triton cannot carry one value through a loop under two names.
    return Double(tl.zeros(SHAPE, tl.float64), tl.zeros(SHAPE, tl.float64))


@jit
def store(place, x):
    """Store x at `place`, the low part behind the high part."""
    tl.store(place, x.high)
    tl.store(place + 1, x.low)


@jit
def pick(x, chosen):
    """The one row of a float64 matrix, or element of a vector, for which `chosen` is true."""
    return tl.sum(tl.where(chosen, x, 0.0), axis=0)


@jit
def pick_double(x, chosen):
    """`pick` of double-double."""
    return Double(pick(x.high, chosen), pick(x.low, chosen))
