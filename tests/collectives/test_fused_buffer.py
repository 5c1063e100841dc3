"""Buffers whose slots are the tensors: reduced in place, found by address, equal to packed ones."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from adasum import Adasum
from collectives import Average, Sum, run_threads
from collectives.fused_buffer import FusedBuffer, buffer_of, memory_of

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


@pytest.mark.parametrize(
    ("memory", "error", "text"),
    [
        (torch.empty(64, dtype=torch.float64), TypeError, r"of torch\.float32 as the tensors, got"),
        (torch.empty(31), ValueError, r"at least 32 elements, got shape \(31,\)"),
        (torch.empty(64, 1), ValueError, "memory must be 1-D"),
        (torch.empty(128)[::2], ValueError, "memory must be contiguous"),
    ],
)
def test_memory_that_cannot_be_the_buffer_raises_and_says_why(memory, error, text):
    with pytest.raises(error, match=text):
        FusedBuffer([torch.ones(3), torch.ones(4)], memory)


def test_fused_buffer_of_complex_tensors_raises() -> None:
    with pytest.raises(TypeError, match="complex64"):
        FusedBuffer([torch.ones(3, dtype=torch.complex64)])


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


# "auto" in shared memory, the others by messages; owners have no algorithm.
@pytest.mark.parametrize(
    ("way", "algorithm"),
    [
        ("owners", "auto"),
        *itertools.product(["call", "request"], ["auto", "rd", "vhdd", "xring", "direct"]),
    ],
)
@pytest.mark.parametrize("local_size", [3, 1])
def test_what_is_not_finite_once_does_not_stay_in_the_padding(way, algorithm, local_size):
    """Adasum of infinity leaves NaN there, which the next Adasum must not read."""

    def run(group):
        fused = FusedBuffer(draw(group.rank))
        if way == "owners":
            request = group.reduce_to_owners_init(fused.tensors, Adasum, owners=[0] * len(SHAPES))
        else:
            options = {"algorithm": algorithm, "packed": True}
            request = group.grouped_all_reduce_init(fused.tensors, Adasum, **options)

        def reduce():
            if way == "call":
                group.grouped_all_reduce(fused.tensors, Adasum, **options)
            else:
                request.start()
                request.wait()

        for value in (float("inf"), 1.0):
            for view, each in zip(fused.views, draw(group.rank), strict=True):
                view.copy_(each * value)
            reduce()
            finite = fused.buffer.isfinite().all()
            if group.rank == 0 or way != "owners":
                assert finite == (value == 1.0)
            fused.buffer.fill_(float("nan"))

    run_threads(3, run, local_size=local_size)


# Whole slots of 64 bytes in every dtype, so that the layout has no padding.
GUARD = 128
WHOLE = [(64, 3), (64,), (0, 3), (8, 16)]


def in_memory(rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Somebody's buffer between two guards of NaN, and tensors with values that lie in it."""
    generator = torch.Generator().manual_seed(rank)
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in WHOLE]
    layout = kernels.layout_of(values)
    memory = torch.full((layout.numel + 2 * GUARD,), float("nan"), dtype=dtype)
    tensors = layout.views(memory[GUARD:-GUARD])
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)
    return memory, tensors


@pytest.mark.parametrize("dtype", kernels.DTYPES)
@pytest.mark.parametrize("op", [Sum, Average, Adasum], ids=str)
@pytest.mark.parametrize("algorithm", ["rd", "rechd", "xring", "psgpu"])
def test_grouped_all_reduce_in_anybodys_memory_packs_nothing(monkeypatch, op, dtype, algorithm):
    """The bits of the packed reduction, beside ranks that pack, and nothing else is written."""
    options = {"algorithm": algorithm, "prescale": 0.5, "postscale": 2.0}

    def apart(group):
        tensors = [each.clone() for each in in_memory(group.rank, dtype)[1]]
        return group.grouped_all_reduce(tensors, op, **options)

    want = run_threads(3, apart)
    packs = []
    pack = kernels.pack
    monkeypatch.setattr(
        kernels, "pack", lambda tensors, **more: packs.append(tensors) or pack(tensors, **more)
    )

    def run(group):
        memory, tensors = in_memory(group.rank, dtype)
        if group.rank == 1:
            return apart(group)
        request = group.grouped_all_reduce_init(tensors, op, negotiate=False, **options)
        request.start()
        answer = request.wait()
        assert memory[:GUARD].isnan().all() and memory[-GUARD:].isnan().all()
        assert all(a is b for a, b in zip(answer, tensors, strict=True))
        return answer

    for got in run_threads(3, run):
        assert all(torch.equal(a, b) for a, b in zip(got, want[0], strict=True))
    # Rank 1's.
    assert len(packs) == 1


def test_memory_of_needs_one_allocation_and_every_offset():
    _, tensors = in_memory(0, torch.float32)
    layout = kernels.layout_of(tensors)
    found = memory_of(tensors, layout)
    assert found is not None and found.data_ptr() == tensors[0].data_ptr()
    assert found.shape == (layout.numel,)
    assert memory_of([each.detach() for each in tensors], layout) is not None
    assert memory_of([tensors[0], tensors[1].clone(), *tensors[2:]], layout) is None
    swapped = [tensors[1], tensors[0], *tensors[2:]]
    assert memory_of(swapped, kernels.layout_of(swapped)) is None
    shifted = [each.view(-1)[1:-1] for each in in_memory(0, torch.float32)[1][:1]]
    assert memory_of(shifted, kernels.layout_of(shifted, alignment=4)) is not None
    assert (
        memory_of(shifted, replace(kernels.layout_of(shifted, alignment=4), alignment=64)) is None
    )
    assert memory_of([torch.ones(0)], kernels.layout_of([torch.ones(0)])) is None
    raw = bytearray(128)
    side_by_side = [torch.frombuffer(raw, dtype=torch.float32, count=16, offset=o) for o in (0, 64)]
    assert memory_of(side_by_side, kernels.layout_of(side_by_side)) is None


def test_padding_of_anybodys_memory_neither_counts_nor_changes():
    """It may hold other tensors, or NaN: what has padding that is not a FusedBuffer's is packed."""
    numels = [3, 7]
    values = [torch.full((n,), 2.0) for n in numels]
    layout = kernels.layout_of(values)

    def run(group):
        memory = torch.full((layout.numel,), float("nan"))
        tensors = layout.views(memory)
        for tensor in tensors:
            tensor.fill_(2.0)
        padding = memory.isnan()
        group.grouped_all_reduce(tensors, Adasum, algorithm="rd")
        assert torch.equal(memory.isnan(), padding)
        return torch.cat(tensors)

    for got in run_threads(2, run):
        # Parallel vectors average; products, sums and coefficients round some ten times.
        assert torch.allclose(got, torch.full((10,), 2.0), rtol=10 * torch.finfo().eps, atol=0)
