"""Device functions of dot products, their partial sums, and the coefficients."""

from __future__ import annotations

from typing import Any, NamedTuple

from kernels.arithmetic import CANCELLED, TINY
from kernels.gpu.launcher import jit, tl, triton
from kernels.gpu.tiles import THREADS, double_power_of_two, load_edges, power_of_two

_TINY = TINY if triton is None else tl.constexpr(TINY)
_CANCELLED = CANCELLED if triton is None else tl.constexpr(CANCELLED)
_SUM_BLOCK = 256 if triton is None else tl.constexpr(256)


class Dots(NamedTuple):
    """float64 a.b, |a|^2 and |b|^2, or tiles of their partial sums."""

    dot: Any
    norm_a: Any
    norm_b: Any


@jit
def _normalised(x):
    """(x / 2**e in float32, e [T]) of x [K, T, V]; e is the exponent of each thread's largest.

    After this scaling, squares and their sums stay within float32. For NaN and Inf e is 0.
    """
    x = x.to(tl.float32)
    largest = tl.max(tl.max(tl.abs(x), axis=2), axis=0)
    field = largest.to(tl.int32, bitcast=True) >> 23
    # 2**-127 is not a normal number, so the two largest exponents share a scale.
    exponent = tl.where(field == 255, 0, tl.minimum(field - 127, 126))
    return x * power_of_two(-exponent)[None, :, None], exponent


@jit
def _thread_sums(x, y):
    """float64 x.y [T] of x and y [K, T, V], added in their own dtype.

    Additions are fused with products explicitly, as in `weigh`.
    """
    if x.shape[2] == 1:
        # A product that the compiler cannot fuse with an addition.
        products = tl.fma(x, y, 0.0)
    else:
        SHAPE: tl.constexpr = [x.shape[0], x.shape[1], x.shape[2] // 2, 2]
        even_x, odd_x = tl.split(tl.reshape(x, SHAPE))
        even_y, odd_y = tl.split(tl.reshape(y, SHAPE))
        products = tl.fma(even_x, even_y, odd_x * odd_y)
    return tl.sum(tl.sum(products, axis=2), axis=0).to(tl.float64)


@jit
def thread_dots(x, y, VECTOR: tl.constexpr, WIDE: tl.constexpr):
    """float64 (x.y, |x|^2, |y|^2) [THREADS] of each thread's elements of one tile.

    Each thread scales its elements by their largest exponent, adds them in float32 within the tile,
    and adds tiles in float64. Threads need nothing from each other before the last tile.
    """
    SHAPE: tl.constexpr = [x.shape[0] // (VECTOR * THREADS), THREADS, VECTOR]
    u, v = tl.reshape(x, SHAPE), tl.reshape(y, SHAPE)
    if tl.float64 == WIDE or x.dtype == tl.float16:
        # Products of float16, 2**-48 to 2**32, and sums of a tile of them stay within float32.
        u, v = u.to(WIDE), v.to(WIDE)
        dot, norm_a, norm_b = _thread_sums(u, v), _thread_sums(u, u), _thread_sums(v, v)
    else:
        u, p = _normalised(u)
        v, q = _normalised(v)
        dot = _thread_sums(u, v) * double_power_of_two(p + q)
        norm_a = _thread_sums(u, u) * double_power_of_two(2 * p)
        norm_b = _thread_sums(v, v) * double_power_of_two(2 * q)
    return Dots(dot, norm_a, norm_b)


@jit
def zero_dots(SIZE: tl.constexpr):
    """Tiles of zeros."""
    zeros = tl.zeros([SIZE], tl.float64)
    return Dots(zeros, zeros, zeros)


@jit
def add_dots(x, y):
    """The sums of the tiles."""
    return Dots(x.dot + y.dot, x.norm_a + y.norm_a, x.norm_b + y.norm_b)


@jit
def _add_three(d, p, q, e, r, s):
    return d + e, p + r, q + s


@jit
def over_threads(x):
    """The sums over the elements of the tiles, with common barriers."""
    dot, norm_a, norm_b = tl.reduce(x, 0, _add_three)
    return Dots(dot, norm_a, norm_b)


@jit
def _coefficient(dot, factor, norm):
    """1 - dot / (factor * norm); 1 for a tiny norm, and NaN for a norm of NaN.

    It is NaN, too, if factor * norm overflows float64, since a division by Inf would lose `dot`.
    """
    tiny = norm < _TINY
    scaled = factor * tl.where(tiny, 1.0, norm)
    # An infinite factor loses nothing: one weight is negligible compared with the other.
    lost = (scaled == float("inf")) & (factor < float("inf"))
    return tl.where(tiny, 1.0, tl.where(lost, float("nan"), 1.0 - dot / scaled))


@jit
def weights(row, factor_a, factor_b, CACHE: tl.constexpr):
    """(alpha, beta, whether they cancel) from a segment's row of dots.

    They cancel if alpha a + beta b is NaN, or so much shorter than both that float32 would lose it.
    CACHE: How to read the row.
    """
    dot = tl.load(row, cache_modifier=CACHE)
    norm_a = tl.load(row + 1, cache_modifier=CACHE)
    norm_b = tl.load(row + 2, cache_modifier=CACHE)
    alpha, beta = _coefficient(dot, factor_a, norm_a), _coefficient(dot, factor_b, norm_b)
    # Fused explicitly, so that all kernels get the same result.
    apart = tl.fma(alpha * alpha, norm_a, beta * beta * norm_b)
    # A comparison with NaN is false.
    cancelling = (tl.fma(2 * alpha * beta, dot, apart) >= _CANCELLED * apart) == 0
    return alpha, beta, cancelling


@jit
def add_partials(partials, first, chunk_count):
    """The sums, in chunk order, of one segment's partials, which are read past the L1 cache."""
    k = tl.arange(0, _SUM_BLOCK)
    sums = zero_dots(_SUM_BLOCK)
    for done in range(0, chunk_count, _SUM_BLOCK):
        inside = done + k < chunk_count
        row = partials + 3 * (first + done + k)
        dot = tl.load(row, mask=inside, other=0.0, cache_modifier=".cg")
        norm_a = tl.load(row + 1, mask=inside, other=0.0, cache_modifier=".cg")
        norm_b = tl.load(row + 2, mask=inside, other=0.0, cache_modifier=".cg")
        sums = add_dots(sums, Dots(dot, norm_a, norm_b))
    return over_threads(sums)


@jit
def store_row(row, dots):
    """Store one row of dot products and squared norms."""
    tl.store(row, dots.dot)
    tl.store(row + 1, dots.norm_a)
    tl.store(row + 2, dots.norm_b)


@jit
def is_last(arrivals, expected):
    """Count this program at `arrivals`; return whether it is the last of `expected` programs.

    Protocol: each program stores its partials, then counts itself (release). The last one (acquire)
    sees all partials. It sets the counter back to zero, ready for the next launch on this scratch
    memory.
    """
    tl.debug_barrier()
    last = tl.atomic_add(arrivals, 1, sem="acq_rel") + 1 == expected
    if last:
        tl.store(arrivals, tl.full([], 0, tl.int64))
    return last


@jit
def edge_dots(a, b, start, length, before, inner, DTYPE: tl.constexpr, WIDE: tl.constexpr):
    """`thread_dots` of a chunk's elements outside of its whole vectors."""
    offset = start * (DTYPE.primitive_bitwidth // 8)
    x = load_edges(a.to(tl.int64) + offset, before, inner, length, DTYPE)
    y = load_edges(b.to(tl.int64) + offset, before, inner, length, DTYPE)
    return thread_dots(x, y, 1, WIDE)
