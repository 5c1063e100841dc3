"""Which rank reduces which pieces of which buffers, level by level of a tree, in shared memory.

The trees are those of `rd` and `vhdd`: adjacent ranks pair, then adjacent pairs.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from collectives.schedules import recursive_halving
from collectives.schedules.folding import Fold

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
    fold = Fold(size)
    leaves = fold.leaves
    levels = []
    if fold.extra:
        folded = (Part(2 * i, 2 * i + 1, 0, leaves, i, 2 * i) for i in range(fold.extra))
        levels.append(Level(tuple(folded), 1, shared=False))
    # So many leaves in a row are one rank's work.
    share = leaves // min(leaves, 1 << (workers.bit_length() - 1)) if workers else leaves
    for depth in range(leaves.bit_length() - 1):
        distance = 1 << depth
        parts = []
        for leaf in range(0, leaves, 1 if workers else 2 * distance):
            first = leaf - leaf % (2 * distance)
            pair = fold.rank(first), fold.rank(first + distance)
            if workers:
                start, stop = recursive_halving.levels(fold, leaf)[depth].keep
                parts.append(Part(*pair, start, stop, leaf, fold.rank(leaf - leaf % share)))
            else:
                parts.append(Part(*pair, 0, leaves, leaf, pair[0]))
        block = 2 * distance if workers else 1
        levels.append(Level(tuple(parts), block, shared=block > share))
    return tuple(levels)


@lru_cache
def pairs(size: int) -> list[tuple[int, int]]:
    """Return the pairs of ranks whose vectors are reduced into the first one's, in turn."""
    return [(part.left, part.right) for level in tree_levels(size, 0) for part in level.parts]
