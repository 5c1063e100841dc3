"""Precise Gram matrices and the coefficients of an Adasum tree on a GPU, in double-double."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kernels.arithmetic import SPREAD_LIMIT, TINY
from kernels.call import Call, Tree
from kernels.gpu import double_double as dd
from kernels.gpu import launcher
from kernels.gpu.chunking import Chunks
from kernels.gpu.device_tables import TABLES, Scratch, upload
from kernels.gpu.dot_products import is_last
from kernels.gpu.launcher import Kernel, jit, tl, triton
from kernels.gpu.tiles import chunk_at, convert, load_tile

_SCRATCH = Scratch()
_TINY = TINY if triton is None else tl.constexpr(TINY)
_LIMIT = SPREAD_LIMIT if triton is None else tl.constexpr(SPREAD_LIMIT)
# Elements that a program adds at once: several per thread, so that few loads wait for each other.
_TILE = 512 if triton is None else tl.constexpr(512)


@jit
def may_cancel(matrix, n, SIZE: tl.constexpr):
    """Whether vectors may cancel beyond SPREAD_LIMIT: kernels/cpu/replay.h explains the test.

    In place of n it uses SIZE, a constant that is at least as large.
    """
    k = tl.arange(0, SIZE)
    i, j = k[:, None], k[None, :]
    g = tl.load(matrix + 2 * (i.to(tl.int64) * n + j), mask=(i < n) & (j < n), other=0.0)
    lowered = tl.where(g == 0.0, 1.0, tl.fma(g, -SIZE / _LIMIT, g))
    g = tl.where(i == j, lowered, g)
    found = tl.full([], 0, tl.int32)
    for step in range(n):
        row = dd.pick(g, i == step)
        pivot = dd.pick(row, k == step)
        found = tl.where(pivot <= 0.0, 1, found)
        # By symmetry the same values as `row`, but along the dimension of `i`.
        column = tl.sum(tl.where(j == step, g, 0.0), axis=1)
        less = tl.fma((-column / pivot)[:, None], row[None, :], g)
        g = tl.where((i > step) & (j > step), less, g)
    return found > 0


@jit
def precise_chunk(partials, addresses, offset, length, chunk, chunks, n, DTYPE: tl.constexpr):
    """Store the partials of all pairs of tensors over one chunk, `offset` bytes into each."""
    BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    for i in range(n):
        a = tl.load(addresses + i) + offset
        for j in range(i + 1):
            b = tl.load(addresses + j) + offset
            sums = dd.zeros([_TILE])
            for done in range(0, length, _TILE):
                x = load_tile(a + done * BYTES, length - done, DTYPE, False, _TILE)
                y = load_tile(b + done * BYTES, length - done, DTYPE, False, _TILE)
                product = dd.exact_product(convert(x, tl.float64), convert(y, tl.float64))
                sums = dd.add(sums, product)
            dd.store(partials + 2 * ((i * (i + 1) // 2 + j) * chunks + chunk), dd.total(sums))


@jit
def precise_matrix(partials, matrix, first, count, chunks, n):
    """Store one segment's matrix, the sums of its `count` chunks' partials, read past the L1."""
    for i in range(n):
        for j in range(i + 1):
            rows = partials + 2 * ((i * (i + 1) // 2 + j) * chunks + first)
            sums = dd.zeros([_TILE])
            for done in range(0, count, _TILE):
                k = done + tl.arange(0, _TILE).to(tl.int64)
                high = tl.load(rows + 2 * k, mask=k < count, other=0.0, cache_modifier=".cg")
                low = tl.load(rows + 2 * k + 1, mask=k < count, other=0.0, cache_modifier=".cg")
                sums = dd.add(sums, dd.Double(high, low))
            product = dd.total(sums)
            # On the diagonal both stores write equal values to one place.
            dd.store(matrix + 2 * (i * n + j), product)
            dd.store(matrix + 2 * (j * n + i), product)


@Kernel
def _precise_gram_kernel(
    partials,
    arrivals,
    addresses,
    table,
    matrices,
    n: tl.int32,
    DTYPE: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Sum the products of all pairs of tensors over one chunk; a segment's last program adds up.

    The results replace float64 sums if vectors may cancel. Usually they cannot, and the programs
    end at once. Each program checks that by itself, so that none waits for another.
    """
    BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    chunks, chunk = tl.num_programs(0).to(tl.int64), tl.program_id(0).to(tl.int64)
    start, length, segment = chunk_at(table, chunk)
    share = table + 3 * chunks + 2 * segment
    first, count = tl.load(share), tl.load(share + 1)
    matrix = matrices + 2 * segment * n * n
    if may_cancel(matrix, n, SIZE):
        precise_chunk(partials, addresses, start * BYTES, length, chunk, chunks, n, DTYPE)
        if is_last(arrivals + segment, count):
            precise_matrix(partials, matrix, first, count, chunks, n)


def made_precise(call: Call, chunks: Chunks, addresses: Tensor) -> Callable[[], None]:
    """Bind a launch that replaces entries of out [S, n, n, 2] if vectors may cancel.

    `out` then holds float64 sums.
    """
    segments, n, device = len(call.bounds) - 1, len(call.inputs), call.out.device
    size = launcher.power_of_two_above(max(n, 2))
    launch = _precise_gram_kernel.bind(
        chunks.chunks,
        (call.out, chunks.table),
        addresses,
        chunks.table,
        call.out,
        n,
        DTYPE=call.inputs[0].dtype,
        SIZE=size,
        num_warps=max(4, warps_of(size)),
    )
    floats = n * (n + 1) * chunks.chunks
    scratch = partial(_SCRATCH.fetch, "precise gram", device, floats, segments)
    return partial(launch, scratch=scratch)


@jit
def _is_zero(norm, reach, GUARD: tl.constexpr):
    """Whether a squared norm is tiny, or within the rounding errors of its matrix."""
    return (norm.high < _TINY) | (norm.high < GUARD * reach * reach)


@jit
def _factor(share, dot, norm, zero):
    """1 - share dot / norm; 1 for a zero vector."""
    quotient = dd.divide(dd.multiply(share, dot), dd.choose(zero, dd.Double(1.0, 0.0), norm))
    return dd.choose(zero, dd.Double(1.0, 0.0), dd.subtract(dd.Double(1.0, 0.0), quotient))


@jit
def _are_parallel(a, b, dot, a_reach, b_reach):
    """Whether |a|^2 |b|^2 equals (a.b)^2 up to the rounding errors of a precise matrix."""
    apart = dd.subtract(dd.multiply(a, b), dd.multiply(dot, dot))
    lost = tl.fma(a_reach * a_reach, b.high, b_reach * b_reach * a.high)
    return tl.abs(apart.high) <= 2.0**-100 * lost


@jit
def _blend(alpha, a, beta, b):
    return dd.add(dd.multiply(alpha, a), dd.multiply(beta, b))


@jit
def _load_share(at):
    high, low = tl.load(at), tl.load(at + 1)
    return dd.Double(high.to(tl.float64, bitcast=True), low.to(tl.float64, bitcast=True))


@jit
def load_matrix(at, n, SIZE: tl.constexpr, PRECISE: tl.constexpr):
    """The n x n matrix at `at` as [SIZE, SIZE]."""
    PARTS: tl.constexpr = 2 if PRECISE else 1
    k = tl.arange(0, SIZE)
    i, j = k[:, None], k[None, :]
    inside = (i < n) & (j < n)
    at += (i.to(tl.int64) * n + j) * PARTS
    high, low = tl.load(at, mask=inside, other=0.0), tl.zeros([SIZE, SIZE], tl.float64)
    if PRECISE:
        low = tl.load(at + 1, mask=inside, other=0.0)
    return dd.Double(high, low)


@jit
def replay(g, tree, n, PRECISE: tl.constexpr):
    """(coefficients [SIZE], spread) of one segment from its matrix; NaN if that is not finite.

    Each join replaces two vectors by one and updates the Gram matrix. Each leaf has one
    coefficient, and belongs to one of the remaining vectors, its root.
    """
    SIZE: tl.constexpr = g.high.shape[0]
    GUARD: tl.constexpr = 2.0**-92 if PRECISE else 2.0**-46
    k = tl.arange(0, SIZE)
    i, j = k[:, None], k[None, :]
    lost = tl.max(tl.max(tl.where(tl.abs(g.high) < float("inf"), 0, 1), axis=1), axis=0) > 0
    c = dd.Double(tl.full([SIZE], 1.0, tl.float64), tl.zeros([SIZE], tl.float64))
    root = k
    reach = tl.sqrt(tl.maximum(dd.pick(g.high, i == j), 0.0))
    widest = tl.full([], 1.0, tl.float64)
    nothing = tl.full([], 0, tl.int32)
    for step in range(n - 1):
        join = tree + 6 * step
        left, right = tl.load(join).to(tl.int32), tl.load(join + 1).to(tl.int32)
        at_left, at_right = k == left, k == right
        a, b = dd.pick_double(g, i == left), dd.pick_double(g, i == right)
        dot, norm_b = dd.pick_double(a, at_right), dd.pick_double(b, at_right)
        norm_a = dd.pick_double(a, at_left)
        reach_a, reach_b = dd.pick(reach, at_left), dd.pick(reach, at_right)
        p, q = _load_share(join + 2), _load_share(join + 4)
        zero_a, zero_b = _is_zero(norm_a, reach_a, GUARD), _is_zero(norm_b, reach_b, GUARD)
        alpha, beta = _factor(p, dot, norm_a, zero_a), _factor(q, dot, norm_b, zero_b)
        if PRECISE:
            # Parallel vectors get their weighted mean: their dot / norm may be arbitrarily
            # large, and a small result would be the sum of large terms.
            parallel = _are_parallel(norm_a, norm_b, dot, reach_a, reach_b)
            parallel = parallel & (zero_a == 0) & (zero_b == 0)
            alpha, beta = dd.choose(parallel, p, alpha), dd.choose(parallel, q, beta)
        # The joined vector's dot products with all vectors before the join, then with itself.
        row = _blend(alpha, a, beta, b)
        norm = _blend(alpha, dd.pick_double(row, at_left), beta, dd.pick_double(row, at_right))
        row = dd.choose(at_left, norm, row)
        column = dd.Double(row.high[:, None], row.low[:, None])
        g = dd.choose(j == left, column, g)
        g = dd.choose(i == left, dd.Double(row.high[None, :], row.low[None, :]), g)
        c = dd.multiply(
            c, dd.choose(root == left, alpha, dd.choose(root == right, beta, dd.Double(1.0, 0.0)))
        )
        root = tl.where(root == right, left, root)
        longest = tl.fma(tl.abs(alpha.high), reach_a, tl.abs(beta.high) * reach_b)
        reach = tl.where(at_left, longest, reach)
        square = longest * longest
        nothing = tl.where(norm.high < GUARD * square, 1, 0)
        positive = norm.high > 0.0
        found = tl.where(positive, square / tl.where(positive, norm.high, 1.0), float("inf"))
        widest = tl.maximum(widest, tl.where(square < _TINY, 1.0, found))
    found = c.high
    if PRECISE:
        # If the result is zero, rounded coefficients would give it a direction.
        found = tl.where(nothing > 0, 0.0, found)
    nan = float("nan")
    return tl.where(lost, nan, found), tl.where(lost, nan, widest)


@Kernel
def _coefficients_kernel(
    partials,
    tree,
    spread,
    out,
    tables: tl.int32,
    n: tl.int32,
    SIZE: tl.constexpr,
    PRECISE: tl.constexpr,
    SPREAD: tl.constexpr,
):
    """The coefficients of one segment."""
    PARTS: tl.constexpr = 2 if PRECISE else 1
    segment, segments = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    g = dd.zeros([SIZE, SIZE])
    for table in range(tables):
        at = partials + (table * segments + segment) * n * n * PARTS
        g = dd.add(g, load_matrix(at, n, SIZE, PRECISE))
    coefficients, widest = replay(g, tree, n, PRECISE)
    k = tl.arange(0, SIZE)
    tl.store(out + segment * n + k, coefficients, mask=k < n)
    if SPREAD:
        tl.store(spread + segment, widest)


def tree_table(tree: Tree, device: torch.device) -> Tensor:
    """Return int64 rows (left, right, p/(p+q), q/(p+q)), the quotients as bits of high and low."""

    def make(pinned: Tensor | None) -> tuple[Tensor, Tensor]:
        rows = []
        for left, right, p, q in tree:
            whole = Fraction(p) + Fraction(q)
            numbers = []
            for share in (Fraction(p) / whole, Fraction(q) / whole):
                numbers += [float(share), float(share - Fraction(float(share)))]
            rows.append([left, right, *np.array(numbers).view(np.int64)])
        return upload(np.array(rows, dtype=np.int64).reshape(-1), device, pinned)

    found: tuple[Tensor, Tensor] = TABLES.fetch(("tree", tree), device, make)
    return found[0]


def warps_of(size: int) -> int:
    """Return the warps of a program: one, without waits, if its registers hold the matrix.

    With more than 32 vectors ptxas spills a few bytes, with more than 64 many.
    """
    return 1 if size <= 16 else min(size * size // 128, 16)


def adasum_coefficients(call: Call) -> Callable[[], None]:
    """Bind out = [S, n], the coefficients of the tree's vectors, in one launch."""
    (partials,), out = call.inputs, call.out
    segments, n = out.shape
    if segments == 0:
        return launcher.nothing
    size = launcher.power_of_two_above(max(n, 2))
    return _coefficients_kernel.bind(
        segments,
        (),
        partials,
        tree_table(call.tree, out.device),
        out if call.spread is None else call.spread,
        out,
        partials.shape[0],
        n,
        SIZE=size,
        PRECISE=call.precise,
        SPREAD=call.spread is not None,
        num_warps=warps_of(size),
    )
