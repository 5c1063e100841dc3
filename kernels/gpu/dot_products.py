"""Device functions of dot products, their partial sums, and the coefficients."""

from __future__ import annotations

from kernels.arithmetic import CANCELLED, TINY
from kernels.gpu.launcher import jit, tl, triton
from kernels.gpu.tiles import THREADS, double_power_of_two, load_edges, power_of_two

_TINY = TINY if triton is None else tl.constexpr(TINY)
_CANCELLED = CANCELLED if triton is None else tl.constexpr(CANCELLED)
_SUM_BLOCK = 256 if triton is None else tl.constexpr(256)


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
    return dot, norm_a, norm_b


@jit
def _add_three(d, p, q, e, r, s):
    return d + e, p + r, q + s


@jit
def over_threads(dot, norm_a, norm_b):
    """The sums of three tensors over the threads, with common barriers."""
    return tl.reduce((dot, norm_a, norm_b), 0, _add_three)


@jit
def coefficient(dot, factor, norm):
    """1 - dot / (factor * norm); 1 for a tiny norm, and NaN for a norm of NaN.

    It is NaN, too, if factor * norm overflows float64, since a division by Inf would lose `dot`.
    """
    tiny = norm < _TINY
    scaled = factor * tl.where(tiny, 1.0, norm)
    # An infinite factor loses nothing: one weight is negligible compared with the other.
    lost = (scaled == float("inf")) & (factor < float("inf"))
    return tl.where(tiny, 1.0, tl.where(lost, float("nan"), 1.0 - dot / scaled))


@jit
def cancels(dot, norm_a, norm_b, alpha, beta):
    """Whether alpha a + beta b is NaN, or so much shorter than both that float32 would lose it."""
    # Fused explicitly, so that all kernels get the same result.
    apart = tl.fma(alpha * alpha, norm_a, beta * beta * norm_b)
    # A comparison with NaN is false.
    return (tl.fma(2 * alpha * beta, dot, apart) >= _CANCELLED * apart) == 0


@jit
def add_partials(partials, first, chunk_count):
    """The sums, in chunk order, of one segment's partials, which are read past the L1 cache."""
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
    return over_threads(dot, norm_a, norm_b)


@jit
def store_row(row, dot, norm_a, norm_b):
    """Store one row of dot products and squared norms."""
    tl.store(row, dot)
    tl.store(row + 1, norm_a)
    tl.store(row + 2, norm_b)


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
def arrive(partials, arrivals, dots, share, segment, count, mask):
    """Add `count` chunks to their segment's counter; return (the old counter, whether complete).

    Protocol: each program stores its partials, then counts them in `arrivals[segment]` (release).
    The program that completes the count (acquire) sees all partials, and stores the segment's row.
    mask: The bits of the counter that count chunks.
    """
    chunk_count = tl.load(share + 1)
    tl.debug_barrier()
    before = tl.atomic_add(arrivals + segment, count, sem="acq_rel")
    last = (before & mask) + count == chunk_count
    if last:
        dot, norm_a, norm_b = add_partials(partials, tl.load(share), chunk_count)
        store_row(dots + 3 * segment, dot, norm_a, norm_b)
    return before, last


@jit
def edge_dots(a, b, start, length, before, inner, DTYPE: tl.constexpr, WIDE: tl.constexpr):
    """`thread_dots` of a chunk's elements outside of its whole vectors."""
    offset = start * (DTYPE.primitive_bitwidth // 8)
    x = load_edges(a.to(tl.int64) + offset, before, inner, length, DTYPE)
    y = load_edges(b.to(tl.int64) + offset, before, inner, length, DTYPE)
    return thread_dots(x, y, 1, WIDE)
