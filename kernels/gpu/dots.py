"""Device functions of the projection: a tile's dots and norms, partials, coefficients."""

from __future__ import annotations

import math
import sys

from kernels.gpu.launcher import jit, tl, triton
from kernels.gpu.tiles import double_power_of_two, power_of_two

# A squared norm below this has no meaningful direction: its vector is taken as it is.
TINY = math.sqrt(sys.float_info.min)
_TINY = TINY if triton is None else tl.constexpr(TINY)
_SUM_BLOCK = 256 if triton is None else tl.constexpr(256)


@jit
def _normalised(x):
    """(x / 2**e in float32, 2**e in float64), e the exponent of the largest magnitude in x.

    Scaled so, neither squares nor products of a tile leave float32. NaN and Inf keep e = 0.
    """
    x = x.to(tl.float32)
    field = tl.max(tl.abs(x), axis=0).to(tl.int32, bitcast=True) >> 23
    # 2**-127 is no normal number: the two largest exponents share a scale.
    exponent = tl.where(field == 255, 0, tl.minimum(field - 127, 126))
    return x * power_of_two(-exponent), double_power_of_two(exponent)


@jit
def tile_dots(x, y, WIDE: tl.constexpr):
    """float64 (x.y, |x|^2, |y|^2) of one tile."""
    if tl.float64 == WIDE:
        return tl.sum(x * y, axis=0), tl.sum(x * x, axis=0), tl.sum(y * y, axis=0)
    if x.dtype == tl.float16:
        # Products of float16, 2**-48 to 2**32, and sums of a tile of them stay within float32.
        u, v = x.to(tl.float32), y.to(tl.float32)
        p = tl.full([], 1.0, tl.float64)
        q = p
    else:
        u, p = _normalised(x)
        v, q = _normalised(y)
    dot = tl.sum(u * v, axis=0).to(tl.float64) * p * q
    return (
        dot,
        tl.sum(u * u, axis=0).to(tl.float64) * p * p,
        tl.sum(v * v, axis=0).to(tl.float64) * q * q,
    )


@jit
def coefficient(dot, norm):
    """1 - dot / (2 norm); 1 for a tiny norm, and NaN, which is not below anything, for NaN."""
    tiny = norm < _TINY
    return tl.where(tiny, 1.0, 1.0 - dot / (2.0 * tl.where(tiny, 1.0, norm)))


@jit
def add_partials(partials, first, chunk_count):
    """The sums, in chunk order, of the partials of one segment. Read past the L1 cache."""
    k = tl.arange(0, _SUM_BLOCK)
    dot = tl.zeros([_SUM_BLOCK], tl.float64)
    norm_a = tl.zeros([_SUM_BLOCK], tl.float64)
    norm_b = tl.zeros([_SUM_BLOCK], tl.float64)
    for done in range(0, chunk_count, _SUM_BLOCK):
        inside = done + k < chunk_count
        row = partials + 3 * (first + done + k)
        dot += tl.load(row, mask=inside, other=0.0, cache_modifier=".cg")
        norm_a += tl.load(row + 1, mask=inside, other=0.0, cache_modifier=".cg")
        norm_b += tl.load(row + 2, mask=inside, other=0.0, cache_modifier=".cg")
    return tl.sum(dot, axis=0), tl.sum(norm_a, axis=0), tl.sum(norm_b, axis=0)


@jit
def store_row(row, dot, norm_a, norm_b):
    tl.store(row, dot)
    tl.store(row + 1, norm_a)
    tl.store(row + 2, norm_b)
