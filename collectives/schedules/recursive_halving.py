"""Recursive halving, then doubling: reduce half of what is left with ever farther partners.

Wins on medium and large buffers where latency matters: 2 log2 n steps, 2 (n - 1) / n of the buffer
each way and half of it as extra memory (powers of two; folding adds two steps, and the whole buffer
as extra memory on the ranks folded into). The tree is the same for every element: adjacent ranks
first, then adjacent pairs, and so on (distance doubling), so the same schedule carries Adasum,
under the name `vhdd`: at the level of distance d the aligned block of 2d ranks holds both operands
in pieces. Sources: Rabenseifner, "Optimization of collective reduction operations", ICCS 2004;
Maleki et al., "Scaling distributed training with adaptive summation", arXiv 2006.02924,
algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from collectives.schedules.algorithm import Algorithm, Order
from collectives.schedules.folding import (
    Fold,
    fold_in,
    fold_out,
    on_leaves,
)
from collectives.schedules.schedule import (
    Action,
    ScatterGather,
    Schedule,
    Step,
    Transfer,
    sharded,
)


class Level(NamedTuple):
    """One halving of a leaf's chunks: how far its partner is, what it keeps and gives away."""

    distance: int
    keep: tuple[int, int]
    give: tuple[int, int]


def levels(fold: Fold, leaf: int) -> list[Level]:
    """Return a leaf's halvings, from all chunks to its last one."""
    start, stop = 0, fold.leaves
    found = []
    distance = 1
    while distance < fold.leaves:
        middle = (start + stop) // 2
        low, high = (start, middle), (middle, stop)
        keep, give = (high, low) if leaf & distance else (low, high)
        found.append(Level(distance, keep, give))
        start, stop = keep
        distance *= 2
    return found


def _halving(fold: Fold, leaf: int) -> Iterator[Step]:
    for distance, keep, give in levels(fold, leaf):
        partner = fold.rank(leaf ^ distance)
        action = Action.REDUCE_LEFT if leaf & distance else Action.REDUCE_RIGHT
        yield Step(
            sends=(Transfer(partner, *give),),
            recvs=(Transfer(partner, *keep, action),),
            group=fold.block(leaf, 2 * distance),
        )


def _doubling(fold: Fold, leaf: int) -> Iterator[Step]:
    for distance, keep, give in reversed(levels(fold, leaf)):
        partner = fold.rank(leaf ^ distance)
        yield Step(sends=(Transfer(partner, *keep),), recvs=(Transfer(partner, *give),))


@lru_cache(maxsize=64)
def scatter_gather(size: int, name: str = "rechd") -> ScatterGather:
    """Return recursive halving and recursive doubling; ranks folded away own nothing."""
    fold = Fold(size)
    count = fold.leaves.bit_length() - 1
    owners = [0] * fold.leaves
    for leaf in range(fold.leaves):
        halvings = levels(fold, leaf)
        owners[halvings[-1].keep[0] if halvings else 0] = fold.rank(leaf)

    def scatter(rank: int) -> Iterator[Step]:
        yield from fold_in(fold, rank, fold.leaves)
        yield from on_leaves(fold, rank, count, _halving)

    def gather(rank: int) -> Iterator[Step]:
        yield from on_leaves(fold, rank, count, _doubling)
        yield from fold_out(fold, rank, fold.leaves)

    return ScatterGather(name, size, tuple(owners), 1, scatter, gather)


@lru_cache(maxsize=64)
def all_reduce(size: int, name: str = "rechd") -> Schedule:
    """Return `rechd`: 2 log2 n steps, 2 (n - 1) / n of the buffer each way."""
    return scatter_gather(size, name).all_reduce()


RECHD = Algorithm(
    "rechd",
    "recursive halving and doubling",
    Order.BALANCED,
    schedule=lambda level: sharded(all_reduce(level.size), level.shards),
    scatter_gather=lambda level: scatter_gather(level.size).sharded(level.shards),
)

VHDD = Algorithm(
    "vhdd",
    "the same steps, named for Adasum",
    Order.BALANCED,
    schedule=lambda level: sharded(all_reduce(level.size, "vhdd"), level.shards),
)
