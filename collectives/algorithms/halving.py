"""Recursive halving, then doubling: reduce half of what is left with ever farther partners.

Wins on medium and large buffers where latency matters: 2 log2 n steps and 2 (n - 1) / n of the
buffer each way (powers of two; folding adds two steps). The tree is the same for every element:
adjacent ranks first, then adjacent pairs, and so on (distance doubling), so the same schedule
carries Adasum, under the name `vhdd`: at the level of distance d the aligned block of 2d ranks
holds both operands in pieces. Sources: Rabenseifner, "Optimization of collective reduction
operations", ICCS 2004; Maleki et al., "Scaling distributed training with adaptive summation",
arXiv 2006.02924, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from ..schedule import Action, Collective, Schedule, Step, Transfer
from .folding import Fold, folded


def _steps(fold: Fold, leaf: int) -> Iterator[Step]:
    start, stop = 0, fold.leaves
    ranges: list[tuple[int, int, int]] = []
    distance = 1
    while distance < fold.leaves:
        ranges.append((distance, start, stop))
        partner = fold.rank(leaf ^ distance)
        middle = (start + stop) // 2
        if leaf & distance:
            out, action = (start, middle), Action.REDUCE_LEFT
            start = middle
        else:
            out, action = (middle, stop), Action.REDUCE_RIGHT
            stop = middle
        yield Step(
            sends=(Transfer(partner, *out),),
            recvs=(Transfer(partner, start, stop, action),),
            group=fold.block(leaf, 2 * distance),
        )
        distance *= 2
    for distance, whole_start, whole_stop in reversed(ranges):
        partner = fold.rank(leaf ^ distance)
        other = (whole_start, start) if start > whole_start else (stop, whole_stop)
        yield Step(sends=(Transfer(partner, start, stop),), recvs=(Transfer(partner, *other),))
        start, stop = whole_start, whole_stop


def _schedule(name: str, size: int) -> Schedule:
    leaves = Fold(size).leaves
    inner_steps = 2 * (leaves.bit_length() - 1)
    return Schedule(
        name,
        size,
        leaves,
        Collective.ALL_REDUCE,
        lambda rank: folded(size, rank, leaves, inner_steps, _steps),
    )


@lru_cache(maxsize=64)
def all_reduce(size: int) -> Schedule:
    """`rechd`: 2 log2 n steps, 2 (n - 1) / n of the buffer each way."""
    return _schedule("rechd", size)


@lru_cache(maxsize=64)
def adasum_all_reduce(size: int) -> Schedule:
    """`vhdd`: the same steps, named for the operator that needs their groups."""
    return _schedule("vhdd", size)
