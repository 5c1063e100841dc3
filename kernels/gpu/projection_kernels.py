"""dot_and_norms, combine and adasum on a GPU: one launch each, adasum two where it must be.

A *chunk* is a run of tiles inside one segment: what one program takes. Its partial (d, A, B) is
written by its index, and the partials of a segment are added in that order by whoever needs them,
so the bits never depend on timing. Chunks and tiles follow from segments, size and dtype alone,
never from the device: the one-launch and the two-launch path cut alike.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from kernels.arguments import Call
from kernels.arithmetic import compute_dtype
from kernels.gpu import launcher
from kernels.gpu.chunking import Chunks, chunks_of
from kernels.gpu.device_tables import Scratch
from kernels.gpu.launcher import Kernel, jit, tl
from kernels.gpu.tiles import (
    add_partials,
    coefficient,
    load_tile,
    part_of,
    report,
    store_row,
    store_tile,
    tile_dots,
    weigh,
)

# Registers a thread of the one-launch kernel: it tells how many programs are resident at once.
REGISTERS = 128
_SCRATCH = Scratch()


@Kernel
def _dots_kernel(
    partials,
    arrivals,
    a,
    b,
    table,
    dots,
    DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
    VECTORS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Partials of one chunk; the last program of a segment to arrive writes the segment's row.

    Protocol: a program stores its partial, then counts itself in `arrivals[segment]` (release).
    The one that finds all others counted (acquire) sees all partials. It sets the counter back
    to zero, ready for the next launch on this scratch memory.
    """
    BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    chunk = tl.program_id(0)
    start = tl.load(table + 3 * chunk)
    length = tl.load(table + 3 * chunk + 1)
    segment = tl.load(table + 3 * chunk + 2)
    from_a = a.to(tl.int64) + start * BYTES
    from_b = b.to(tl.int64) + start * BYTES
    dot = tl.full([], 0.0, tl.float64)
    norm_a = tl.full([], 0.0, tl.float64)
    norm_b = tl.full([], 0.0, tl.float64)
    for done in range(0, length, BLOCK):
        count = tl.minimum(length - done, BLOCK)
        x = load_tile(from_a + done * BYTES, count, DTYPE, VECTORS, BLOCK)
        y = load_tile(from_b + done * BYTES, count, DTYPE, VECTORS, BLOCK)
        d, p, q = tile_dots(x, y, WIDE)
        dot += d
        norm_a += p
        norm_b += q
    store_row(partials + 3 * chunk, dot, norm_a, norm_b)
    share = table + 3 * tl.num_programs(0) + 2 * segment
    chunk_count = tl.load(share + 1)
    tl.debug_barrier()
    if tl.atomic_add(arrivals + segment, 1, sem="acq_rel") == chunk_count - 1:
        dot, norm_a, norm_b = add_partials(partials, tl.load(share), chunk_count)
        store_row(dots + 3 * segment, dot, norm_a, norm_b)
        tl.store(arrivals + segment, tl.full([], 0, tl.int64))


@Kernel
def _combine_kernel(
    a,
    b,
    dots,
    table,
    out,
    findings,
    DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One chunk of the result. Chunks and tiles go backwards: the dots left their tail in L2."""
    BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    VECTOR: tl.constexpr = 16 // BYTES
    chunk = tl.num_programs(0) - 1 - tl.program_id(0)
    start = tl.load(table + 3 * chunk)
    length = tl.load(table + 3 * chunk + 1)
    segment = tl.load(table + 3 * chunk + 2)
    dot = tl.load(dots + 3 * segment)
    alpha = coefficient(dot, tl.load(dots + 3 * segment + 1))
    beta = coefficient(dot, tl.load(dots + 3 * segment + 2))
    tiles = (length + BLOCK - 1) // BLOCK
    for k in range(tiles):
        done = (tiles - 1 - k) * BLOCK
        count = tl.minimum(length - done, BLOCK)
        offset = (start + done) * BYTES
        at_a = a.to(tl.int64) + offset
        at_b = b.to(tl.int64) + offset
        to = out.to(tl.int64) + offset
        if (at_a | at_b | to) % 16 == 0 and count % VECTOR == 0:
            x = load_tile(at_a, count, DTYPE, True, BLOCK)
            y = load_tile(at_b, count, DTYPE, True, BLOCK)
            z = weigh(x, y, alpha, beta, WIDE).to(DTYPE)
            report(z, findings)
            store_tile(to, count, z, True)
        else:
            # In parts, rolled up: see scalar_pointer.
            PART: tl.constexpr = part_of(BLOCK, 4)
            for part in tl.range(0, BLOCK // PART, loop_unroll_factor=1):
                before = part * PART
                u = load_tile(at_a + before * BYTES, count - before, DTYPE, False, PART)
                v = load_tile(at_b + before * BYTES, count - before, DTYPE, False, PART)
                w = weigh(u, v, alpha, beta, WIDE).to(DTYPE)
                report(w, findings)
                store_tile(to + before * BYTES, count - before, w, False)


@jit
def _finish_chunk(
    x,
    y,
    chunk,
    chunk_count,
    table,
    partials,
    out,
    findings,
    DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write one chunk of the result from its tiles of a and b and all partials of its segment."""
    share = table + 3 * chunk_count + 2 * tl.load(table + 3 * chunk + 2)
    dot, norm_a, norm_b = add_partials(partials, tl.load(share), tl.load(share + 1))
    z = weigh(x, y, coefficient(dot, norm_a), coefficient(dot, norm_b), WIDE).to(DTYPE)
    report(z, findings)
    to = out.to(tl.int64) + tl.load(table + 3 * chunk) * (DTYPE.primitive_bitwidth // 8)
    store_tile(to, tl.load(table + 3 * chunk + 1), z, True)


@Kernel
def _one_launch_kernel(
    partials,
    arrivals,
    a,
    b,
    table,
    out,
    findings,
    chunk_count: tl.int32,
    DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The whole of adasum in one cooperative launch, for chunks of one tile.

    Program p takes the chunks p, p + programs, ... The last one stays in its registers over the
    barrier; those before it, if any, are read again afterwards, backwards, from L2.

    Protocol: the counter only ever rises, by one a program and launch, so launch n releases when
    it reaches n times the grid. All programs must be resident at once, which a cooperative launch
    grants; the count of arrivals releases this program's partials and acquires all others.
    Every chunk starts and ends on a 16-byte boundary in a, b and out: elementwise accesses would
    need more registers than a thread may have.
    """
    BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    programs = tl.num_programs(0)
    chunk = tl.program_id(0)
    x = tl.zeros([BLOCK], DTYPE)
    y = tl.zeros([BLOCK], DTYPE)
    for current in range(chunk, chunk_count, programs):
        offset = tl.load(table + 3 * current) * BYTES
        count = tl.load(table + 3 * current + 1)
        x = load_tile(a.to(tl.int64) + offset, count, DTYPE, True, BLOCK)
        y = load_tile(b.to(tl.int64) + offset, count, DTYPE, True, BLOCK)
        dot, norm_a, norm_b = tile_dots(x, y, WIDE)
        store_row(partials + 3 * current, dot, norm_a, norm_b)
    tl.debug_barrier()
    grid = programs.to(tl.int64)
    seen = tl.atomic_add(arrivals, 1, sem="acq_rel") + 1
    goal = (seen + grid - 1) // grid * grid
    while seen < goal:
        seen = tl.atomic_add(arrivals, 0, sem="acquire")
    earlier = (chunk_count - 1 - chunk) // programs
    last = chunk + earlier * programs
    _finish_chunk(
        x, y, last, chunk_count, table, partials, out, findings,
        DTYPE, WIDE,
    )  # fmt: skip
    for k in range(earlier):
        current = last - (k + 1) * programs
        offset = tl.load(table + 3 * current) * BYTES
        count = tl.load(table + 3 * current + 1)
        x = load_tile(a.to(tl.int64) + offset, count, DTYPE, True, BLOCK)
        y = load_tile(b.to(tl.int64) + offset, count, DTYPE, True, BLOCK)
        _finish_chunk(
            x, y, current, chunk_count, table, partials, out, findings,
            DTYPE, WIDE,
        )  # fmt: skip


def _meta(a: Tensor, chunks: Chunks) -> dict[str, Hashable]:
    return {
        "DTYPE": a.dtype,
        "WIDE": compute_dtype(a.dtype),
        "BLOCK": chunks.block,
        "num_warps": chunks.warps,
    }


class _Aligned:
    """Tensors on 16-byte boundaries: themselves, or copies to be refreshed before each launch.

    Vector and scalar accesses put other elements into a thread, so sums round differently. Ranks
    must find the same bits wherever their buffers start; only the segments may decide.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = [
            one if one.data_ptr() % 16 == 0 else torch.empty_like(one.detach()) for one in tensors
        ]
        pairs = zip(self.tensors, tensors, strict=True)
        self._copies = [(copy, one) for copy, one in pairs if copy is not one]

    def refresh(self) -> None:
        for copy, one in self._copies:
            copy.copy_(one.detach())


def _with_scratch(
    launch: launcher.Launch, aligned: _Aligned, use: Hashable, chunks: Chunks, counters: int
) -> Callable[[], None]:
    """A launch that takes partials and zeroed counters first.

    use: what decides how the counters are left behind.
    """
    a, floats = aligned.tensors[0], 3 * chunks.chunks

    def run() -> None:
        aligned.refresh()
        with launcher.device_guard(a):
            stream = launcher.current_stream()
            launch(*_SCRATCH.fetch(use, a.device, stream, floats, counters))

    return run


def dot_and_norms(call: Call) -> Callable[[], None]:
    """Bind out = float64 rows of the segments, in one launch."""
    if len(call.bounds) == 1:
        return launcher.nothing
    aligned, chunks = _Aligned(*call.inputs), chunks_of(call.inputs[0], call.bounds)
    launch = _dots_kernel.bind(
        chunks.chunks,
        (call.out, chunks.table),
        *aligned.tensors,
        chunks.table,
        call.out,
        VECTORS=chunks.vector_bounds,
        **_meta(call.inputs[0], chunks),
    )
    return _with_scratch(launch, aligned, "dots", chunks, chunks.segments)


def combine(call: Call) -> Callable[[], None]:
    """Bind out from the dots, in one launch."""
    (a, b), dots = call.inputs, call.dots
    assert dots is not None
    if a.numel() == 0:
        return launcher.nothing
    chunks = chunks_of(a, call.bounds)
    return _combine_kernel.bind(
        chunks.chunks, (), a, b, dots, chunks.table, call.out, call.findings, **_meta(a, chunks)
    )


def _programs(a: Tensor, chunks: Chunks) -> int:
    """Programs of the one launch; 0 where two launches are the better or only way.

    As many as the multiprocessors hold with REGISTERS a thread, at most one a chunk. Where a
    program takes several chunks, half of L2 must hold a and b, so that the second reading is from
    there.
    """
    if not (chunks.one_tile and chunks.vector_bounds):
        return 0
    chip = launcher.chip_of(a.device)
    resident = chip.multiprocessors * (65536 // (32 * chunks.warps * REGISTERS))
    on_chip = 2 * a.numel() * a.element_size() <= chip.cache // 2
    return min(resident, chunks.chunks) if chunks.chunks <= resident or on_chip else 0


def adasum(call: Call) -> Callable[[], None]:
    """Bind the launch of Adasum: one cooperative launch if it fits on chip, else two launches."""
    (a, b), out = call.inputs, call.out
    if a.numel() == 0:
        return launcher.nothing
    chunks = chunks_of(a, call.bounds)
    programs = _programs(a, chunks)
    if programs == 0 or out.data_ptr() % 16 != 0:
        return _in_two(call)
    aligned = _Aligned(a, b)
    launch = _one_launch_kernel.bind(
        programs,
        (torch.empty(1, dtype=torch.float64, device=a.device), chunks.table),
        *aligned.tensors,
        chunks.table,
        out,
        call.findings,
        chunks.chunks,
        launch_cooperative_grid=True,
        maxnreg=REGISTERS,
        **_meta(a, chunks),
    )
    # The barrier counts in multiples of the grid.
    return _with_scratch(launch, aligned, programs, chunks, 1)


def _in_two(call: Call) -> Callable[[], None]:
    count, device = len(call.bounds) - 1, call.out.device
    dots = torch.empty(count, 3, dtype=torch.float64, device=device)
    first = dot_and_norms(call._replace(out=dots))
    second = combine(call._replace(dots=dots))

    def run() -> None:
        first()
        second()

    return run
