"""The contract's exact cases for small tensors and groups, and properties over random lists."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.bucketing import (
    extract_ranges,
    group_devices,
    pack_small_tensors,
    plan_groups,
    split_by_size,
    unpack_small_tensors,
)

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool]
EXAMPLE = [(4,), (4,), (3, 3), (3, 3)]


@pytest.mark.parametrize(
    ("indices", "limit", "ranges", "singles"),
    [
        ([], 32, [], []),
        ([1, 3, 4, 6, 7, 8, 9], 32, [[3, 4], [6, 9]], [1]),
        ([1, 3, 4, 6, 7, 8, 9], 3, [[3, 4], [6, 8]], [1, 9]),
        ([1, 2, 3], 1, [], [1, 2, 3]),
        (range(33), 32, [[0, 31]], [32]),
        (range(64), 32, [[0, 31], [32, 63]], []),
    ],
)
def test_extract_ranges_returns_runs_and_single_indices(indices, limit, ranges, singles):
    assert extract_ranges(indices, limit) == (ranges, singles)


@given(st.lists(st.integers(0, 60), unique=True).map(sorted), st.integers(1, 9))
def test_extract_ranges_keeps_every_index(indices, limit):
    ranges, singles = extract_ranges(indices, limit)
    covered = [i for first, last in ranges for i in range(first, last + 1)]
    assert sorted(covered + singles) == indices
    assert all(2 <= last - first + 1 <= limit for first, last in ranges)


def test_split_by_size_keeps_the_order():
    tensors = [torch.zeros(n) for n in (5, 4, 0, 6)]
    small, large = split_by_size(tensors, 4)
    assert [each.numel() for each in small] == [4, 0]
    assert [each.numel() for each in large] == [5, 6]


@pytest.mark.parametrize(
    ("count", "size", "groups"),
    [
        (5, 2, [[0, 3], [1, 4], [2, 0]]),
        (4, 2, [[0, 2], [1, 3]]),
        (4, 4, [[0, 1, 2, 3]]),
        (3, 1, [[0], [1], [2]]),
        (4, 3, [[0, 2, 0], [1, 3, 1]]),
    ],
)
def test_group_devices_spreads_devices(count, size, groups):
    assert group_devices(range(count), size) == groups


@pytest.mark.parametrize(
    ("max_bytes", "max_group", "shapes"),
    [
        (0, 10, EXAMPLE),
        (12, 10, EXAMPLE),
        (16, 10, [(8,), (3, 3), (3, 3)]),
        (256, 10, [(26,)]),
        (256, 0, [(26,)]),
        (256, 3, [(17,), (3, 3)]),
        (256, 2, [(8,), (18,)]),
        (256, 1, EXAMPLE),
    ],
)
def test_pack_small_tensors_packs_neighbours_up_to_the_limits(max_bytes, max_group, shapes):
    tensors = [torch.randn(shape) for shape in EXAMPLE]
    packed, packing = pack_small_tensors(tensors, max_bytes, max_group)
    assert [tuple(each.shape) for each in packed] == shapes
    assert (packing is None) == (shapes == EXAMPLE)
    restored = unpack_small_tensors(packed, packing)
    assert all(torch.equal(a, b) for a, b in zip(restored, tensors, strict=True))


def test_pack_small_tensors_counts_each_tensors_own_bytes():
    tensors = [torch.zeros(4, dtype=dtype) for dtype in (torch.float64, torch.float64)]
    assert pack_small_tensors(tensors, 16)[1] is None
    assert pack_small_tensors(tensors, 32)[1] is not None


def test_pack_small_tensors_of_bad_arguments_raises():
    tensors = [torch.zeros(2) for _ in range(3)]
    packed, packing = pack_small_tensors(tensors, 64)
    with pytest.raises(ValueError, match="expected 1 packed and 0 other tensors, got 2"):
        unpack_small_tensors([*packed, torch.zeros(1)], packing)
    with pytest.raises(ValueError, match=r"shape \(6,\), got \(5,\)"):
        unpack_small_tensors([torch.zeros(5)], packing)


@st.composite
def tensor_lists(draw):
    shapes = draw(st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=10))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    tensors = []
    for shape in shapes:
        tensor = torch.randint(0, 2**15, shape, generator=generator)
        tensor = tensor.to(draw(st.sampled_from(DTYPES)))
        if tensor.dim() > 1 and draw(st.booleans()):
            tensor = tensor.transpose(0, -1)
        tensors.append(tensor)
    return tensors


@settings(deadline=None, max_examples=200)
@given(tensor_lists(), st.integers(0, 200), st.integers(0, 5))
def test_unpack_small_tensors_gives_back_what_was_packed(tensors, max_bytes, max_group):
    packed, packing = pack_small_tensors(tensors, max_bytes, max_group)
    restored = unpack_small_tensors(packed, packing)
    assert len(restored) == len(tensors)
    for got, want in zip(restored, tensors, strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype
        assert torch.equal(got, want)
    if packing is not None:
        for first, last in packing.ranges:
            group = tensors[first : last + 1]
            assert len(group) >= 2 and (not max_group or len(group) <= max_group)
            assert len({each.dtype for each in group}) == 1
            assert all(each.nbytes <= max_bytes for each in group)


@settings(deadline=None, max_examples=200)
@given(
    tensor_lists(),
    st.none() | st.floats(1e-5, 2e-4),
    st.none() | st.integers(1, 4),
)
def test_plan_groups_keeps_kinds_apart_and_limits(tensors, memory_size, groups_size):
    groups = plan_groups(tensors, memory_size=memory_size, groups_size=groups_size)
    assert sorted(i for group in groups for i in group) == list(range(len(tensors)))
    assert [group[-1] for group in groups] == sorted(group[-1] for group in groups)
    for group in groups:
        assert group == sorted(group)
        assert len({tensors[i].dtype for i in group}) == 1
        assert groups_size is None or len(group) <= groups_size
        held = sum(tensors[i].nbytes for i in group)
        assert memory_size is None or len(group) == 1 or held <= memory_size * 2**20
    # No two groups that follow each other in one kind could have been one.
    for dtype in {each.dtype for each in tensors}:
        kind = [group for group in groups if tensors[group[0]].dtype == dtype]
        for one, next_one in itertools.pairwise(sorted(kind)):
            held = sum(tensors[i].nbytes for i in one) + tensors[next_one[0]].nbytes
            assert (memory_size is not None and held > memory_size * 2**20) or (
                groups_size is not None and len(one) == groups_size
            )
