"""Ranks in shared memory reduce the tree and the pieces of the schedules, for every size."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from collectives.execution.shared_memory_levels import TreeLevel, pairs, tree_levels

from collectives.schedules import recursive_doubling, recursive_halving
from collectives.schedules.algorithm import Order
from collectives.schedules.folding import Fold
from collectives.schedules.schedule import Action, Schedule
from tests.collectives.schedules.simulation import ranks_in

SIZES = range(1, 65)


def test_pairs_for_every_size_make_the_balanced_tree() -> None:
    for size in SIZES:
        trees: list[Any] = list(range(size))
        for left, right, behind in pairs(size):
            assert behind == (len(ranks_in(trees[left])), len(ranks_in(trees[right])))
            trees[left] = trees[left], trees[right]
        assert trees[0] == Order.BALANCED.tree(range(size))


@pytest.mark.parametrize("module", [recursive_doubling, recursive_halving])
def test_levels_for_every_size_are_the_steps_of_the_schedule(module: ModuleType) -> None:
    """As many levels as steps that reduce, and in each the chunks that each leaf reduces there.

    Of ranks that hold whole vectors, as with `rd`, the pair's first one stands for all.
    """
    for size in SIZES:
        schedule = module.all_reduce(size)
        expected = list(_reductions(schedule))
        levels = tree_levels(schedule)
        assert len(levels) == len(expected)
        width = Fold(size).leaves // schedule.chunks
        for level, reduced in zip(levels, expected, strict=True):
            for rank, part in level.shares.items():
                assert Fold(size).rank(part.leaf) == rank
                assert reduced[rank] == (part.start // width, part.stop // width)
            if module is recursive_halving:
                assert level.shares.keys() == reduced.keys()


@pytest.mark.parametrize("module", [recursive_doubling, recursive_halving])
def test_shares_for_every_size_cover_each_pair_once(module: ModuleType) -> None:
    for size in SIZES:
        for level in tree_levels(module.all_reduce(size)):
            for chunks in _covered(level).values():
                assert sorted(chunks) == list(range(Fold(size).leaves))


def _reductions(schedule: Schedule) -> Iterator[dict[int, tuple[int, int]]]:
    """The chunks that each rank reduces, for each step in which any does."""
    for steps in zip(*(schedule.steps(rank) for rank in range(schedule.size)), strict=True):
        reduced = {
            rank: (recv.start, recv.stop)
            for rank, step in enumerate(steps)
            for recv in step.recvs
            if recv.action is not Action.COPY
        }
        if reduced:
            yield reduced


def _covered(level: TreeLevel) -> dict[tuple[int, int], list[int]]:
    found: dict[tuple[int, int], list[int]] = {}
    for part in level.shares.values():
        found.setdefault((part.left, part.right), []).extend(range(part.start, part.stop))
    return found
