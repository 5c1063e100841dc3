"""The whole of adasum in one cooperative launch; projection_kernels.py launches it."""

from __future__ import annotations

from kernels.gpu.dot_products import (
    add_dots,
    add_partials,
    edge_dots,
    over_threads,
    store_row,
    thread_dots,
    weights,
)
from kernels.gpu.launcher import Kernel, jit, tl
from kernels.gpu.tiles import (
    THREADS,
    chunk_at,
    edge_pointer,
    float_of,
    load_edges,
    load_tile,
    report,
    store_tile,
    weigh,
    whole_vectors,
)


def registers_of(capability: int) -> int:
    """Return the registers per thread, which determine how many programs are resident.

    On sm_120 the ptxas of Triton 3.6 would spill 40 bytes with 128 registers.
    """
    return 144 if capability // 10 == 12 else 128


# The low bits of a segment's counter count its chunks; a segment has fewer chunks than this.
CHUNKS_COUNTED = (1 << 20) - 1 if tl is None else tl.constexpr((1 << 20) - 1)


@jit
def _finish_chunk(
    factor_a,
    factor_b,
    x,
    y,
    a,
    b,
    chunk,
    table,
    dots,
    out,
    found_inf,
    DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write one chunk of the result from its tiles of a and b and the row of its segment.

    The row is read past the L1 cache.
    """
    BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    start, length, segment = chunk_at(table, chunk)
    alpha, beta, cancelling = weights(dots + 3 * segment, factor_a, factor_b, ".cg")
    before, inner = whole_vectors(start, length, 16 // BYTES)
    z = weigh(x, y, alpha, beta, cancelling, WIDE).to(DTYPE)
    report(z, found_inf)
    to = out.to(tl.int64) + start * BYTES
    store_tile(to + before * BYTES, inner, z, True)
    if inner != length:
        u = load_edges(a.to(tl.int64) + start * BYTES, before, inner, length, DTYPE)
        v = load_edges(b.to(tl.int64) + start * BYTES, before, inner, length, DTYPE)
        w = weigh(u, v, alpha, beta, cancelling, WIDE).to(DTYPE)
        report(w, found_inf)
        inside = tl.arange(0, THREADS) < length - inner
        tl.store(edge_pointer(to, before, inner, DTYPE), w, mask=inside)


@Kernel
def _one_launch_kernel(
    factor_a_bits: tl.int64,
    factor_b_bits: tl.int64,
    partials,
    arrivals,
    a,
    b,
    table,
    out,
    found_inf,
    chunk_count: tl.int32,
    segment_count: tl.int32,
    DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The whole of adasum in one cooperative launch, for chunks of one tile.

    Program p computes the chunks p, p + programs, ... Its last chunk stays in its registers;
    earlier ones, if any, are read again from L2 afterwards, in reverse order.

    Protocol: as in `is_last`, a program adds its chunks to their segment's counter, with one
    addition for successive chunks of one segment. The program that completes a segment stores the
    segment's row behind the partials. It then adds one (release) to the counter of complete
    segments, which lies behind the segments' counters. All programs wait until this counter
    includes all segments (acquire). It is never reset: each launch adds the number of segments. The
    upper bits of a segment's counter hold the number of launches; the lower bits are zero between
    launches. All programs must be resident at the same time, which a cooperative launch guarantees.
    No element of `out` is written before all of a and b have been read, so `out` may be one of
    them.
    """
    BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    VECTOR: tl.constexpr = 16 // BYTES
    programs = tl.num_programs(0)
    chunk = tl.program_id(0)
    dots = partials + 3 * chunk_count
    x = tl.zeros([BLOCK], DTYPE)
    y = tl.zeros([BLOCK], DTYPE)
    launches = tl.full([], 0, tl.int64)
    uncounted = tl.full([], 0, tl.int64)
    for current in range(chunk, chunk_count, programs):
        start, length, segment = chunk_at(table, current)
        before, inner = whole_vectors(start, length, VECTOR)
        offset = (start + before) * BYTES
        x = load_tile(a.to(tl.int64) + offset, inner, DTYPE, True, BLOCK)
        y = load_tile(b.to(tl.int64) + offset, inner, DTYPE, True, BLOCK)
        sums = thread_dots(x, y, VECTOR, WIDE)
        if inner != length:
            sums = add_dots(sums, edge_dots(a, b, start, length, before, inner, DTYPE, WIDE))
        store_row(partials + 3 * current, over_threads(sums))
        uncounted += 1
        following = tl.minimum(current + programs, chunk_count - 1)
        if (current + programs >= chunk_count) | (tl.load(table + 3 * following + 2) != segment):
            share = table + 3 * chunk_count + 2 * segment
            first, count = tl.load(share), tl.load(share + 1)
            tl.debug_barrier()
            seen = tl.atomic_add(arrivals + segment, uncounted, sem="acq_rel")
            launches = seen // (CHUNKS_COUNTED + 1)
            if (seen & CHUNKS_COUNTED) + uncounted == count:
                store_row(dots + 3 * segment, add_partials(partials, first, count))
                tl.store(arrivals + segment, (launches + 1) * (CHUNKS_COUNTED + 1))
                tl.debug_barrier()
                tl.atomic_add(arrivals + segment_count, 1, sem="release")
            uncounted = tl.full([], 0, tl.int64)
    complete = (launches + 1) * segment_count
    while tl.atomic_add(arrivals + segment_count, 0, sem="acquire") < complete:
        pass
    f, g = float_of(factor_a_bits), float_of(factor_b_bits)
    earlier = (chunk_count - 1 - chunk) // programs
    last_chunk = chunk + earlier * programs
    _finish_chunk(f, g, x, y, a, b, last_chunk, table, dots, out, found_inf, DTYPE, WIDE)
    for k in range(earlier):
        current = last_chunk - (k + 1) * programs
        start = tl.load(table + 3 * current)
        before, inner = whole_vectors(start, tl.load(table + 3 * current + 1), VECTOR)
        offset = (start + before) * BYTES
        x = load_tile(a.to(tl.int64) + offset, inner, DTYPE, True, BLOCK, "evict_first")
        y = load_tile(b.to(tl.int64) + offset, inner, DTYPE, True, BLOCK, "evict_first")
        _finish_chunk(f, g, x, y, a, b, current, table, dots, out, found_inf, DTYPE, WIDE)
