"""Recursive doubling of the whole buffer.

Wins on small messages: log2 n steps, the fewest there are for a power of two (folding adds two),
each moving the whole buffer, which is also what it needs as extra memory. Every rank holds both
operands whole, so an operator that needs whole-vector sums computes them without a message. Source:
Thakur, Rabenseifner and Gropp, IJHPCA 2005.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from collectives.schedules.algorithm import IN_A_TREE, Algorithm, Order, by_size
from collectives.schedules.folding import Fold, fold_in, on_leaves
from collectives.schedules.schedule import Action, Collective, Schedule, Step, Transfer, back


def _doubling(fold: Fold, leaf: int) -> Iterator[Step]:
    distance = 1
    while distance < fold.leaves:
        partner = fold.rank(leaf ^ distance)
        action = Action.REDUCE_LEFT if leaf & distance else Action.REDUCE_RIGHT
        yield Step(
            sends=(Transfer(partner, 0, 1),),
            recvs=(Transfer(partner, 0, 1, action, fold.ranks_behind(leaf, distance)),),
            group=(fold.rank(leaf),),
        )
        distance *= 2


@lru_cache(maxsize=256)
def all_reduce(size: int) -> Schedule:
    """Return `rd`: log2 n steps of the whole buffer each way."""
    fold = Fold(size)

    def steps(rank: int) -> Iterator[Step]:
        yield from fold_in(fold, rank, 1)
        yield from on_leaves(fold, rank, _doubling)
        yield from back(fold_in(fold, rank, 1))

    return Schedule("rd", size, 1, Collective.ALL_REDUCE, steps)


RD = Algorithm(
    "rd",
    "recursive doubling, for small messages",
    Order.BALANCED,
    IN_A_TREE,
    schedule=by_size(all_reduce),
)
