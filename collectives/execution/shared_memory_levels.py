"""Which rank reduces which pieces of which buffers, level by level of a tree, in shared memory.

The trees, and what each rank reduces, are read off the steps of `rd` and `vhdd`: where those send a
vector, here both are there to be read, and the result takes the place of the left one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from collectives.schedules import recursive_doubling, recursive_halving
from collectives.schedules.folding import Fold
from collectives.schedules.schedule import Action

__all__ = ["Level", "Part", "RankLevels", "levels_of_rank", "pairs", "tree_levels"]


class Part(NamedTuple):
    """What rank `worker` does in a level: chunks [start, stop) of two ranks' vectors.

    They are those that `leaf` would hold with a rank for each leaf of the tree.
    """

    left: int
    right: int
    start: int
    stop: int
    leaf: int
    worker: int


class Level(NamedTuple):
    """Pairs that are reduced at once.

    Attributes:
        parts: What all ranks do.
        block: Parts of a pair.
        shared: Whether several ranks have a pair's.
    """

    parts: tuple[Part, ...]
    block: int
    shared: bool


class RankLevels(NamedTuple):
    """A rank's part in the tree.

    Attributes:
        depth: Levels of the tree.
        levels: Each level with what the rank does in it, up to the last in which it does anything.
        left_out: Barriers that are left then, the last one included.
    """

    depth: int
    levels: tuple[tuple[Level, tuple[Part, ...]], ...]
    left_out: int


@lru_cache
def levels_of_rank(size: int, workers: int, rank: int) -> RankLevels:
    """Return what `rank` does; workers as for `tree_levels`."""
    levels = tree_levels(size, workers)
    steps = [(level, tuple(p for p in level.parts if p.worker == rank)) for level in levels]
    while steps and not steps[-1][1]:
        steps.pop()
    left_out = sum(1 + level.shared for level in levels[len(steps) :])
    return RankLevels(len(levels), tuple(steps), max(left_out, 1))


@lru_cache
def tree_levels(size: int, workers: int) -> tuple[Level, ...]:
    """Return the tree's levels.

    Args:
        size: How many ranks there are.
        workers: Ranks that work at once, each pair cut as `vhdd` cuts it; 0 for a pair's first
            rank, which does it whole, as `rd`.
    """
    module = recursive_halving if workers else recursive_doubling
    schedule, fold = module.all_reduce(size), Fold(size)
    leaves = fold.leaves
    width = leaves // schedule.chunks
    # So many leaves in a row are one rank's work.
    share = leaves // min(leaves, 1 << (workers.bit_length() - 1)) if workers else leaves
    levels = []
    # The rank in whose buffer each rank's value lies.
    lies = list(range(size))
    for steps in zip(*(schedule.steps(rank) for rank in range(size)), strict=True):
        parts, before, block = [], tuple(lies), 1
        for rank, step in enumerate(steps):
            for peer, start, stop, action in step.recvs:
                if action is Action.COPY:
                    continue
                operands = (rank, peer) if action is Action.REDUCE_RIGHT else (peer, rank)
                left, right = (before[operand] for operand in operands)
                lies[rank], block, leaf = left, len(step.group), fold.leaf(rank)
                assert leaf is not None
                # A rank that holds whole vectors makes what others of its pair make, too.
                if block > 1 or rank == left:
                    worker = rank if block == 1 else fold.rank(leaf - leaf % share)
                    parts.append(Part(left, right, start * width, stop * width, leaf, worker))
        if parts:
            levels.append(Level(tuple(parts), block, shared=block > share))
    return tuple(levels)


@lru_cache
def pairs(size: int) -> list[tuple[int, int]]:
    """Return the pairs of ranks whose vectors are reduced into the first one's, in turn."""
    return [(part.left, part.right) for level in tree_levels(size, 0) for part in level.parts]
