"""Owners of variables, and pieces of whole segments."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.owners import owners
from collectives.schedules.partition import segment_bounds, split_bounds


def test_owners_are_the_least_loaded_ranks() -> None:
    assert owners([5, 3, 3, 1], 2) == [0, 1, 1, 0]
    assert owners([1, 1, 1, 1], 3) == [0, 1, 2, 0]
    assert owners([0, 0, 7], 3) == [0, 0, 0]
    assert owners([], 4) == []


@given(st.lists(st.integers(0, 10**12), max_size=50), st.integers(1, 9))
def test_owners_loads_differ_by_one_variable_at_most(numels: list[int], size: int) -> None:
    load = [0] * size
    for numel, rank in zip(numels, owners(numels, size), strict=True):
        assert rank == load.index(min(load))
        load[rank] += numel
    assert max(load) - min(load) <= max(numels, default=0)


def test_owners_of_bad_arguments_raises() -> None:
    with pytest.raises(ValueError, match=r"numels\[1\] must not be negative, got -1"):
        owners([1, -1], 2)
    with pytest.raises(TypeError, match=r"numels\[0\] must be an int, got float"):
        owners([1.0], 2)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        owners([1], 0)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=20), st.integers(1, 12))
def test_segment_bounds_cut_no_segment(sizes: list[int], pieces: int) -> None:
    segments = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    cuts = segment_bounds(segments, pieces)
    assert cuts[0] == 0 and cuts[-1] == segments[-1] and len(cuts) == pieces + 1
    assert cuts == sorted(cuts) and set(cuts) <= set(segments)
    # No boundary of a segment is nearer to where equal pieces would be cut.
    for cut, ideal in zip(cuts, split_bounds(segments[-1], pieces), strict=True):
        assert abs(cut - ideal) == min(abs(edge - ideal) for edge in segments)
