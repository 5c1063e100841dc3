"""Folding: how algorithms built for powers of two take any number of ranks.

With P the largest power of two <= n and r = n - P, ranks (0, 1), (2, 3), ... of the first 2r reduce
pairwise; the even one of each pair and the remaining ranks, P in all, are the leaves of a balanced
tree in rank order; at the end the even ranks send the result to the odd ones. Folding costs two
steps, and a whole buffer each way between the ranks of a pair. Source: Thakur, Rabenseifner and
Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 2005.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from collectives import validation
from collectives.schedules.schedule import IDLE, Action, Step, Transfer, Tree


@dataclass(frozen=True)
class Fold:
    """The map of `size` ranks to the leaves of a balanced tree."""

    size: int

    def __post_init__(self) -> None:
        validation.integer("size", self.size, 1)

    @cached_property
    def leaves(self) -> int:
        """P, the largest power of two that is at most `size`."""
        return 1 << (self.size.bit_length() - 1)

    @cached_property
    def extra(self) -> int:
        """The number of ranks folded away, r = size - P."""
        return self.size - self.leaves

    @property
    def levels(self) -> int:
        """The depth of the tree, log2 P."""
        return self.leaves.bit_length() - 1

    def rank(self, leaf: int) -> int:
        """Return the rank that stands for a leaf."""
        return 2 * leaf if leaf < self.extra else leaf + self.extra

    def leaf(self, rank: int) -> int | None:
        """Return the leaf that a rank stands for, None if it was folded away."""
        if rank >= 2 * self.extra:
            return rank - self.extra
        return None if rank % 2 else rank // 2

    def behind(self, leaf: int, width: int) -> int:
        """Return how many ranks stand behind the aligned block of `width` leaves with `leaf`."""
        return width + min(max(self.extra - (leaf - leaf % width), 0), width)

    def ranks_behind(self, leaf: int, distance: int) -> tuple[int, int]:
        """Return how many ranks stand behind the operands of the level of `distance`, own first."""
        return self.behind(leaf, distance), self.behind(leaf ^ distance, distance)

    def block(self, leaf: int, width: int) -> tuple[int, ...]:
        """Return the ranks of the aligned block of `width` leaves that `leaf` is in."""
        return _block(self, leaf - leaf % width, width)


# All ranks of a block share one tuple, which may be as long as there are ranks.
@lru_cache(maxsize=256)
def _block(fold: Fold, first: int, width: int) -> tuple[int, ...]:
    return tuple(fold.rank(leaf) for leaf in range(first, first + width))


@lru_cache(maxsize=256)
def balanced_tree(size: int) -> Tree:
    """Return the whole tree of `size` operands in rank order: pairs folded in, then the levels."""
    fold = Fold(size)
    operands = [(fold.rank(leaf), fold.behind(leaf, 1)) for leaf in range(fold.leaves)]
    found = [(2 * i, 2 * i + 1, 1, 1) for i in range(fold.extra)]
    while len(operands) > 1:
        pairs = list(zip(operands[::2], operands[1::2], strict=True))
        found += [(left, right, p, q) for (left, p), (right, q) in pairs]
        operands = [(left, p + q) for (left, p), (_, q) in pairs]
    return tuple(found)


def fold_in(fold: Fold, rank: int, chunks: int) -> Iterator[Step]:
    """Yield the step in which even ranks of the pairs reduce what the odd ones send, if any.

    The same step `back` sends the odd ranks the result.
    """
    if fold.extra:
        if rank >= 2 * fold.extra:
            yield IDLE
        elif rank % 2:
            yield Step(sends=(Transfer(rank - 1, 0, chunks),))
        else:
            recv = Transfer(rank + 1, 0, chunks, Action.REDUCE_RIGHT, leaves=(1, 1))
            yield Step(recvs=(recv,), group=(rank,))


def on_leaves(
    fold: Fold, rank: int, steps: Callable[[Fold, int], Iterator[Step]]
) -> Iterator[Step]:
    """Yield `steps(fold, leaf)`, one for each level; a rank that is no leaf idles meanwhile."""
    leaf = fold.leaf(rank)
    if leaf is None:
        yield from [IDLE] * fold.levels
    else:
        yield from steps(fold, leaf)
