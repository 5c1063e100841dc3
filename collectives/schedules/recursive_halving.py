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

from collectives.schedules.algorithm import IN_A_TREE, Algorithm, Order, by_size
from collectives.schedules.folding import Fold, fold_in, on_leaves
from collectives.schedules.schedule import Action, ScatterGather, Schedule, Step, Transfer, back


def _halving(fold: Fold, leaf: int) -> Iterator[Step]:
    start, stop, distance = 0, fold.leaves, 1
    while distance < fold.leaves:
        middle = (start + stop) // 2
        low, high = (start, middle), (middle, stop)
        keep, give = (high, low) if leaf & distance else (low, high)
        partner = fold.rank(leaf ^ distance)
        action = Action.REDUCE_LEFT if leaf & distance else Action.REDUCE_RIGHT
        yield Step(
            sends=(Transfer(partner, *give),),
            recvs=(Transfer(partner, *keep, action, fold.ranks_behind(leaf, distance)),),
            group=fold.block(leaf, 2 * distance),
        )
        start, stop = keep
        distance *= 2


def _owner(fold: Fold, chunk: int) -> int:
    """Return the rank that is left with a chunk: the bits of its leaf chose half after half."""
    return fold.rank(int(f"{chunk:0{fold.levels}b}"[::-1], 2))


@lru_cache(maxsize=64)
def scatter_gather(size: int, name: str = "rechd") -> ScatterGather:
    """Return recursive halving and recursive doubling; ranks folded away own nothing."""
    fold = Fold(size)
    owners = tuple(_owner(fold, chunk) for chunk in range(fold.leaves))

    def scatter(rank: int) -> Iterator[Step]:
        yield from fold_in(fold, rank, fold.leaves)
        yield from on_leaves(fold, rank, _halving)

    return ScatterGather(name, size, owners, 1, scatter, gather=lambda rank: back(scatter(rank)))


@lru_cache(maxsize=64)
def all_reduce(size: int, name: str = "rechd") -> Schedule:
    """Return `rechd`: 2 log2 n steps, 2 (n - 1) / n of the buffer each way."""
    return scatter_gather(size, name).all_reduce()


RECHD = Algorithm(
    "rechd",
    "recursive halving and doubling",
    Order.BALANCED,
    IN_A_TREE,
    schedule=by_size(all_reduce),
    scatter_gather=lambda level: scatter_gather(level.size).sharded(level.shards),
)

VHDD = Algorithm(
    "vhdd",
    "the same steps, named for Adasum",
    Order.BALANCED,
    IN_A_TREE,
    schedule=by_size(lambda size: all_reduce(size, "vhdd")),
)
