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
from kernels.gpu import launcher
from kernels.gpu.chunking import Chunks
from kernels.gpu.device_tables import TABLES, Scratch, upload
from kernels.gpu.dot_products import is_last
from kernels.gpu.double_double import add, divide, exact_product, multiply
from kernels.gpu.launcher import Kernel, jit, tl, triton
from kernels.gpu.tiles import convert, load_tile

_SCRATCH = Scratch()
_TINY = TINY if triton is None else tl.constexpr(TINY)
_LIMIT = SPREAD_LIMIT if triton is None else tl.constexpr(SPREAD_LIMIT)
# Elements that a program adds at once: several per thread, so that few loads wait for each other.
_TILE = 512 if triton is None else tl.constexpr(512)


@jit
def _chunk_sum(a, b, length, DTYPE: tl.constexpr):
    """The dot product of `length` elements at the addresses a and b."""
    BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    high = tl.zeros([_TILE], tl.float64)
    low = tl.zeros([_TILE], tl.float64)
    for done in range(0, length, _TILE):
        x = load_tile(a + done * BYTES, length - done, DTYPE, False, _TILE)
        y = load_tile(b + done * BYTES, length - done, DTYPE, False, _TILE)
        product, lost = exact_product(convert(x, tl.float64), convert(y, tl.float64))
        high, low = add(high, low, product, lost)
    return tl.reduce((high, low), 0, add)


@jit
def _sum_of_chunks(rows, count):
    """The sum of `count` partials, read past the L1 cache."""
    high = tl.zeros([_TILE], tl.float64)
    low = tl.zeros([_TILE], tl.float64)
    for done in range(0, count, _TILE):
        k = done + tl.arange(0, _TILE).to(tl.int64)
        part = tl.load(rows + 2 * k, mask=k < count, other=0.0, cache_modifier=".cg")
        rest = tl.load(rows + 2 * k + 1, mask=k < count, other=0.0, cache_modifier=".cg")
        high, low = add(high, low, part, rest)
    return tl.reduce((high, low), 0, add)


@jit
def _store_pair(place, high, low):
    tl.store(place, high)
    tl.store(place + 1, low)


@jit
def _row(tile, rows, one):
    """One row of a tile, unchanged."""
    return tl.sum(tl.where(rows == one, tile, 0.0), axis=0)


@jit
def _at(vector, one):
    """One element of a vector, unchanged."""
    k = tl.arange(0, vector.shape[0])
    return tl.sum(tl.where(k == one, vector, 0.0), axis=0)


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
        row = _row(g, i, step)
        pivot = _at(row, step)
        found = tl.where(pivot <= 0.0, 1, found)
        # By symmetry the same values as `row`, but along the dimension of `i`.
        column = tl.sum(tl.where(j == step, g, 0.0), axis=1)
        less = tl.fma((-column / pivot)[:, None], row[None, :], g)
        g = tl.where((i > step) & (j > step), less, g)
    return found > 0


@jit
def precise_chunk(partials, addresses, offset, length, chunk, chunks, n, DTYPE: tl.constexpr):
    """Store the partials of all pairs of tensors over one chunk, `offset` bytes into each."""
    for i in range(n):
        a = tl.load(addresses + i) + offset
        for j in range(i + 1):
            b = tl.load(addresses + j) + offset
            high, low = _chunk_sum(a, b, length, DTYPE)
            _store_pair(partials + 2 * ((i * (i + 1) // 2 + j) * chunks + chunk), high, low)


@jit
def precise_matrix(partials, matrix, first, count, chunks, n):
    """Store one segment's matrix, the sums of the partials of its `count` chunks."""
    for i in range(n):
        for j in range(i + 1):
            rows = partials + 2 * ((i * (i + 1) // 2 + j) * chunks + first)
            high, low = _sum_of_chunks(rows, count)
            # On the diagonal both stores write equal values to one place.
            _store_pair(matrix + 2 * (i * n + j), high, low)
            _store_pair(matrix + 2 * (j * n + i), high, low)


@Kernel
def _precise_gram_kernel(
    partials,
    arrivals,
    addresses,
    table,
    matrices,
    n: tl.int32,
    ahead: tl.int32,
    DTYPE: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Sum the products of all pairs of tensors over one chunk; a segment's last program adds up.

    The results replace float64 sums if vectors may cancel. Usually they cannot, and the programs
    end at once. Each program checks that by itself, so that none waits for another.
    """
    BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    chunks, chunk = tl.num_programs(0).to(tl.int64), tl.program_id(0).to(tl.int64)
    start = tl.load(table + 3 * chunk)
    length = tl.load(table + 3 * chunk + 1)
    segment = tl.load(table + 3 * chunk + 2)
    share = table + 3 * chunks + 2 * segment
    first, count = tl.load(share), tl.load(share + 1)
    matrix = matrices + 2 * segment * n * n
    if may_cancel(matrix, n, SIZE):
        precise_chunk(partials, addresses + ahead, start * BYTES, length, chunk, chunks, n, DTYPE)
        if is_last(arrivals + segment, count):
            precise_matrix(partials, matrix, first, count, chunks, n)


def made_precise(call: Call, chunks: Chunks, addresses: Tensor) -> Callable[[], None]:
    """Bind a launch that replaces entries of out [S, n, n, 2] if vectors may cancel.

    `out` then holds float64 sums. The last n of `addresses` are the tensors'.
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
        len(addresses) - n,
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
    return (norm < _TINY) | (norm < GUARD * reach * reach)


@jit
def _factor(share_high, share_low, dot_high, dot_low, high, low, zero):
    """1 - share dot / norm; 1 for a zero vector."""
    dot_high, dot_low = multiply(share_high, share_low, dot_high, dot_low)
    high, low = divide(dot_high, dot_low, tl.where(zero, 1.0, high), tl.where(zero, 0.0, low))
    high, low = add(1.0, 0.0, -high, -low)
    return tl.where(zero, 1.0, high), tl.where(zero, 0.0, low)


@jit
def _are_parallel(a_high, a_low, b_high, b_low, dot_high, dot_low, a_reach, b_reach):
    """Whether |a|^2 |b|^2 equals (a.b)^2 up to the rounding errors of a precise matrix."""
    high, low = multiply(a_high, a_low, b_high, b_low)
    other, rest = multiply(dot_high, dot_low, dot_high, dot_low)
    apart, _ = add(high, low, -other, -rest)
    lost = tl.fma(a_reach * a_reach, b_high, b_reach * b_reach * a_high)
    return tl.abs(apart) <= 2.0**-100 * lost


@jit
def _blend(alpha_high, alpha_low, a_high, a_low, beta_high, beta_low, b_high, b_low):
    """The sum of alpha a and beta b."""
    high, low = multiply(alpha_high, alpha_low, a_high, a_low)
    other, rest = multiply(beta_high, beta_low, b_high, b_low)
    return add(high, low, other, rest)


@jit
def _share(join, column):
    bits = tl.load(join + column)
    return bits.to(tl.float64, bitcast=True)


@jit
def add_table(high, low, at, n, PRECISE: tl.constexpr):
    """Add the matrix at `at` to [SIZE, SIZE] high and low."""
    PARTS: tl.constexpr = 2 if PRECISE else 1
    k = tl.arange(0, high.shape[0])
    i, j = k[:, None], k[None, :]
    inside = (i < n) & (j < n)
    at += (i.to(tl.int64) * n + j) * PARTS
    part = tl.load(at, mask=inside, other=0.0)
    rest = tl.zeros(high.shape, tl.float64)
    if PRECISE:
        rest = tl.load(at + 1, mask=inside, other=0.0)
    return add(high, low, part, rest)


@jit
def replay(high, low, tree, n, PRECISE: tl.constexpr):
    """(coefficients [SIZE], spread) of one segment from its matrix; NaN if that is not finite.

    Each join replaces two vectors by one and updates the Gram matrix. Each leaf has one
    coefficient, and belongs to one of the remaining vectors, its root.
    """
    SIZE: tl.constexpr = high.shape[0]
    GUARD: tl.constexpr = 2.0**-92 if PRECISE else 2.0**-46
    k = tl.arange(0, SIZE)
    i, j = k[:, None], k[None, :]
    lost = tl.max(tl.max(tl.where(tl.abs(high) < float("inf"), 0, 1), axis=1), axis=0) > 0
    c_high = tl.full([SIZE], 1.0, tl.float64)
    c_low = tl.zeros([SIZE], tl.float64)
    root = k
    reach = tl.sqrt(tl.maximum(tl.sum(tl.where(i == j, high, 0.0), axis=0), 0.0))
    widest = tl.full([], 1.0, tl.float64)
    nothing = tl.full([], 0, tl.int32)
    for step in range(n - 1):
        join = tree + 6 * step
        left, right = tl.load(join).to(tl.int32), tl.load(join + 1).to(tl.int32)
        a_high, a_low = _row(high, i, left), _row(low, i, left)
        b_high, b_low = _row(high, i, right), _row(low, i, right)
        dot_high, dot_low = _at(a_high, right), _at(a_low, right)
        a_reach, b_reach = _at(reach, left), _at(reach, right)
        a_norm, a_rest = _at(a_high, left), _at(a_low, left)
        b_norm, b_rest = _at(b_high, right), _at(b_low, right)
        p_high, p_low = _share(join, 2), _share(join, 3)
        q_high, q_low = _share(join, 4), _share(join, 5)
        a_zero, b_zero = _is_zero(a_norm, a_reach, GUARD), _is_zero(b_norm, b_reach, GUARD)
        alpha, alpha_low = _factor(p_high, p_low, dot_high, dot_low, a_norm, a_rest, a_zero)
        beta, beta_low = _factor(q_high, q_low, dot_high, dot_low, b_norm, b_rest, b_zero)
        if PRECISE:
            # Parallel vectors get their weighted mean: their dot / norm may be arbitrarily
            # large, and a small result would be the sum of large terms.
            parallel = _are_parallel(
                a_norm, a_rest, b_norm, b_rest, dot_high, dot_low, a_reach, b_reach
            )
            parallel = parallel & (a_zero == 0) & (b_zero == 0)
            alpha = tl.where(parallel, p_high, alpha)
            alpha_low = tl.where(parallel, p_low, alpha_low)
            beta = tl.where(parallel, q_high, beta)
            beta_low = tl.where(parallel, q_low, beta_low)
        # The joined vector's dot products with all vectors before the join, then with itself.
        r_high, r_low = _blend(alpha, alpha_low, a_high, a_low, beta, beta_low, b_high, b_low)
        norm, norm_low = _blend(
            alpha, alpha_low, _at(r_high, left), _at(r_low, left),
            beta, beta_low, _at(r_high, right), _at(r_low, right),
        )  # fmt: skip
        r_high = tl.where(k == left, norm, r_high)
        r_low = tl.where(k == left, norm_low, r_low)
        high = tl.where(i == left, r_high[None, :], tl.where(j == left, r_high[:, None], high))
        low = tl.where(i == left, r_low[None, :], tl.where(j == left, r_low[:, None], low))
        of_left = root == left
        by_high = tl.where(of_left, alpha, tl.where(root == right, beta, 1.0))
        by_low = tl.where(of_left, alpha_low, tl.where(root == right, beta_low, 0.0))
        c_high, c_low = multiply(c_high, c_low, by_high, by_low)
        root = tl.where(root == right, left, root)
        new_reach = tl.fma(tl.abs(alpha), a_reach, tl.abs(beta) * b_reach)
        reach = tl.where(k == left, new_reach, reach)
        square = new_reach * new_reach
        nothing = tl.where(norm < GUARD * square, 1, 0)
        found = tl.where(norm > 0.0, square / tl.where(norm > 0.0, norm, 1.0), float("inf"))
        widest = tl.maximum(widest, tl.where(square < _TINY, 1.0, found))
    if PRECISE:
        # If the result is zero, rounded coefficients would give it a direction.
        c_high = tl.where(nothing > 0, 0.0, c_high)
    nan = float("nan")
    return tl.where(lost, nan, c_high), tl.where(lost, nan, widest)


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
    high = tl.zeros([SIZE, SIZE], tl.float64)
    low = tl.zeros([SIZE, SIZE], tl.float64)
    for table in range(tables):
        at = partials + (table * segments + segment) * n * n * PARTS
        high, low = add_table(high, low, at, n, PRECISE)
    found, widest = replay(high, low, tree, n, PRECISE)
    k = tl.arange(0, SIZE)
    tl.store(out + segment * n + k, found, mask=k < n)
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
