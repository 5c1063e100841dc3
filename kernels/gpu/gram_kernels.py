"""gram on a GPU: all dot products of n tensors in one pass over memory and one launch.

Sums are in float64, where products of float16, bfloat16 and float32 are exact. Each thread has one
sum for each of the n(n+1)/2 entries: for n up to 8 they fit in its registers. More tensors are cut
into groups of four, and each pair of groups, a *range*, has programs of its own. Tensors that
several ranges read are still in L2, since the ranges of a chunk run side by side.

On sm_103 and sm_120 float64 is slow, with two results per cycle and multiprocessor. There the
float64 units bound the speed, not memory: 8 tensors need 36 multiply-adds and 8 conversions per 8
elements, which takes 22 cycles. In that time memory could move 96 bytes (sm_120) or 640 (sm_103)
instead of 32. Sums of float32 pairs would take about ten instructions per product, 3 cycles, but
hold 48 bits: too few for the limit of 2**-46 that `adasum_coefficients` uses for zero vectors. So
those GPUs use float64, too.

As in projection_kernels.py, chunks depend only on segments, size and dtype, and their partials are
added in one order, by the last program to arrive, so the bits never depend on timing. There are up
to 36 partials per chunk, which are added in two levels: the last program of each 64 chunks adds up
these chunks' partials, and the last such program of the segment adds up the results.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import partial

from kernels.call import Call
from kernels.gpu import chunking, launcher
from kernels.gpu.chunking import Aligned, chunks_of
from kernels.gpu.device_tables import Scratch, write_addresses
from kernels.gpu.dot_products import is_last
from kernels.gpu.double_double_kernels import made_precise
from kernels.gpu.launcher import Kernel, jit, tl, triton
from kernels.gpu.tiles import (
    THREADS,
    chunk_at,
    convert,
    edge_pointer,
    load_edges,
    load_tile,
    no_tiles,
    store_tile,
    whole_vectors,
)

_SCRATCH = Scratch()
# Maximum number of tensors per program, and tensors per group.
_MOST = 8 if triton is None else tl.constexpr(8)
_GROUP = 4 if triton is None else tl.constexpr(4)
# Chunks whose partials are added up first; no segment has more than SET * SET chunks.
SET = 64 if triton is None else tl.constexpr(64)


@jit
def _by_element(parts, VECTOR: tl.constexpr):
    """One tile for each of the VECTOR places in threads' vectors; no element changes its thread."""
    if VECTOR > 1:
        N: tl.constexpr = parts[0].numel
        SHAPE: tl.constexpr = [N // VECTOR, VECTOR // 2, 2] if VECTOR > 2 else [N // 2, 2]
        halves = no_tiles()
        for k in tl.static_range(len(parts)):
            halves += tl.split(tl.reshape(parts[k], SHAPE))
        parts = _by_element(halves, VECTOR // 2)
    return parts


@jit
def _add_products(sums, tiles, VECTOR: tl.constexpr):
    """Add the products of each thread's elements to its sums, in the order [(i, j) for j <= i]."""
    parts = [_by_element((tile,), VECTOR) for tile in tiles]
    for v in tl.static_range(VECTOR):
        x = [convert(part[v], tl.float64) for part in parts]
        added = no_tiles()
        for i in tl.static_range(len(tiles)):
            for j in tl.static_range(i + 1):
                added += (tl.fma(x[i], x[j], sums[i * (i + 1) // 2 + j]),)
        sums = added
    return sums


@jit
def store_sums(row, sums, PAIRS: tl.constexpr):
    """Store the sums over all threads at `row`, four at a time, with common barriers."""
    column = tl.arange(0, 4)
    zero = tl.zeros([THREADS], tl.float64)
    sums += (zero, zero, zero)
    for k in tl.static_range(0, PAIRS, 4):
        even = tl.join(sums[k], sums[k + 2])
        odd = tl.join(sums[k + 1], sums[k + 3])
        four = tl.reshape(tl.join(even, odd), [THREADS, 4])
        tl.store(row + k + column, tl.sum(four, axis=0), mask=k + column < PAIRS)


@jit
def _add_rows(partials, stride, count, PAIRS: tl.constexpr, ROW: tl.constexpr):
    """The sums [ROW] of up to SET rows of partials, every `stride`th, read past the L1 cache."""
    k, column = tl.arange(0, SET)[:, None], tl.arange(0, ROW)[None, :]
    inside = (k < count) & (column < PAIRS)
    row = partials + (k.to(tl.int64) * stride * PAIRS + column)
    return tl.sum(tl.load(row, mask=inside, other=0.0, cache_modifier=".cg"), axis=0)


@jit
def _tensor(k, mine, n):
    """The number of the k-th tensor of range `mine`, from n on if there is no such tensor.

    Of G groups, range m has the groups m % G and m % G + m // G + 1, modulo G.
    """
    groups = tl.cdiv(tl.maximum(n, _MOST), _GROUP)
    group = mine % groups
    group = tl.where(k < _GROUP, group, (group + 1 + mine // groups) % groups)
    return group * _GROUP + k % _GROUP


@jit
def _store_entries(out, total, mine, n, COUNT: tl.constexpr, PARTS: tl.constexpr):
    """Store a range's entries of a segment's matrix.

    Several ranges compute the products within one group, with equal bits. Of those, the range of
    the group and the next one stores them. PARTS: 2 if entries are pairs high + low; the low parts
    are set to 0.
    """
    SIZE: tl.constexpr = triton.next_power_of_2(COUNT)
    k = tl.arange(0, SIZE * SIZE)
    i, j = k // SIZE, k % SIZE
    high, low = tl.maximum(i, j), tl.minimum(i, j)
    place = tl.minimum(high * (high + 1) // 2 + low, total.shape[0] - 1)
    row, column = _tensor(i, mine, n), _tensor(j, mine, n)
    chosen = (high >= _GROUP) | (mine < tl.cdiv(n, _GROUP))
    chosen = tl.where(low < _GROUP, chosen, n <= _MOST)
    stored = chosen & (high < COUNT) & (row < n) & (column < n)
    to = out + PARTS * (row.to(tl.int64) * n + column)
    tl.store(to, tl.gather(total, place, 0), mask=stored)
    if PARTS == 2:
        tl.store(to + 1, tl.zeros([SIZE * SIZE], tl.float64), mask=stored)


@jit
def finish(
    partials,
    arrivals,
    out,
    table,
    chunk,
    chunks,
    mine,
    n,
    COUNT: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Add up the partials of a set of chunks once all have arrived, then the segment's sets.

    Returns whether this program has stored the entries of the chunk's segment in range `mine`.
    """
    PAIRS: tl.constexpr = COUNT * (COUNT + 1) // 2
    ROW: tl.constexpr = triton.next_power_of_2(PAIRS)
    segment = chunk_at(table, chunk)[2]
    share = table + 3 * chunks + 2 * segment
    first, count = tl.load(share), tl.load(share + 1)
    # The set's sums replace the partials of its first chunk.
    head = first + (chunk - first) // SET * SET
    held = tl.minimum(first + count - head, SET)
    complete = is_last(arrivals + head, held)
    if complete:
        total = _add_rows(partials + head * PAIRS, 1, held, PAIRS, ROW)
        complete = count <= SET
        if count > SET:
            column = tl.arange(0, ROW)
            tl.debug_barrier()
            tl.store(partials + head * PAIRS + column, total, mask=column < PAIRS)
            sets = (count + SET - 1) // SET
            complete = is_last(arrivals + chunks + segment, sets)
            if complete:
                total = _add_rows(partials + first * PAIRS, SET, sets, PAIRS, ROW)
        if complete:
            _store_entries(out + segment * n * n * PARTS, total, mine, n, COUNT, PARTS)
    return complete


@jit
def chunk_sums(
    at, copies, start, length, DTYPE: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """Sums [THREADS] of the products of each pair of COUNT tensors' chunks at the addresses `at`.

    copies: None, or (address, stride, k) to copy all chunks but the k-th to `address`, `stride`
    bytes apart.
    """
    BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    VECTOR: tl.constexpr = 16 // BYTES
    PAIRS: tl.constexpr = COUNT * (COUNT + 1) // 2
    before, inner = whole_vectors(start, length, VECTOR)
    sums = no_tiles()
    for _ in tl.static_range(PAIRS):
        sums += (tl.zeros([BLOCK // VECTOR], tl.float64),)
    for done in range(0, inner, BLOCK):
        offset, count = (before + done) * BYTES, inner - done
        tiles = [load_tile(place + offset, count, DTYPE, True, BLOCK) for place in at]
        if copies is not None:
            for i in tl.static_range(COUNT):
                to = copies[0] + i * copies[1] + offset
                store_tile(to, tl.where(i == copies[2], 0, count), tiles[i], True)
        sums = _add_products(sums, tiles, VECTOR)
    SHAPE: tl.constexpr = [BLOCK // VECTOR // THREADS, THREADS]
    sums = [tl.sum(tl.reshape(wide, SHAPE), axis=0) for wide in sums]
    if inner != length:
        edges = [load_edges(place, before, inner, length, DTYPE) for place in at]
        if copies is not None:
            inside = tl.arange(0, THREADS) < length - inner
            for i in tl.static_range(COUNT):
                to = edge_pointer(copies[0] + i * copies[1], before, inner, DTYPE)
                tl.store(to, edges[i], mask=inside & (i != copies[2]))
        sums = _add_products(sums, edges, 1)
    return sums


@Kernel
def _gram_kernel(
    partials,
    arrivals,
    addresses,
    table,
    matrices,
    n: tl.int32,
    ranges: tl.int32,
    segments: tl.int32,
    DTYPE: tl.constexpr,
    COUNT: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum one chunk of COUNT tensors; the last program of a segment writes the entries."""
    BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    PAIRS: tl.constexpr = COUNT * (COUNT + 1) // 2
    chunks = tl.num_programs(0) // ranges
    # The ranges of a chunk run side by side.
    chunk = (tl.program_id(0) // ranges).to(tl.int64)
    mine = tl.program_id(0) % ranges
    start, length, _ = chunk_at(table, chunk)
    at = no_tiles()
    for k in tl.static_range(COUNT):
        tensor = tl.minimum(_tensor(k, mine, n), n - 1)
        at += (tl.load(addresses + tensor) + start * BYTES,)
    sums = chunk_sums(at, None, start, length, DTYPE, COUNT, BLOCK)
    partials += mine.to(tl.int64) * chunks * PAIRS
    store_sums(partials + chunk * PAIRS, sums, PAIRS)
    arrivals += mine.to(tl.int64) * (chunks + segments)
    finish(partials, arrivals, matrices, table, chunk, chunks, mine, n, COUNT, PARTS)


def tile_of(count: int, numel: int, itemsize: int) -> tuple[int, int]:
    """(elements per tile, warps) of a program for `count` tensors.

    With few tensors a thread loads several vectors of each before it uses the first one: two
    tensors of 256 MiB took 143 us on an H200 with one vector, 141 with two, 135 with eight.
    """
    block, warps = chunking.tile_of(numel, itemsize)
    vectors = 8 if count <= 2 else max(1, 4 // count)
    return min(block, 128 * (16 // itemsize) * vectors), warps


def options_of(count: int, capability: int) -> dict[str, int]:
    """Triton's options of a program for `count` tensors, by the compute capability times ten.

    To get by with fewer registers, ptxas would keep fewer loads under way with two tensors, and on
    sm_120 spill 8 bytes with five of float32. Given a limit, it uses half as many again.
    """
    if capability // 10 == 12:
        return {"maxnreg": 112} if count == 5 else {}
    return {"maxnreg": 128} if count == 2 else {}


def gram(call: Call) -> Callable[[], None]:
    """Bind out = float64 [S, n, n], the dot products of the segments, in one launch.

    Precise matrices [S, n, n, 2] need a second launch.
    """
    segments, n, device = len(call.bounds) - 1, len(call.inputs), call.out.device
    if segments == 0:
        return launcher.nothing
    aligned, chunks = Aligned(*call.inputs), chunks_of(call.inputs[0], call.bounds)
    groups, dtype = -(-n // 4), call.inputs[0].dtype
    ranges, count = (1, n) if n <= 8 else (groups * (groups - 1) // 2, 8)
    block, warps = tile_of(count, call.inputs[0].numel(), dtype.itemsize)
    addresses = write_addresses(call, array("Q", [one.data_ptr() for one in aligned.tensors]))
    launch = _gram_kernel.bind(
        chunks.chunks * ranges,
        (call.out, chunks.table),
        addresses,
        chunks.table,
        call.out,
        n,
        ranges,
        segments,
        DTYPE=dtype,
        COUNT=count,
        PARTS=2 if call.precise else 1,
        BLOCK=block,
        num_warps=warps,
        **options_of(count, launcher.chip_of(device).capability),
    )
    floats = ranges * chunks.chunks * (count * (count + 1) // 2)
    counters = ranges * (chunks.chunks + segments)
    scratch = partial(_SCRATCH.fetch, "gram", device, floats, counters)
    then = made_precise(call, chunks, addresses) if call.precise else launcher.nothing

    def run() -> None:
        aligned.refresh()
        launch(scratch=scratch)
        then()

    return run
