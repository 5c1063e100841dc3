"""Adasum of all ranks' vectors of a node in one launch per rank, in memory that its GPUs share.

It does the work of the algorithm `direct`, which takes several launches and exchanges
(adasum/gram_reduction.py), with the same device functions. Each rank computes its slice of all
vectors in four parts:

1. Gram matrices. Each program has a run of chunks, reads them from the peers' buffers, and copies
   them to memory of its own GPU, since no L2 caches another GPU's memory: a second reading would
   cross between GPUs again. The program that completes a segment stores the segment's matrix. After
   a barrier of the launch all matrices are complete.
2. Matrices of segments that may cancel too far for float64 are computed again in double-double,
   from the copies. Usually that is not necessary, and there is no second barrier.
3. A slice may share its first and last segments with other slices. The program that completes the
   matrix of a shared segment has written it to the mailboxes in all ranks' pads. Programs with the
   same number signal and wait for each other; after the barrier, that covers all matrices.
4. Each program adds the ranks' matrices of its segments in rank order, replays the tree, blends its
   chunks from the copies, and overwrites the vectors in all buffers (with several nodes, only in
   its own). Then it waits for the programs with its number, as at the beginning.

Mailboxes are written again in the next launch, after all ranks have started it, when the last
launch has ended everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.call import Tree
from kernels.gpu import double_double, launcher
from kernels.gpu.chunking import chunks_of, tile_of
from kernels.gpu.device_tables import upload
from kernels.gpu.dot_products import is_last
from kernels.gpu.double_double_kernels import (
    load_matrix,
    may_cancel,
    precise_chunk,
    precise_matrix,
    replay,
    tree_table,
)
from kernels.gpu.gram_kernels import chunk_sums, finish, store_sums
from kernels.gpu.gram_kernels import tile_of as gram_tile_of
from kernels.gpu.launcher import Kernel, jit, tl, triton
from kernels.gpu.node_slices import Slice
from kernels.gpu.signals import (
    MAILBOX_BYTES,
    MAX_PROGRAMS,
    Peers,
    end_turn,
    grid_barrier,
    mailboxes_at,
    rank_barrier,
    turn_of,
)
from kernels.gpu.sum_kernels import weighted_tile_of, weighted_total
from kernels.gpu.tiles import chunk_at, no_tiles, part_of, store_to_all

# Maximum number of ranks: a program keeps all their products in its registers.
MAX_RANKS = 8
assert MAILBOX_BYTES >= 2 * MAX_RANKS * MAX_RANKS**2 * 16
# The float64 sums of eight vectors take more registers than other launches need.
OPTIONS = {"launch_cooperative_grid": True, "maxnreg": 255}


class _Part(NamedTuple):
    """The slice of a rank, with the matrices [segments, n, n, 2] of its segments."""

    table: Any
    chunks: Any
    segments: Any
    before: Any
    after: Any
    matrices: Any


@jit
def _holders(segment, part, rank):
    """The first and the last rank with a part of one of this slice's segments."""
    first = tl.where(segment == 0, part.before, rank)
    return first, tl.where(segment == part.segments - 1, part.after, rank)


@jit
def _mailbox(pad, sender, last, n):
    """Place in a pad for a matrix from `sender`, which has two mailboxes there.

    One is for the segment that ends in its slice, one for the segment that goes on. last: The last
    rank with a part of the segment.
    """
    behind = tl.where(sender == last, 0, 1)
    at = pad + mailboxes_at(n) + (behind * n + sender) * n * n * 16
    return at.to(tl.pointer_type(tl.float64))


@jit
def _publish(segment, part, peers, SIZE: tl.constexpr):
    """Write a segment's matrix to the mailboxes of all ranks, if other slices share the segment."""
    first, last = _holders(segment, part, peers.rank)
    n = peers.n
    if first != last:
        k = tl.arange(0, 2 * SIZE * SIZE)
        inside = k < 2 * n * n
        x = tl.load(part.matrices + segment * n * n * 2 + k, mask=inside)
        for q in range(n):
            pad = tl.load(peers.pads + (peers.rank + 1 + q) % n)
            tl.store(_mailbox(pad, peers.rank, last, n) + k, x, mask=inside)


@jit
def _blend(
    targets, written, held, row, start, length, rank, n, DTYPE: tl.constexpr, BLOCK: tl.constexpr
):
    """Blend one chunk of `held` with the coefficients at `row`; write it to all targets.

    Tiles are in reverse order, as in `weighted_sum`.
    """
    BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    VECTOR: tl.constexpr = 16 // BYTES
    tiles = (length + BLOCK - 1) // BLOCK
    for k in range(tiles):
        done = (tiles - 1 - k) * BLOCK
        count = tl.minimum(length - done, BLOCK)
        offset = (start + done) * BYTES
        if offset % 16 == 0 and count % VECTOR == 0:
            x = weighted_total(held, row, offset, count, n, DTYPE, True, BLOCK)
            store_to_all(targets, offset, count, x, rank, written, True)
        else:
            # In parts, in a loop that is not unrolled: see scalar_pointer.
            PART: tl.constexpr = part_of(BLOCK, 4)
            for part in tl.range(0, BLOCK // PART, loop_unroll_factor=1):
                here = offset + part * PART * BYTES
                left = count - part * PART
                y = weighted_total(held, row, here, left, n, DTYPE, False, PART)
                store_to_all(targets, here, left, y, rank, written, False)


@jit
def _run(chunks):
    """The first chunk of this program, and the end of its run of chunks."""
    # Divisions of int64 take many instructions; there are far fewer chunks than 2**31 / programs.
    before = tl.program_id(0) * chunks.to(tl.int32)
    low, high = before // tl.num_programs(0), (before + chunks.to(tl.int32)) // tl.num_programs(0)
    return low.to(tl.int64), high.to(tl.int64)


@jit
def _multiply(
    sources, copies, stride, part, partials, rank,
    DTYPE: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the sums of products of this program's chunks, and copies of the peers' elements."""
    BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    PAIRS: tl.constexpr = COUNT * (COUNT + 1) // 2
    low, high = _run(part.chunks)
    for chunk in range(low, high):
        start, length, _ = chunk_at(part.table, chunk)
        at = no_tiles()
        for i in tl.static_range(COUNT):
            at += (tl.load(sources + i) + start * BYTES,)
        to = copies.to(tl.int64) + start * BYTES
        sums = chunk_sums(at, (to, stride, rank), start, length, DTYPE, COUNT, BLOCK)
        store_sums(partials + chunk * PAIRS, sums, PAIRS)


@jit
def _add_up(part, partials, arrivals, flags, peers, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """Count this program's chunks as done; on completing a segment, check and publish its matrix.

    In a loop separate from `_multiply`'s, so that its values take no registers from that one.
    """
    n, chunks = peers.n, part.chunks
    low, high = _run(chunks)
    for chunk in range(low, high):
        complete = finish(
            partials, arrivals, part.matrices, part.table, chunk, chunks, 0, n, COUNT, 2
        )
        if complete:
            segment = chunk_at(part.table, chunk)[2]
            # Other threads have stored the matrix.
            tl.debug_barrier()
            again = may_cancel(part.matrices + segment * n * n * 2, n, SIZE)
            tl.store(flags + segment, again.to(tl.int64))
            if again:
                tl.atomic_add(flags + part.segments, 1, sem="relaxed")
            else:
                _publish(segment, part, peers, SIZE)


@jit
def _multiply_precisely(
    held, part, partials, arrivals, flags, peers,
    DTYPE: tl.constexpr, SIZE: tl.constexpr, SPINS: tl.constexpr,
):  # fmt: skip
    """Recompute flagged segments' matrices in double-double; return False if a wait has failed."""
    BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    n, chunks = peers.n, part.chunks
    going = tl.full([], 1, tl.int1)
    if tl.load(flags + part.segments) != 0:
        low, high = _run(chunks)
        for chunk in range(low, high):
            start, length, segment = chunk_at(part.table, chunk)
            if tl.load(flags + segment) != 0:
                precise_chunk(partials, held, start * BYTES, length, chunk, chunks, n, DTYPE)
                share = part.table + 3 * chunks + 2 * segment
                first, count = tl.load(share), tl.load(share + 1)
                if is_last(arrivals + segment, count):
                    matrix = part.matrices + segment * n * n * 2
                    precise_matrix(partials, matrix, first, count, chunks, n)
                    # Other threads have stored the matrix.
                    tl.debug_barrier()
                    _publish(segment, part, peers, SIZE)
        going = grid_barrier(peers, SPINS)
        # All programs have read the number of flagged segments.
        if tl.program_id(0) == 0:
            tl.store(flags + part.segments, tl.full([], 0, tl.int64))
    return going


@jit
def _coefficients(segment, part, peers, tree, SIZE: tl.constexpr):
    """One segment's coefficients [SIZE], from the matrices of all ranks with a part of it."""
    first, last = _holders(segment, part, peers.rank)
    pad, n = tl.load(peers.pads + peers.rank), peers.n
    g = double_double.zeros([SIZE, SIZE])
    for sender in range(first, last + 1):
        own = part.matrices + segment * n * n * 2
        at = tl.where(first == last, own, _mailbox(pad, sender, last, n))
        g = double_double.add(g, load_matrix(at, n, SIZE, True))
    return replay(g, tree, n, True)[0]


@jit
def _blend_chunks(
    targets, written, held, row, part, peers, tree,
    DTYPE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write this program's chunks of the result, the last ones first: L2 still holds them."""
    known = tl.full([], -1, tl.int64)
    low, high = _run(part.chunks)
    for k in range(high - low):
        start, length, segment = chunk_at(part.table, high - 1 - k)
        if (segment != known) & (length > 0):
            found = _coefficients(segment, part, peers, tree, SIZE)
            i = tl.arange(0, SIZE)
            # Wait until all threads have read the previous segment's row.
            tl.debug_barrier()
            tl.store(row + i, found, mask=i < peers.n)
            tl.debug_barrier()
            known = segment
        _blend(targets, written, held, row, start, length, peers.rank, peers.n, DTYPE, BLOCK)


@Kernel
def _adasum_kernel(
    sources,
    targets,
    written: tl.int32,
    held,
    copies,
    pads,
    state,
    table,
    tree,
    partials,
    matrices,
    coefficients,
    arrivals,
    limit: tl.int64,
    stride: tl.int64,
    rank: tl.int32,
    n: tl.int32,
    before: tl.int32,
    after: tl.int32,
    chunks: tl.int32,
    segments: tl.int32,
    DTYPE: tl.constexpr,
    COUNT: tl.constexpr,
    SPINS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLEND: tl.constexpr,
):
    """Write the Adasum of this rank's slice of all vectors to all targets."""
    SIZE: tl.constexpr = triton.next_power_of_2(COUNT)
    peers = Peers(pads, state, limit, rank, n)
    part = _Part(table, chunks.to(tl.int64), segments, before, after, matrices)
    # After the counters of chunks and sets: for each segment a counter of its precise matrix, and a
    # flag; then the number of flagged segments.
    again = arrivals + chunks + segments
    flags = again + segments
    turn = turn_of(state)
    going = turn >= 0
    if going:
        going = rank_barrier(peers, turn, 1, SIZE, SPINS)
    if going:
        _multiply(sources, copies, stride, part, partials, rank, DTYPE, COUNT, BLOCK)
        _add_up(part, partials, arrivals, flags, peers, COUNT, SIZE)
        going = grid_barrier(peers, SPINS)
    if going:
        going = _multiply_precisely(held, part, partials, again, flags, peers, DTYPE, SIZE, SPINS)
    if going:
        going = rank_barrier(peers, turn + 1, 2, SIZE, SPINS)
    if going:
        row = coefficients + tl.program_id(0).to(tl.int64) * n
        _blend_chunks(targets, written, held, row, part, peers, tree, DTYPE, SIZE, BLEND)
        going = rank_barrier(peers, turn + 2, 3, SIZE, SPINS)
    if going:
        end_turn(state, turn + 3)


def bind(
    slices: Sequence[Slice],
    rank: int,
    sources: Sequence[int],
    tree: Tree,
    dtype: torch.dtype,
    shared: tuple[Tensor, Tensor, int],
    copies: Callable[[int], Tensor],
    spins: int,
    *,
    alone: bool = False,
) -> launcher.Launch:
    """Bind the launch of one rank.

    Args:
        slices: The slices of all ranks.
        rank: This rank.
        sources: The address of this rank's slice in each buffer.
        tree: The tree that joins the ranks' vectors.
        dtype: The vectors' dtype.
        shared: Pads, state, and the maximum time of a wait in nanoseconds.
        copies: Returns memory of this GPU with so many bytes, which later launches may share.
        spins: How often a wait checks a counter between two checks of the clock.
        alone: Whether the result is written only to this rank's own buffer.
    """
    (pads, state, limit), n, mine = shared, len(slices), slices[rank]
    device, length, itemsize = state.device, mine.bounds[-1], dtype.itemsize
    # No fewer than the longest slice's chunks, unless there are many.
    tiles = [one.bounds[-1] // tile_of(one.bounds[-1], itemsize)[0] for one in slices]
    parts = [k + len(one.bounds) - 1 for k, one in zip(tiles, slices, strict=True)]
    programs = min(MAX_PROGRAMS, max(parts))
    # Each copy is aligned to 16 bytes.
    stride = -(-length * itemsize // 16) * 16
    memory = copies(n * stride)
    chunks = chunks_of(memory.view(dtype), mine.bounds)
    held = [memory.data_ptr() + i * stride for i in range(n)]
    held[rank] = sources[rank]
    addresses, _ = upload(np.array([*sources, *held], np.int64), device)
    # Precise partials, two numbers each, reuse the memory of the float64 ones.
    sizes = [n * (n + 1) * chunks.chunks, 2 * n * n * chunks.segments, n * programs]
    floats = torch.empty(sum(sizes), dtype=torch.float64, device=device).split(sizes)
    counters = chunks.chunks + 3 * chunks.segments + 1
    block, warps = gram_tile_of(n, length, itemsize)
    return _adasum_kernel.bind(
        programs,
        (),
        addresses[:n],
        addresses[rank:] if alone else addresses[:n],
        1 if alone else n,
        addresses[n:],
        memory,
        pads,
        state,
        chunks.table,
        tree_table(tree, device),
        *floats,
        torch.zeros(counters, dtype=torch.int64, device=device),
        limit,
        stride,
        rank,
        n,
        mine.before if length else rank,
        mine.after if length else rank,
        chunks.chunks,
        chunks.segments,
        DTYPE=dtype,
        COUNT=n,
        SPINS=spins,
        BLOCK=block,
        BLEND=weighted_tile_of(length, itemsize)[0],
        num_warps=warps,
        **OPTIONS,
    )
