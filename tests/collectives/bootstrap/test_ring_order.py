"""The ring along the fastest hops, against all cycles there are."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.bootstrap.ring_order import MOST_RANKS, ring_order

Speeds = list[list[int]]


def quality(order: tuple[int, ...], speeds: Speeds) -> tuple[int, int]:
    """The slowest hop of the cycle and the sum of all."""
    hops = [speeds[a][b] for a, b in zip(order, order[1:] + order[:1], strict=True)]
    return min(hops), sum(hops)


def by_trying(speeds: Speeds) -> tuple[int, ...]:
    """The best of all cycles; max takes the first of equals, which is the smallest."""
    cycles = [(0, *rest) for rest in permutations(range(1, len(speeds)))]
    return max(cycles, key=lambda order: quality(order, speeds))


def symmetric(size: int, pairs: list[int]) -> Speeds:
    speeds = [[0] * size for _ in range(size)]
    values = iter(pairs)
    for a in range(size):
        for b in range(a):
            speeds[a][b] = speeds[b][a] = next(values)
    return speeds


@st.composite
def speeds(draw: st.DrawFn, least: int, most: int) -> Speeds:
    """Few different speeds, so that many cycles are equally good, or many."""
    size = draw(st.integers(least, most))
    values = st.integers(1, draw(st.sampled_from([2, 4, 1000])))
    count = size * (size - 1) // 2
    return symmetric(size, draw(st.lists(values, min_size=count, max_size=count)))


@settings(max_examples=100, deadline=None)
@given(speeds(1, 7))
def test_equals_the_best_of_all_cycles(table: Speeds) -> None:
    assert ring_order(table) == by_trying(table)


@settings(max_examples=30, deadline=None)
@given(speeds(8, 13))
def test_never_worse_than_the_natural_order(table: Speeds) -> None:
    natural = tuple(range(len(table)))
    order = ring_order(table)
    assert sorted(order) == list(natural) and order[0] == 0
    assert quality(order, table) > quality(natural, table) or order == natural


@settings(max_examples=15, deadline=None)
@given(st.permutations(range(1, MOST_RANKS)), st.sampled_from([8, 11, MOST_RANKS]))
def test_finds_the_only_fast_cycle(rest: list[int], size: int) -> None:
    planted = (0, *(r for r in rest if r < size))
    table = [[1] * size for _ in range(size)]
    for a, b in zip(planted, planted[1:] + planted[:1], strict=True):
        table[a][b] = table[b][a] = 2
    assert ring_order(table) == min(planted, (0, *planted[:0:-1]))


def test_the_slowest_hop_counts_before_the_sum() -> None:
    """The cycle 0 1 2 3 is the fastest in sum, 0 1 3 2 has no hop below 2."""
    table = [[0, 9, 3, 1], [9, 0, 9, 2], [3, 9, 0, 9], [1, 2, 9, 0]]
    assert quality((0, 1, 2, 3), table) == (1, 28)
    assert ring_order(table) == (0, 1, 3, 2)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, MOST_RANKS, MOST_RANKS + 1])
def test_natural_where_all_are_equal(size: int) -> None:
    assert ring_order([[5] * size for _ in range(size)]) == tuple(range(size))


def test_natural_beyond_the_bound() -> None:
    size = MOST_RANKS + 1
    table = [
        [2 if (a - b) % size in (2, size - 2) else 1 for b in range(size)] for a in range(size)
    ]
    assert ring_order(table) == tuple(range(size))
