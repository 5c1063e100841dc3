"""Device functions of double-double: numbers that are an unevaluated sum high + low of float64.

They have about 106 bits (T. J. Dekker: A floating-point technique for extending the available
precision, 1971). Products are written as fused multiply-adds, so that the compiler cannot fuse them
with sums.
"""

from __future__ import annotations

from kernels.gpu.launcher import jit, tl


@jit
def two_sum(a, b):
    """The rounded sum and its rounding error (Knuth)."""
    total = a + b
    other = total - a
    return total, (a - (total - other)) + (b - other)


@jit
def normalised(high, low):
    """The same number with `low` at most half a unit in the last place of `high`."""
    total = high + low
    return total, low - (total - high)


@jit
def exact_product(a, b):
    """The rounded product and its rounding error."""
    high = tl.fma(a, b, 0.0)
    return high, tl.fma(a, b, -high)


@jit
def add(a_high, a_low, b_high, b_low):
    """The sum, with a relative error of 2**-104."""
    high, lost = two_sum(a_high, b_high)
    low, rest = two_sum(a_low, b_low)
    high, low = normalised(high, lost + low)
    return normalised(high, low + rest)


@jit
def multiply(a_high, a_low, b_high, b_low):
    """The product, with a relative error of 2**-103."""
    high, lost = exact_product(a_high, b_high)
    return normalised(high, tl.fma(a_high, b_low, tl.fma(a_low, b_high, lost)))


@jit
def divide(a_high, a_low, b_high, b_low):
    """The quotient, by long division: each part divides the remainder of the parts before."""
    first = a_high / b_high
    high, low = multiply(b_high, b_low, -first, 0.0)
    a_high, a_low = add(a_high, a_low, high, low)
    second = a_high / b_high
    high, low = multiply(b_high, b_low, -second, 0.0)
    a_high, a_low = add(a_high, a_low, high, low)
    high, low = normalised(first, second)
    return add(high, low, a_high / b_high, 0.0)
