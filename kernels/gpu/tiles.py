"""Device functions on tiles that kernels share.

Loads and stores of 16 bytes, conversions, a flag for values that are not finite, exact powers of
two, weighted sums.
"""

from __future__ import annotations

from kernels.gpu.launcher import constexpr_function, jit, tl, triton

# A policy for the caches; in Triton 3.6 a device function's default cannot be a plain string.
_NORMAL = "" if triton is None else tl.constexpr("")
# Threads per program of the projection.
THREADS = 128 if triton is None else tl.constexpr(128)


@jit
def scalar_pointer(address, DTYPE: tl.constexpr):
    """Pointer to DTYPE at any int64 `address`.

    Triton gives all accesses to tiles of one shape one layout. If one of them may move 16 bytes per
    thread, neighbouring threads are 16 bytes apart in all of them, and accesses of single elements
    then use as little as an eighth of each sector. So no pointer of the scalar path may carry a
    hint, and in a kernel with both paths the scalar one works on parts of a tile, which have
    another shape. The loop over parts must not be unrolled: that would take registers from the
    vector path.
    """
    return address.to(tl.pointer_type(DTYPE))


@constexpr_function
def part_of(block, count, vectors=False):
    """Return the number of elements in each part of a tile on the scalar path.

    There are at least as many as threads in four warps: otherwise two threads would share an
    element, and one of them might load it after the other has stored it. With `vectors` the whole
    tile is one part, so that one piece of source is the code of both paths.
    """
    return block if vectors else max(block // count, 128)


@jit
def _elements(address, count, DTYPE: tl.constexpr, VECTORS: tl.constexpr, BLOCK: tl.constexpr):
    """Pointers to BLOCK elements at `address`, and a mask of the first `count`.

    With VECTORS both `address` and `count` are multiples of 16 bytes, which the compiler must see.
    """
    VECTOR: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    i, pointer = tl.arange(0, BLOCK), address.to(tl.pointer_type(DTYPE))
    if VECTORS:
        # The hint would be lost on the integer and, in Triton 3.6, on the result of another call.
        pointer = tl.multiple_of(pointer, 16)
        # A mask below such a count is constant over each vector, so vectors stay whole.
        count = count // VECTOR * VECTOR
    return pointer + i, i < tl.cast(count, tl.int32)


@jit
def load_tile(
    address,
    count,
    DTYPE: tl.constexpr,
    VECTORS: tl.constexpr,
    BLOCK: tl.constexpr,
    EVICT: tl.constexpr = _NORMAL,
):
    """Load the first `count` of at most BLOCK elements at `address`, with zeros behind them.

    VECTORS: As in `_elements`. EVICT: Triton's policy for the caches.
    """
    at, inside = _elements(address, count, DTYPE, VECTORS, BLOCK)
    return tl.load(at, mask=inside, other=0.0, eviction_policy=EVICT)


@jit
def store_tile(address, count, x, VECTORS: tl.constexpr, EVICT: tl.constexpr = _NORMAL):
    """Store the first `count` elements of x at `address`, in their own dtype; see `load_tile`."""
    at, inside = _elements(address, count, x.dtype, VECTORS, x.shape[0])
    tl.store(at, x, mask=inside, eviction_policy=EVICT)


@jit
def store_to_all(addresses, offset, count, x, rank, n, VECTORS: tl.constexpr):
    """Store a tile `offset` bytes behind each of n ranks' addresses, first the next rank's."""
    for k in range(n):
        to = tl.load(addresses + (rank + 1 + k) % n) + offset
        store_tile(to, count, x, VECTORS)


@jit
def no_tiles():
    """An empty tuple, to add tiles of any kind to."""
    return ()


@jit
def chunk_at(table, chunk):
    """(start, length, segment) of a chunk: a row of the table of `Chunks`."""
    row = table + 3 * chunk
    return tl.load(row), tl.load(row + 1), tl.load(row + 2)


@jit
def whole_vectors(start, length, VECTOR: tl.constexpr):
    """(elements before the first whole vector, elements in whole vectors) of a run of elements."""
    before = tl.minimum((VECTOR - start % VECTOR) % VECTOR, length)
    return before, (length - before) // VECTOR * VECTOR


@jit
def edge_pointer(address, before, inner, DTYPE: tl.constexpr):
    """Pointers [THREADS] to the elements at `address` before and after the whole vectors.

    There are length - inner of them, fewer than two vectors. Each thread has at most one: even if
    the output is an input, no thread loads an element that another has stored.
    """
    j = tl.arange(0, THREADS)
    return scalar_pointer(address, DTYPE) + tl.where(j < before, j, j + inner)


@jit
def load_edges(address, before, inner, length, DTYPE: tl.constexpr):
    """The elements of `edge_pointer`, with zeros behind them."""
    inside = tl.arange(0, THREADS) < length - inner
    return tl.load(edge_pointer(address, before, inner, DTYPE), mask=inside, other=0.0)


@jit
def convert(x, DTYPE: tl.constexpr):
    """Convert x to DTYPE.

    Conversions from float64 to 16 bits, and from bfloat16 to float64, go through float32, as in
    torch, because no hardware does them directly.
    """
    if (x.dtype == tl.bfloat16 and tl.float64 == DTYPE) or (
        x.dtype == tl.float64 and DTYPE.primitive_bitwidth == 16
    ):
        return x.to(tl.float32).to(DTYPE)
    return x.to(DTYPE)


@jit
def report(x, found_inf):
    """Set the float32 at `found_inf`, unless it is None, to 1 if x has an Inf or NaN.

    It is the epilogue of all kernels that write, before the tile is stored. All programs that store
    write the same value, so no atomic is needed. A test for x - x != 0 would be wrong: if x is a
    product, the compiler may fuse the two, which leaves the rounding error of a finite x.
    """
    if found_inf is not None:
        x = convert(x, tl.float32) if x.dtype != tl.float64 else x
        bad = tl.max(tl.where(tl.abs(x) < float("inf"), 0, 1), axis=0)
        tl.store(found_inf, 1.0, mask=bad > 0)


@jit
def float_of(bits, LIVE: tl.constexpr = None):
    """float64 from the bits of `bits_of` or, if LIVE, a number of that dtype at an address."""
    # One return: Triton types all of them, even those behind a constexpr condition.
    if LIVE is None:
        value = bits.to(tl.int64).to(tl.float64, bitcast=True)
    else:
        value = convert(tl.load(bits.to(tl.int64).to(tl.pointer_type(LIVE))), tl.float64)
    return value


@jit
def power_of_two(exponent):
    """float32 2**exponent for -126 <= exponent <= 127."""
    return ((exponent + 127) << 23).to(tl.int32).to(tl.float32, bitcast=True)


@jit
def double_power_of_two(exponent):
    """float64 2**exponent for -1022 <= exponent <= 1023."""
    return ((exponent + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)


@jit
def split(factor):
    """float64 `factor` as float32 (p, q, f, rest), with p*q*(f + rest) = factor * (1 +- 2**-49).

    p and q are powers of two, 1 <= |f| <= 2.

    Adasum's coefficients can be as large as the ratio of two norms, far beyond float32. Scaling by
    p and q is exact, so x*p*q*f rounds once and overflows only if the product itself does.
    """
    bits = factor.to(tl.int64, bitcast=True)
    exponent = ((bits >> 52) & 0x7FF) - 1023
    bounded = tl.minimum(tl.maximum(exponent, -250), 252)
    exponent = tl.where(exponent == 1024, 0, bounded)
    half = exponent >> 1
    fraction = factor * double_power_of_two(-exponent)
    f = fraction.to(tl.float32)
    rest = (fraction - f.to(tl.float64)).to(tl.float32)
    return power_of_two(half), power_of_two(exponent - half), f, rest


@jit
def weigh(x, y, alpha, beta, cancelling, WIDE: tl.constexpr):
    """alpha*x + beta*y in WIDE, with float64 scalars alpha and beta.

    The addition is fused with a product explicitly: the compiler chooses the product element by
    element, so the same numbers could round differently in another tile or kernel.

    cancelling: Keep the bits of coefficients and products that float32 drops, since a sum of nearly
    opposed tiles consists mainly of these. All elements of a segment take the same branch.
    """
    if tl.float64 == WIDE:
        u, v = convert(x, WIDE), convert(y, WIDE)
        # Opposed tensors of one length: their sum is exact if they nearly cancel. With a fused
        # product, the rounding error of the other product would remain.
        opposed = (alpha == beta) & (alpha > 1.0)
        return tl.where(opposed, (u + v) * alpha, tl.fma(u, alpha, v * beta))
    p, q, f, f_rest = split(alpha)
    r, s, g, g_rest = split(beta)
    u, v = x.to(WIDE) * p * q, y.to(WIDE) * r * s
    if cancelling:
        left, right = tl.fma(u, f, 0.0), tl.fma(v, g, 0.0)
        rest = tl.fma(u, f_rest, tl.fma(u, f, -left)) + tl.fma(v, g_rest, tl.fma(v, g, -right))
        z = left + right
        # Values that have overflowed have no rest.
        z = tl.where(tl.abs(z) < float("inf"), z + rest, z)
    else:
        z = tl.fma(u, f, v * g)
    return z
