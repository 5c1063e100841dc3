"""Buffers whose slots are the tensors: reduced in place, found by address, equal to packed ones."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from adasum import Adasum
from collectives import Average, Sum, run_threads
from collectives.fused_buffer import FusedBuffer, buffer_of

SHAPES = [(300, 40), (40,), (), (0, 3), (7, 5, 3), (1,)]


def draw(rank: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


@settings(deadline=None, max_examples=50)
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=8),
    dtype=st.sampled_from(kernels.DTYPES),
    permute=st.booleans(),
)
def test_slots_are_aligned_and_shaped_as_the_tensors(shapes, dtype, permute):
    like = [torch.empty(shape, dtype=dtype) for shape in shapes]
    if permute:
        like = [each.transpose(0, -1) if each.dim() > 1 else each for each in like]
    fused = FusedBuffer(like)
    assert fused.buffer.eq(0).all()
    fused.buffer.fill_(float("nan"))
    fused.clear_padding()
    for i, (view, tensor, other) in enumerate(zip(fused.views, fused.tensors, like, strict=True)):
        assert view.shape == other.shape and view.stride() == other.stride()
        assert tensor.is_contiguous() and tensor.numel() == other.numel()
        offset = fused.layout.offsets[i] * dtype.itemsize
        assert offset % kernels.layout.CPU_ALIGNMENT == 0
        if other.numel():
            assert view.data_ptr() == tensor.data_ptr() == fused.buffer.data_ptr() + offset
        view.fill_(i + 1)
    for i, (low, high) in enumerate(itertools.pairwise(fused.layout.segments)):
        numel = fused.layout.numels[i]
        assert fused.buffer[low : low + numel].eq(i + 1).all()
        assert fused.buffer[low + numel : high].eq(0).all()
    if fused.layout.numel:
        assert buffer_of(fused.tensors) is fused


def test_buffer_of_needs_all_slots_in_their_order():
    fused = FusedBuffer(draw(0))
    assert buffer_of(fused.tensors) is fused
    assert buffer_of([each.detach() for each in fused.tensors]) is fused
    assert buffer_of([]) is None
    assert buffer_of(fused.tensors[:-1]) is None
    assert buffer_of(fused.tensors[::-1]) is None
    assert buffer_of([*fused.tensors[:-1], torch.zeros(1)]) is None
    assert buffer_of([each.clone() for each in fused.tensors]) is None
    assert buffer_of([each.view(torch.int32) for each in fused.tensors]) is None


def test_buffer_of_a_freed_buffer_is_none():
    fused = FusedBuffer(draw(0))
    tensors = fused.tensors
    del fused
    assert buffer_of(tensors) is None


def test_two_buffers_in_one_memory_take_turns():
    memory = torch.full((20_000,), float("nan"))
    first, second = (FusedBuffer(draw(0)[:n], memory) for n in (3, 2))
    assert first.buffer.data_ptr() == second.buffer.data_ptr()
    assert buffer_of(first.tensors) is first
    assert buffer_of(second.tensors) is second
    first.clear_padding()
    for view, value in zip(first.views, draw(0), strict=False):
        view.copy_(value)
    assert first.buffer.isfinite().all()


@pytest.mark.parametrize("dtype", kernels.DTYPES)
@pytest.mark.parametrize("op", [Sum, Average, Adasum], ids=str)
@pytest.mark.parametrize("algorithm", ["rd", "rechd", "xring"])
def test_grouped_all_reduce_in_a_buffer_packs_nothing(monkeypatch, op, dtype, algorithm):
    """The bits of the packed reduction, and no pack or unpack at all."""
    options = {"algorithm": algorithm, "prescale": 0.5, "postscale": 2.0}
    packed = run_threads(
        3, lambda group: group.grouped_all_reduce(draw(group.rank, dtype), op, **options)
    )

    def refuse(*_args, **_options):
        raise AssertionError("packed")

    monkeypatch.setattr(kernels, "pack", refuse)
    monkeypatch.setattr(kernels, "unpack", refuse)

    def run(group):
        fused = FusedBuffer(draw(group.rank, dtype))
        for view, value in zip(fused.views, draw(group.rank, dtype), strict=True):
            view.copy_(value)
        answer = group.grouped_all_reduce(fused.tensors, op, **options)
        assert all(a is b for a, b in zip(answer, fused.tensors, strict=True))
        padding = fused.buffer.clone()
        for view in FusedBuffer(draw(0, dtype), padding).views:
            view.zero_()
        assert padding.eq(0).all()
        return fused.views

    for got, want in zip(run_threads(3, run), packed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
