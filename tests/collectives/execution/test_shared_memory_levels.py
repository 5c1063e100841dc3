"""Ranks in shared memory reduce the tree and the pieces of the schedules, for every size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from collectives.execution.shared_memory_levels import Level, levels_of_rank, pairs, tree_levels
from collectives.schedules import recursive_doubling, recursive_halving
from collectives.schedules.algorithm import Order
from collectives.schedules.folding import Fold
from collectives.schedules.schedule import Action, Schedule

SIZES = range(1, 65)


def test_pairs_for_every_size_make_the_balanced_tree() -> None:
    for size in SIZES:
        trees: list[Any] = list(range(size))
        for left, right in pairs(size):
            trees[left] = trees[left], trees[right]
        assert trees[0] == Order.BALANCED.tree(range(size))


@pytest.mark.parametrize("workers", [0, 1, 3, 64])
def test_levels_for_every_size_are_the_steps_of_the_schedule(workers: int) -> None:
    """As many levels as steps that reduce, and in each the chunks that each leaf reduces there.

    Of ranks that hold whole vectors, as with `rd`, the pair's first one stands for all.
    """
    for size in SIZES:
        module = recursive_halving if workers else recursive_doubling
        schedule = module.all_reduce(size)
        expected = list(_reductions(schedule))
        levels = tree_levels(size, workers)
        assert len(levels) == len(expected)
        width = Fold(size).leaves // schedule.chunks
        for level, reduced in zip(levels, expected, strict=True):
            found = {Fold(size).rank(p.leaf): (p.start, p.stop) for p in level.parts}
            assert len(found) == len(level.parts)
            for rank, (start, stop) in found.items():
                assert reduced[rank] == (start // width, stop // width)
            if workers:
                assert found.keys() == reduced.keys()


@pytest.mark.parametrize("workers", [0, 1, 3, 64])
def test_parts_for_every_size_cover_each_pair_once(workers: int) -> None:
    for size in SIZES:
        for level in tree_levels(size, workers):
            for chunks in _covered(level).values():
                assert sorted(chunks) == list(range(Fold(size).leaves))


def test_parts_of_all_ranks_are_the_levels() -> None:
    for size in SIZES:
        for workers in (0, 1, size):
            levels = tree_levels(size, workers)
            ranks = [levels_of_rank(size, workers, rank) for rank in range(size)]
            assert all(mine.depth == len(levels) for mine in ranks)
            for number, level in enumerate(levels):
                parts = [
                    p for mine in ranks for _, own in mine.levels[number : number + 1] for p in own
                ]
                assert sorted(parts) == sorted(level.parts)


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


def _covered(level: Level) -> dict[tuple[int, int], list[int]]:
    found: dict[tuple[int, int], list[int]] = {}
    for part in level.parts:
        found.setdefault((part.left, part.right), []).extend(range(part.start, part.stop))
    return found
