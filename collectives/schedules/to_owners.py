"""`rechd` in two halves: reduce a buffer of many pieces, each onto its owner, and send them back.

For many tensors in one buffer, each owned by one rank: log2 n steps (folding adds two), in which a
rank sends at most the buffer once (twice where it is folded away) and needs half of it as extra
memory (all of it where it is folded into). Every element is summed by the tree of `rd` and `rechd`,
so their bits do not depend on the owners. Pieces may have any length: with one piece alone the
first half is a binomial tree onto its owner. Source: as `recursive_halving`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache, partial
from itertools import accumulate

from collectives.schedules.folding import Fold
from collectives.schedules.schedule import IDLE, Action, Collective, Schedule, Step, Transfer, back


@lru_cache(maxsize=64)
def order(size: int) -> tuple[int, ...]:
    """Return the ranks in the order in which their pieces lie in the buffer.

    What a rank keeps is one range after every step only in the order of the leaves' bits, the
    lowest one first; a rank that is folded away follows the one that stands for it.
    """
    fold = Fold(size)
    return tuple(rank for leaf in _leaves(fold) for rank in _ranks(fold, leaf))


@lru_cache(maxsize=64)
def reduce_scatter(size: int) -> Schedule:
    """Return the first half; rank i of it, which ends with chunk i, is rank `order(size)[i]`."""
    steps = partial(_steps, Fold(size))
    return Schedule("rechd to owners", size, size, Collective.REDUCE_SCATTER, steps)


@lru_cache(maxsize=64)
def all_gather(size: int) -> Schedule:
    """Return the second half: the same messages the other way. Ranks as in `reduce_scatter`."""
    steps = reduce_scatter(size).steps
    name, kind = "rechd from owners", Collective.ALL_GATHER
    return Schedule(name, size, size, kind, lambda rank: back(steps(rank)))


def _leaves(fold: Fold) -> list[int]:
    return [int(f"{i:0{fold.levels}b}"[::-1], 2) for i in range(fold.leaves)]


def _ranks(fold: Fold, leaf: int) -> tuple[int, ...]:
    """Return the ranks that a leaf stands for."""
    rank = fold.rank(leaf)
    return (rank, rank + 1) if leaf < fold.extra else (rank,)


def _steps(fold: Fold, rank: int) -> Iterator[Step]:
    """Yield the steps of the first half; ranks are the schedule's, in which halves are ranges."""
    starts = [0, *accumulate(len(_ranks(fold, leaf)) for leaf in _leaves(fold))]
    number = bisect_right(starts, rank) - 1
    leader, paired = starts[number], starts[number + 1] - starts[number] == 2
    if fold.extra:
        yield _fold_in(leader, rank, fold.size) if paired else IDLE
    start, stop = 0, fold.leaves
    while stop - start > 1:
        distance = (stop - start) // 2
        middle = start + distance
        low, high = (start, middle), (middle, stop)
        keep, give = (high, low) if number & distance else (low, high)
        action = Action.REDUCE_LEFT if number & distance else Action.REDUCE_RIGHT
        partner = starts[number ^ distance]
        sent = Transfer(partner, starts[give[0]], starts[give[1]])
        received = Transfer(partner, starts[keep[0]], starts[keep[1]], action)
        yield Step((sent,), (received,)) if rank == leader else IDLE
        start, stop = keep
    if fold.extra:
        yield _fold_out(leader, rank) if paired else IDLE


def _fold_in(leader: int, rank: int, chunks: int) -> Step:
    if rank == leader:
        return Step(recvs=(Transfer(leader + 1, 0, chunks, Action.REDUCE_RIGHT),))
    return Step(sends=(Transfer(leader, 0, chunks),))


def _fold_out(leader: int, rank: int) -> Step:
    """Return the step in which the second of a pair is sent its own piece."""
    if rank == leader:
        return Step(sends=(Transfer(leader + 1, leader + 1, leader + 2),))
    return Step(recvs=(Transfer(leader, leader + 1, leader + 2),))
