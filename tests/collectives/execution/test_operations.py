"""Owners: which rank owns what, reductions onto them to the bits of all-reduces, and back."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from adasum import Adasum, AdasumReducer
from collectives import FusedBuffer, Group
from collectives.execution.operations import owners
from tests.collectives.consistency.ranks import run

UNWEIGHTED = AdasumReducer(weighted=False)
# Cut by slices of any number of ranks, with an empty one; together more than what goes by `rd`.
LARGE = [(1000, 33), (0,), (), (40_001,), (7,), (12_345,)]


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


def draw(rank: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in LARGE]
    if dtype.is_complex:
        return [
            torch.complex(one.float(), one.float().flip(0) if one.dim() else one.float())
            for one in drawn
        ]
    return [one.to(dtype) for one in drawn]


def fused(tensors: list[Tensor]) -> list[Tensor]:
    buffer = FusedBuffer(tensors)
    torch._foreach_copy_(buffer.tensors, tensors)
    # Kept as long as its tensors are.
    buffer.tensors[0].of = buffer  # type: ignore[attr-defined]
    return list(buffer.tensors)


def compare(group: Group, dtype: torch.dtype, op: AdasumReducer, *, fuse: bool) -> None:
    """What owners have is the all-reduce's, bit for bit, whoever the owners are."""
    size, options = group.size, {"postscale": 0.5}
    want = draw(group.rank, dtype)
    group.grouped_all_reduce(want, op, **options)
    shuffled = [random.Random(size).randrange(size) for _ in LARGE]
    for chosen in (None, shuffled, sorted(shuffled), [size - 1] * len(LARGE)):
        got = fused(draw(group.rank, dtype)) if fuse else draw(group.rank, dtype)
        said = group.reduce_to_owners(got, op, owners=chosen, **options)
        assert chosen is None or said == chosen
        mine = [i for i, owner in enumerate(said) if owner == group.rank]
        assert all(torch.equal(got[i], want[i]) for i in mine)


@pytest.mark.parametrize("way", ["threads", "messages"])
@pytest.mark.parametrize(
    "size", [1, 3, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 5))]
)
def test_owners_have_the_bits_of_an_all_reduce(size: int, way: str) -> None:
    def job(group: Group) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.complex64):
            compare(group, dtype, Adasum, fuse=False)
        compare(group, torch.float32, UNWEIGHTED, fuse=True)
        compare(group, torch.float32, Adasum, fuse=True)
        # Of two dtypes at once, and little data, which goes by `rd`.
        mixed = [torch.ones(5) * group.rank, torch.ones(3, dtype=torch.float64)]
        group.reduce_to_owners(mixed, Adasum, owners=[0, size - 1])
        if group.rank == size - 1:
            assert mixed[1].tolist() == pytest.approx([1.0] * 3)

    run(way, size, job)
