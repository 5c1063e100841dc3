"""The split rule: sizes differ by at most one, larger pieces first."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from collectives import split_bounds
from collectives.schedules.schedule import segment_bounds


@given(st.integers(0, 2**40), st.integers(1, 100))
def test_pieces_cover_everything_and_differ_by_one(numel: int, pieces: int) -> None:
    cuts = split_bounds(numel, pieces)
    sizes = [b - a for a, b in pairwise(cuts)]
    assert cuts[0] == 0 and cuts[-1] == numel and len(sizes) == pieces
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@given(st.lists(st.integers(0, 30), min_size=1, max_size=20), st.integers(1, 12))
def test_segment_bounds_cut_no_segment(sizes: list[int], pieces: int) -> None:
    segments = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    cuts = segment_bounds(segments, pieces)
    assert cuts[0] == 0 and cuts[-1] == segments[-1] and len(cuts) == pieces + 1
    assert cuts == sorted(cuts) and set(cuts) <= set(segments)
    # No boundary of a segment is nearer to where equal pieces would be cut.
    for cut, ideal in zip(cuts, split_bounds(segments[-1], pieces), strict=True):
        assert abs(cut - ideal) == min(abs(edge - ideal) for edge in segments)
