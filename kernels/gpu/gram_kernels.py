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

import itertools
from array import array
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kernels.call import Call
from kernels.gpu import chunking, launcher
from kernels.gpu.chunking import Aligned, chunks_of
from kernels.gpu.device_tables import TABLES, AddressTable, Scratch, upload
from kernels.gpu.dot_products import is_last
from kernels.gpu.double_double_kernels import made_precise
from kernels.gpu.launcher import Kernel, jit, tl, triton
from kernels.gpu.tiles import (
    THREADS,
    convert,
    edge_pointer,
    load_edges,
    load_tile,
    store_tile,
    whole_vectors,
)

_SCRATCH = Scratch()
# Maximum number of tensors per program, and tensors per group.
_MOST, _GROUP = 8, 4
# Chunks whose partials are added up first; no segment has more than SET * SET chunks.
SET = 64 if triton is None else tl.constexpr(64)


@jit
def no_tiles():
    """An empty tuple, to add tiles of any kind to."""
    return ()


@jit
def _halve(parts, WIDTH: tl.constexpr):
    """Split each tile of `parts` in two; a thread holds 2 * WIDTH neighbouring elements of each."""
    halves = no_tiles()
    for k in tl.static_range(len(parts)):
        x = parts[k]
        if WIDTH > 1:
            halves += tl.split(tl.reshape(x, [x.numel // (2 * WIDTH), WIDTH, 2]))
        else:
            halves += tl.split(tl.reshape(x, [x.numel // 2, 2]))
    return halves


@jit
def _by_element(x, VECTOR: tl.constexpr):
    """One tile for each of the VECTOR places in threads' vectors; no element changes its thread."""
    parts = (x,)
    if VECTOR >= 8:
        parts = _halve(parts, 4)
    if VECTOR >= 4:
        parts = _halve(parts, 2)
    if VECTOR >= 2:
        parts = _halve(parts, 1)
    return parts


@jit
def _add_products(sums, tiles, VECTOR: tl.constexpr, COUNT: tl.constexpr):
    """Add the products of each thread's elements to its sums, in the order [(i, j) for j <= i]."""
    parts = no_tiles()
    for i in tl.static_range(COUNT):
        parts += (_by_element(tiles[i], VECTOR),)
    for v in tl.static_range(VECTOR):
        x = no_tiles()
        for i in tl.static_range(COUNT):
            x += (convert(parts[i][v], tl.float64),)
        added = no_tiles()
        for i in tl.static_range(COUNT):
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
def _store_entries(out, total, places, n, ROW: tl.constexpr, PARTS: tl.constexpr):
    """Store this range's entries of a segment's matrix, and their mirror images.

    PARTS: 2 if entries are pairs high + low; the low parts are set to 0.
    """
    place = tl.load(places + tl.arange(0, ROW))
    mirrored = place % n * n + place // n
    off_diagonal = (place >= 0) & (place != mirrored)
    tl.store(out + PARTS * place, total, mask=place >= 0)
    tl.store(out + PARTS * mirrored, total, mask=off_diagonal)
    if PARTS == 2:
        zeros = tl.zeros([ROW], tl.float64)
        tl.store(out + 2 * place + 1, zeros, mask=place >= 0)
        tl.store(out + 2 * mirrored + 1, zeros, mask=off_diagonal)


@jit
def finish(
    partials,
    arrivals,
    out,
    places,
    n,
    chunk,
    chunks,
    segment,
    share,
    PAIRS: tl.constexpr,
    ROW: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Add up the partials of a set of chunks once all have arrived, then the segment's sets.

    Returns whether this program has stored the segment's entries.
    """
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
            _store_entries(out + segment * n * n * PARTS, total, places, n, ROW, PARTS)
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
    wide = no_tiles()
    for _ in tl.static_range(PAIRS):
        wide += (tl.zeros([BLOCK // VECTOR], tl.float64),)
    for done in range(0, inner, BLOCK):
        tiles = no_tiles()
        for i in tl.static_range(COUNT):
            here = at[i] + (before + done) * BYTES
            tiles += (load_tile(here, inner - done, DTYPE, True, BLOCK),)
        if copies is not None:
            for i in tl.static_range(COUNT):
                to = copies[0] + i * copies[1] + (before + done) * BYTES
                count = tl.where(i == copies[2], 0, inner - done)
                store_tile(to, count, tiles[i], True)
        wide = _add_products(wide, tiles, VECTOR, COUNT)
    sums = no_tiles()
    for k in tl.static_range(PAIRS):
        by_thread = tl.reshape(wide[k], [BLOCK // VECTOR // THREADS, THREADS])
        sums += (tl.sum(by_thread, axis=0),)
    if inner != length:
        edges = no_tiles()
        for i in tl.static_range(COUNT):
            edges += (load_edges(at[i], before, inner, length, DTYPE),)
        if copies is not None:
            inside = tl.arange(0, THREADS) < length - inner
            for i in tl.static_range(COUNT):
                to = edge_pointer(copies[0] + i * copies[1], before, inner, DTYPE)
                tl.store(to, edges[i], mask=inside & (i != copies[2]))
        sums = _add_products(sums, edges, 1, COUNT)
    return sums


@Kernel
def _gram_kernel(
    partials,
    arrivals,
    addresses,
    table,
    places,
    matrices,
    n: tl.int32,
    ranges: tl.int32,
    segments: tl.int32,
    DTYPE: tl.constexpr,
    COUNT: tl.constexpr,
    ROW: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum one chunk of COUNT tensors; the last program of a segment writes the entries."""
    BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    PAIRS: tl.constexpr = COUNT * (COUNT + 1) // 2
    chunks = tl.num_programs(0) // ranges
    # The ranges of a chunk run side by side.
    chunk = (tl.program_id(0) // ranges).to(tl.int64)
    mine = (tl.program_id(0) % ranges).to(tl.int64)
    start = tl.load(table + 3 * chunk)
    length = tl.load(table + 3 * chunk + 1)
    segment = tl.load(table + 3 * chunk + 2)
    at = no_tiles()
    for i in tl.static_range(COUNT):
        at += (tl.load(addresses + mine * COUNT + i) + start * BYTES,)
    sums = chunk_sums(at, None, start, length, DTYPE, COUNT, BLOCK)
    partials += mine * chunks * PAIRS
    store_sums(partials + chunk * PAIRS, sums, PAIRS)
    share = table + 3 * chunks + 2 * segment
    arrivals += mine * (chunks + segments)
    places += mine * ROW
    finish(
        partials, arrivals, matrices, places, n, chunk, chunks, segment, share, PAIRS, ROW, PARTS
    )


def _ranges(n: int) -> list[list[int]]:
    """Return the tensors' numbers in each range, filled up with numbers that are not below `n`."""
    if n <= _MOST:
        return [[*range(n)]]
    groups = [[*range(k, k + _GROUP)] for k in range(0, n, _GROUP)]
    return [first + second for first, second in itertools.combinations(groups, 2)]


def places_of(n: int, row: int, device: torch.device) -> Tensor:
    """Return int64 [ranges, row] on the device: the entry that each sum is stored to, or -1.

    Several ranges compute the entries of one group, with equal bits; only one range stores them.
    """

    def make(pinned: Tensor | None) -> tuple[Tensor, Tensor]:
        ranges, stored = _ranges(n), set[int]()
        places = np.full((len(ranges), row), -1)
        for mine, tensors in enumerate(ranges):
            pairs = ((i, j) for k, i in enumerate(tensors) for j in tensors[: k + 1])
            for column, (i, j) in enumerate(pairs):
                if max(i, j) < n and i * n + j not in stored:
                    stored.add(i * n + j)
                    places[mine, column] = i * n + j
        return upload(places.ravel(), device, pinned)

    found: tuple[Tensor, Tensor] = TABLES.fetch(("gram", n), device, make)
    return found[0]


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

    On sm_120, with five float32 tensors, ptxas spills 8 bytes to get by with 96 registers, unless
    it is given a limit; elsewhere a limit makes it use half as many registers again.
    """
    return {"maxnreg": 112} if (count, capability // 10) == (5, 12) else {}


def row_of(count: int) -> int:
    """Number of pairs of `count` tensors, rounded up to a power of two."""
    return launcher.power_of_two_above(count * (count + 1) // 2)


def gram(call: Call, table: AddressTable) -> Callable[[], None]:
    """Bind out = float64 [S, n, n], the dot products of the segments, in one launch.

    Precise matrices [S, n, n, 2] need a second launch.
    """
    segments, n, device = len(call.bounds) - 1, len(call.inputs), call.out.device
    if segments == 0:
        return launcher.nothing
    aligned, chunks = Aligned(*call.inputs), chunks_of(call.inputs[0], call.bounds)
    ranges, dtype = _ranges(n), call.inputs[0].dtype
    places = [tensor.data_ptr() for tensor in aligned.tensors]
    count = len(ranges[0])
    pairs, row = count * (count + 1) // 2, row_of(count)
    block, warps = tile_of(count, call.inputs[0].numel(), dtype.itemsize)
    listed = [min(i, n - 1) for i in itertools.chain(*ranges)] if len(ranges) > 1 else []
    addresses = table.write(array("Q", [places[i] for i in (*listed, *range(n))]), device)
    launch = _gram_kernel.bind(
        chunks.chunks * len(ranges),
        (call.out, chunks.table),
        addresses,
        chunks.table,
        places_of(n, row, device),
        call.out,
        n,
        len(ranges),
        segments,
        DTYPE=dtype,
        COUNT=count,
        ROW=row,
        PARTS=2 if call.precise else 1,
        BLOCK=block,
        num_warps=warps,
        **options_of(count, launcher.chip_of(device).capability),
    )
    floats = len(ranges) * chunks.chunks * pairs
    counters = len(ranges) * (chunks.chunks + segments)
    scratch = partial(_SCRATCH.fetch, "gram", device, floats, counters)
    then = made_precise(call, chunks, addresses) if call.precise else launcher.nothing

    def run() -> None:
        aligned.refresh()
        launch(scratch=scratch)
        then()

    return run
