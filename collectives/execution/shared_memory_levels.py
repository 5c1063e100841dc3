"""Which rank reduces which pieces of which buffers, level by level of a tree, in shared memory.

The trees, and what each rank reduces, are read off the steps of `rd` and `vhdd`: where those send a
vector, here both are there to be read, and the result takes the place of the left one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from collectives.schedules import recursive_doubling
from collectives.schedules.folding import Fold
from collectives.schedules.schedule import Action, Schedule


class Share(NamedTuple):
    """What a rank reduces in a level: chunks [start, stop) of two ranks' vectors.

    Attributes:
        left: The rank in whose buffer the left vector lies, and then the result.
        right: The rank in whose buffer the right vector lies.
        leaf: The rank's place among the leaves of the tree, of which there are as many as chunks.
        behind: How many ranks stand behind the left vector, and how many behind the right one.
    """

    left: int
    right: int
    start: int
    stop: int
    leaf: int
    behind: tuple[int, ...]


class TreeLevel(NamedTuple):
    """Pairs of vectors that are reduced at once.

    Attributes:
        shares: What each rank does, by rank; ranks without a share only wait.
        block: Parts of a pair, each of another rank.
    """

    shares: dict[int, Share]
    block: int


@lru_cache
def tree_levels(schedule: Schedule) -> tuple[TreeLevel, ...]:
    """Return the levels of the tree that an all-reduce by recursive doubling or halving makes.

    With doubling each rank holds whole vectors: a pair's first rank reduces it for all.
    """
    fold = Fold(schedule.size)
    width = fold.leaves // schedule.chunks
    levels = []
    # The rank in whose buffer each rank's value lies.
    lies = list(range(schedule.size))
    for steps in zip(*(schedule.steps(rank) for rank in range(schedule.size)), strict=True):
        shares, before, block = {}, tuple(lies), 1
        for rank, step in enumerate(steps):
            for peer, start, stop, action, leaves in step.recvs:
                if action is Action.COPY:
                    continue
                assert leaves is not None
                mine_first = 1 if action is Action.REDUCE_RIGHT else -1
                operands, behind = (rank, peer)[::mine_first], leaves[::mine_first]
                left, right = (before[operand] for operand in operands)
                lies[rank], block, leaf = left, len(step.group), fold.leaf(rank)
                assert leaf is not None
                if block > 1 or rank == left:
                    shares[rank] = Share(left, right, start * width, stop * width, leaf, behind)
        if shares:
            levels.append(TreeLevel(shares, block))
    return tuple(levels)


@lru_cache
def pairs(size: int) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return the pairs of ranks whose vectors are reduced into the first one's, in turn.

    The third is how many ranks then stand behind each of both.
    """
    levels = tree_levels(recursive_doubling.all_reduce(size))
    shares = (share for level in levels for share in level.shares.values())
    return [(share.left, share.right, share.behind) for share in shares]
