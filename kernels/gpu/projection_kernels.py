"""dot_and_norms, combine and adasum on a GPU: one launch each, if necessary two for adasum.

A *chunk* is a run of tiles inside one segment, the work of one program. Its partial (d, A, B) is
written by its index, and the last program to arrive adds up a segment's partials in that order, so
the bits never depend on timing. Chunks and tiles depend only on segments, size and dtype, not on
the device, and they are the same in one launch and in two.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial

import torch
from torch import Tensor

from kernels.arithmetic import compute_dtype
from kernels.call import Call
from kernels.gpu import launcher
from kernels.gpu.chunking import Aligned, Chunks, chunks_of
from kernels.gpu.device_tables import Scratch
from kernels.gpu.dot_products import (
    add_dots,
    add_partials,
    edge_dots,
    is_last,
    over_threads,
    store_row,
    thread_dots,
    weights,
    zero_dots,
)
from kernels.gpu.launcher import Kernel, jit, tl
from kernels.gpu.one_launch_kernel import _one_launch_kernel, registers_of
from kernels.gpu.tiles import (
    THREADS,
    chunk_at,
    float_of,
    load_tile,
    part_of,
    report,
    store_tile,
    weigh,
    whole_vectors,
)

_SCRATCH = Scratch()
# Stands for scratch memory when a launch is bound, to give its dtype.
_FLOAT64 = torch.empty(1, dtype=torch.float64, device="cpu")


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
    BLOCK: tl.constexpr,
):
    """Store one chunk's partial; a segment's last program writes the segment's row."""
    BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    VECTOR: tl.constexpr = 16 // BYTES
    chunk = tl.program_id(0)
    start, length, segment = chunk_at(table, chunk)
    before, inner = whole_vectors(start, length, VECTOR)
    from_a = a.to(tl.int64) + (start + before) * BYTES
    from_b = b.to(tl.int64) + (start + before) * BYTES
    sums = zero_dots(THREADS)
    for done in range(0, inner, BLOCK):
        count = tl.minimum(inner - done, BLOCK)
        x = load_tile(from_a + done * BYTES, count, DTYPE, True, BLOCK)
        y = load_tile(from_b + done * BYTES, count, DTYPE, True, BLOCK)
        sums = add_dots(sums, thread_dots(x, y, VECTOR, WIDE))
    if inner != length:
        sums = add_dots(sums, edge_dots(a, b, start, length, before, inner, DTYPE, WIDE))
    store_row(partials + 3 * chunk, over_threads(sums))
    share = table + 3 * tl.num_programs(0) + 2 * segment
    first, count = tl.load(share), tl.load(share + 1)
    if is_last(arrivals + segment, count):
        store_row(dots + 3 * segment, add_partials(partials, first, count))


@jit
def _blend_parts(
    at_a,
    at_b,
    to,
    count,
    alpha,
    beta,
    found_inf,
    CANCELLING: tl.constexpr,
    DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a tile of the result at `to` in parts, in a loop: see scalar_pointer."""
    PART: tl.constexpr = part_of(BLOCK, 8 if CANCELLING else 4)
    ONCE: tl.constexpr = "evict_first"
    BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    for part in tl.range(0, BLOCK // PART, loop_unroll_factor=1):
        before = part * PART
        u = load_tile(at_a + before * BYTES, count - before, DTYPE, False, PART, ONCE)
        v = load_tile(at_b + before * BYTES, count - before, DTYPE, False, PART, ONCE)
        w = weigh(u, v, alpha, beta, CANCELLING, WIDE).to(DTYPE)
        report(w, found_inf)
        store_tile(to + before * BYTES, count - before, w, False, ONCE)


@Kernel
def _combine_kernel(
    factor_a_bits: tl.int64,
    factor_b_bits: tl.int64,
    a,
    b,
    dots,
    table,
    out,
    found_inf,
    DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Write one chunk of the result. Chunks and tiles are in reverse order: L2 holds the last ones.

    Data that were read or written leave the caches first, before data still to be read. DEPENDENT:
    The kernel ahead on the stream may not have ended, and its writes may not be visible yet. Every
    program waits for that kernel first, so that later kernels wait for both.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    ONCE: tl.constexpr = "evict_first"
    BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    VECTOR: tl.constexpr = 16 // BYTES
    chunk = tl.num_programs(0) - 1 - tl.program_id(0)
    start, length, segment = chunk_at(table, chunk)
    tiles = (length + BLOCK - 1) // BLOCK
    for k in range(tiles):
        done = (tiles - 1 - k) * BLOCK
        count = tl.minimum(length - done, BLOCK)
        offset = (start + done) * BYTES
        at_a = a.to(tl.int64) + offset
        at_b = b.to(tl.int64) + offset
        to = out.to(tl.int64) + offset
        vectors = ((at_a | at_b | to) % 16 == 0) & (count % VECTOR == 0)
        # Load while the coefficients are computed: most chunks are one tile.
        x = load_tile(at_a, tl.where(vectors, count, 0), DTYPE, True, BLOCK, ONCE)
        y = load_tile(at_b, tl.where(vectors, count, 0), DTYPE, True, BLOCK, ONCE)
        f, g = float_of(factor_a_bits), float_of(factor_b_bits)
        alpha, beta, cancelling = weights(dots + 3 * segment, f, g, "")
        whole = (tl.float64 == WIDE) | (cancelling == 0)
        if vectors and whole:
            z = weigh(x, y, alpha, beta, False, WIDE).to(DTYPE)
            report(z, found_inf)
            store_tile(to, count, z, True, ONCE)
        elif whole:
            _blend_parts(at_a, at_b, to, count, alpha, beta, found_inf, False, DTYPE, WIDE, BLOCK)
        else:
            # For any alignment: this is rare, and must take no registers from the paths above.
            _blend_parts(at_a, at_b, to, count, alpha, beta, found_inf, True, DTYPE, WIDE, BLOCK)


def _meta(a: Tensor, chunks: Chunks) -> dict[str, Hashable]:
    return {
        "DTYPE": a.dtype,
        "WIDE": compute_dtype(a.dtype),
        "BLOCK": chunks.block,
        "num_warps": chunks.warps,
    }


def _with_scratch(
    launch: launcher.Launch, aligned: Aligned, use: Hashable, chunks: Chunks, counters: int
) -> Callable[..., None]:
    """Return a function of the squared norms' factors, if any, that launches with scratch memory.

    use: A key for the state that the kernel leaves the counters in. The function has the argument
    `then` of `Launch`.
    """
    device, floats = aligned.tensors[0].device, 3 * (chunks.chunks + chunks.segments)
    scratch = partial(_SCRATCH.fetch, use, device, floats, counters)

    def run(*factors: float, then: Callable[..., None] | None = None) -> None:
        aligned.refresh()
        bits = launcher.bits_of(*factors)
        launch(*bits, scratch=scratch, then=then)

    return run


def dot_and_norms(call: Call) -> Callable[[], None]:
    """Bind out = float64, one row per segment, in one launch."""
    if len(call.bounds) == 1:
        return launcher.nothing
    return _dots(call, chunks_of(call.inputs[0], call.bounds), call.out)


def _dots(call: Call, chunks: Chunks, out: Tensor) -> Callable[..., None]:
    aligned = Aligned(*call.inputs)
    launch = _dots_kernel.bind(
        chunks.chunks,
        (out, chunks.table),
        *aligned.tensors,
        chunks.table,
        out,
        **_meta(call.inputs[0], chunks),
    )
    return _with_scratch(launch, aligned, "dots", chunks, chunks.segments)


def combine(call: Call) -> Callable[[float, float], None]:
    """Bind the blend by the dots and the factors of the squared norms, in one launch."""
    assert call.table is not None
    if call.inputs[0].numel() == 0:
        return launcher.nothing
    blend = _blend(call, call.table, dependent=False)
    return lambda f, g: blend(*launcher.bits_of(f, g))


def _blend(call: Call, dots: Tensor, *, dependent: bool) -> launcher.Launch:
    """Bind the blend. dependent: Launch it while the kernel ahead ends, if the GPU can do so."""
    a, b = call.inputs
    chunks = chunks_of(a, call.bounds, summed=False)
    dependent = dependent and launcher.chip_of(a.device).dependent_launch
    return _combine_kernel.bind(
        chunks.chunks,
        (0, 0),
        a,
        b,
        dots,
        chunks.table,
        call.out,
        call.found_inf,
        DEPENDENT=dependent,
        **_meta(a, chunks),
        # Only if it is true, since backends without the option refuse its name.
        **({"launch_pdl": True} if dependent else {}),
    )


def _programs(a: Tensor, chunks: Chunks) -> int:
    """Return the programs of a single launch; 0 if two launches are better or the only way.

    There are as many as fit on the multiprocessors by their registers, at most one per chunk. If
    programs have several chunks, half of L2 must hold a and b, so that they are read again from
    there.
    """
    if not chunks.one_tile:
        return 0
    chip = launcher.chip_of(a.device)
    taken = 32 * chunks.warps * registers_of(chip.capability)
    resident = chip.multiprocessors * (65536 // taken)
    on_chip = 2 * a.numel() * a.element_size() <= chip.cache // 2
    return min(resident, chunks.chunks) if chunks.chunks <= resident or on_chip else 0


def adasum(call: Call) -> Callable[[float, float], None]:
    """Bind Adasum: one launch if it may be cooperative and fits on chip, otherwise two."""
    (a, b), out = call.inputs, call.out
    if a.numel() == 0:
        return launcher.nothing
    chunks = chunks_of(a, call.bounds)
    programs = _programs(a, chunks) if call.kind else 0
    if programs == 0 or out.data_ptr() % 16 != 0:
        return _in_two(call, chunks)
    aligned = Aligned(a, b)
    launch = _one_launch_kernel.bind(
        programs,
        (0, 0, _FLOAT64, chunks.table),
        *aligned.tensors,
        chunks.table,
        out,
        call.found_inf,
        chunks.chunks,
        chunks.segments,
        launch_cooperative_grid=True,
        maxnreg=registers_of(launcher.chip_of(a.device).capability),
        **_meta(a, chunks),
    )
    # The counter of complete segments depends on the number of segments.
    use = "one launch", chunks.segments
    return _with_scratch(launch, aligned, use, chunks, chunks.segments + 1)


def _in_two(call: Call, chunks: Chunks) -> Callable[[float, float], None]:
    """Bind a launch of the dots and a second one of the blend.

    The second launch is set up while the last programs of the first end. No program of the dots
    lets it begin earlier: another thread's kernel that begins early and does not wait could then
    come in between and end before the dots, and the second launch would wait only for that kernel.
    """
    dots = torch.empty(chunks.segments, 3, dtype=torch.float64, device=call.out.device)
    first, second = _dots(call, chunks, dots), _blend(call, dots, dependent=True)

    def run(factor_a: float, factor_b: float) -> None:
        first(then=partial(second.start, *launcher.bits_of(factor_a, factor_b)))

    return run
