"""The balanced tree of kernels/arithmetic.py, as sums of tiles in registers.

One half of each level stays in registers while the other half is added up. So deeper trees need
smaller tiles, and the code grows only with the number of levels.
"""

from __future__ import annotations

from kernels.gpu import launcher
from kernels.gpu.launcher import jit, tl, triton
from kernels.gpu.tiles import convert, load_tile

# Loads of so many levels of the tree are under way together.
_TOGETHER = 2 if triton is None else tl.constexpr(2)


@jit
def join(x, y):
    """Sum of two tiles of one dtype, computed in float32 or float64 and rounded to the dtype."""
    # For 16 bits the result equals an addition in 16 bits, since float32 has over twice as many.
    WIDE: tl.constexpr = tl.float64 if x.dtype == tl.float64 else tl.float32
    return (x.to(WIDE) + y.to(WIDE)).to(x.dtype)


@jit
def branch(
    addresses,
    offset,
    count,
    j,
    extra,
    DTYPE: tl.constexpr,
    SUM: tl.constexpr,
    LEVELS: tl.constexpr,
    PAIRS: tl.constexpr,
    VECTORS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum of the 2**LEVELS leaves of the balanced tree from leaf j on.

    kernels/arithmetic.py defines the tensors of a leaf. Registers hold one half of each level.
    """
    HALF: tl.constexpr = 1 << LEVELS >> 1
    if LEVELS == 0:
        at = addresses + j
        if PAIRS:
            # Each of the first `extra` leaves is the sum of a pair.
            paired = j < extra
            at = addresses + tl.where(paired, 2 * j, j + extra)
        x = convert(load_tile(tl.load(at) + offset, count, DTYPE, VECTORS, BLOCK), SUM)
        if PAIRS:
            # If there is no second tensor, nothing is read.
            at += paired.to(tl.int32)
            few = tl.where(paired, count, 0)
            y = convert(load_tile(tl.load(at) + offset, few, DTYPE, VECTORS, BLOCK), SUM)
            x = tl.where(paired, join(x, y), x)
    else:
        # A loop, so that the code grows with the levels, not with the leaves. Two separate zeros,
        # since Triton cannot carry one value through a loop under two names.
        left = tl.zeros([BLOCK], SUM)
        right = tl.zeros([BLOCK], SUM)
        for half in tl.range(0, 2, loop_unroll_factor=2 if LEVELS <= _TOGETHER else 1):
            k = j + half * HALF
            left = right
            right = branch(
                addresses, offset, count, k, extra, DTYPE, SUM, LEVELS - 1, PAIRS, VECTORS, BLOCK
            )
        x = join(left, right)
    return x


def tree_tile_of(levels: int, numel: int, itemsize: int) -> tuple[int, int]:
    """(elements per tile, warps) of a tree: about as many loads under way as for a list.

    With three levels or more a thread has eight elements (four of float64), so that each level
    needs at most eight registers.
    """
    block, warps = launcher.block_of(numel, itemsize)
    return min(block, max(1024 * min(itemsize, 4), 16384 >> levels) // itemsize), warps


def options_of(levels: int) -> dict[str, int]:
    """Triton's options for a tree of so many levels.

    ptxas would spill the values that outer loops keep, unless it is given a number of registers.
    Shallow trees have no such loops, and need fewer registers without the option.
    """
    return {"maxnreg": 168} if levels > 3 else {}
