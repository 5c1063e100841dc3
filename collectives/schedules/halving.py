"""Recursive halving and doubling: ever farther partners exchange halves, or whole buffers.

`rechd` exchanges and reduces half of the remaining region at each level. It wins on medium and
large buffers if latency matters: 2 log2 n steps, 2 (n - 1) / n of the buffer each way and half of
it as extra memory (powers of two). The tree is the same for every element: adjacent ranks first,
then adjacent pairs, and so on (distance doubling), so the same schedule carries Adasum, under the
name `vhdd`: at the level of distance d the aligned block of 2d ranks holds both operands in pieces.

`rd`, recursive doubling of the whole buffer, wins on small messages: log2 n steps, the fewest
possible for a power of two. Each step moves the whole buffer and needs another one as extra memory.
Every rank holds both operands whole, so an operator that needs whole-vector sums computes them
without a message.

Folding allows any number of ranks. With P the largest power of two <= n and r = n - P, ranks
(0, 1), (2, 3), ... of the first 2r reduce pairwise; the even rank of each pair and the remaining
ranks, P in all, are the leaves of a balanced tree in rank order; at the end the even ranks send the
result to the odd ones. It costs two steps, a whole buffer each way between the ranks of each pair,
and a whole buffer as extra memory on the even ranks.

Sources: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH", IJHPCA 2005; Rabenseifner, "Optimization of collective reduction operations", ICCS 2004;
Maleki et al., "Scaling distributed training with adaptive summation", arXiv 2006.02924,
algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from collectives import validation
from collectives.schedules.algorithm import IN_A_TREE, Algorithm, Order, by_size
from collectives.schedules.schedule import (
    IDLE,
    Action,
    Collective,
    ScatterGather,
    Schedule,
    Step,
    Transfer,
    Tree,
    back,
)


@dataclass(frozen=True)
class Fold:
    """The map of `size` ranks to the leaves of a balanced tree."""

    size: int

    def __post_init__(self) -> None:
        validation.integer("size", self.size, 1)

    @cached_property
    def leaves(self) -> int:
        """P, the largest power of two up to `size`."""
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
        """Return the rank of a leaf."""
        return 2 * leaf if leaf < self.extra else leaf + self.extra

    def leaf(self, rank: int) -> int | None:
        """Return the rank's leaf; None if the rank was folded away."""
        if rank >= 2 * self.extra:
            return rank - self.extra
        return None if rank % 2 else rank // 2

    def behind(self, leaf: int, width: int) -> int:
        """Return the number of ranks in the aligned block of `width` leaves that has `leaf`."""
        return width + min(max(self.extra - (leaf - leaf % width), 0), width)

    def ranks_behind(self, leaf: int, distance: int) -> tuple[int, int]:
        """Return the numbers of ranks in both operands at the level of `distance`, own first."""
        return self.behind(leaf, distance), self.behind(leaf ^ distance, distance)

    def block(self, leaf: int, width: int) -> tuple[int, ...]:
        """Return the ranks of the leaves in the aligned block of `width` that has `leaf`."""
        return _block(self, leaf - leaf % width, width)


# All ranks of one block share the tuple, which may contain every rank.
@lru_cache(maxsize=256)
def _block(fold: Fold, first: int, width: int) -> tuple[int, ...]:
    return tuple(fold.rank(leaf) for leaf in range(first, first + width))


@lru_cache(maxsize=256)
def balanced_tree(size: int) -> Tree:
    """Return the tree of `size` operands in rank order: first the folded pairs, then the levels."""
    fold = Fold(size)
    operands = [(fold.rank(leaf), fold.behind(leaf, 1)) for leaf in range(fold.leaves)]
    found = [(2 * i, 2 * i + 1, 1, 1) for i in range(fold.extra)]
    while len(operands) > 1:
        pairs = list(zip(operands[::2], operands[1::2], strict=True))
        found += [(left, right, p, q) for (left, p), (right, q) in pairs]
        operands = [(left, p + q) for (left, p), (_, q) in pairs]
    return tuple(found)


def fold_in(fold: Fold, rank: int, chunks: int) -> Iterator[Step]:
    """Yield one step if ranks are folded: the odd ranks send, and the even ranks reduce.

    `back` of this step sends the result to the odd ranks.
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
    """Yield `steps(fold, leaf)`, one step per level; a folded rank idles instead."""
    leaf = fold.leaf(rank)
    if leaf is None:
        yield from [IDLE] * fold.levels
    else:
        yield from steps(fold, leaf)


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
def doubling(size: int) -> Schedule:
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
    schedule=by_size(doubling),
)


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
    """Return the final owner of a chunk: the bits of its leaf selected the halves in turn."""
    return fold.rank(int(f"{chunk:0{fold.levels}b}"[::-1], 2))


@lru_cache(maxsize=64)
def scatter_gather(size: int, name: str = "rechd") -> ScatterGather:
    """Return recursive halving, then doubling; ranks folded away own nothing."""
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
