"""pack and unpack against float64."""

from __future__ import annotations

import math

import pytest
import torch

import kernels
from tests.kernels.cases import DTYPES, assert_close, bits, misaligned, poisoned, random, tolerance
from tests.kernels.conftest import Backend

SHAPES = [(3, 5), (), (0,), (9000,), (7,), (2, 0, 3), (64, 64), (1,)]


def tensors_of(dtype: torch.dtype, backend: Backend, seed: int = 0) -> list[torch.Tensor]:
    return [random(shape, dtype, backend.device, seed + i) for i, shape in enumerate(SHAPES)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("move", [False, True])
def test_round_trip_is_exact_and_padding_is_zero(backend, dtype, move):
    tensors = tensors_of(dtype, backend)
    if move:
        tensors = [misaligned(tensor) for tensor in tensors]
    layout = kernels.layout_of(tensors)
    out = poisoned(layout.numel, dtype, backend.device)
    assert kernels.pack(tensors, out=out) is out
    assert torch.equal(out.double(), kernels.pack_reference(tensors))
    back = [poisoned(tuple(tensor.shape), dtype, backend.device) for tensor in tensors]
    if move:
        back = [misaligned(tensor) for tensor in back]
    kernels.unpack(out, back)
    assert [bits(tensor) for tensor in back] == [bits(tensor) for tensor in tensors]


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_scale_and_cast_are_fused(backend, source, target):
    tensors = tensors_of(source, backend, seed=20)
    layout = kernels.layout_of(tensors, dtype=target)
    buffer = kernels.pack(tensors, layout=layout, scale=0.3)
    expected = kernels.pack_reference(tensors, layout=layout, scale=0.3)
    bound = tolerance(target)
    assert_close(buffer, expected, expected, bound)
    back = [poisoned(tuple(tensor.shape), source, backend.device) for tensor in tensors]
    kernels.unpack(buffer, back, layout=layout, scale=0.5)
    for got, want in zip(back, kernels.unpack_reference(buffer, layout, scale=0.5), strict=True):
        assert_close(got, want, want, tolerance(source))


def test_mixed_dtypes_and_many_tensors(backend):
    tensors = [random(1 + i % 37, DTYPES[i % 4], backend.device, i) for i in range(150)]
    layout = kernels.layout_of(tensors, dtype=torch.float64, alignment=8)
    buffer = kernels.pack(tensors, layout=layout)
    assert torch.equal(buffer, kernels.pack_reference(tensors, layout=layout))


def test_no_tensors(backend):
    layout = kernels.layout_of([])
    assert layout.segments == (0,)
    assert kernels.pack([]).shape == (0,)
    assert kernels.unpack(kernels.pack([]), []) == []


def test_layout_places():
    tensors = [torch.zeros(3), torch.zeros(0), torch.zeros(2, 16), torch.zeros(())]
    layout = kernels.layout_of(tensors)
    assert layout.offsets == (0, 16, 16, 48)
    assert layout.segments == (0, 16, 16, 48, 64)
    assert [view.shape for view in layout.views(torch.zeros(64))] == [t.shape for t in tensors]
    assert kernels.layout_of(tensors, dtype=torch.float16, alignment=2).offsets == (0, 3, 3, 35)
    assert kernels.pack_bytes(tensors) == (3 + 32 + 1 + 64) * 4


def test_a_grad_requiring_leaf_is_unpacked_in_place_without_grad_mode_alone(backend):
    leaf = random(10, torch.float32, backend.device, 1).requires_grad_()
    buffer, before = kernels.pack([leaf], scale=2.0).detach(), leaf.detach().clone()
    with pytest.raises(ValueError, match=r"^tensors\[0\] requires grad, but it is written"):
        kernels.unpack(buffer, [leaf])
    assert torch.equal(leaf.detach(), before)
    with torch.no_grad():
        kernels.unpack(buffer, [leaf])
    assert torch.equal(leaf.detach(), before * 2.0) and leaf.requires_grad


@pytest.mark.parametrize("alignment", [4, 12, 20, 64])
def test_slots_of_any_alignment(backend, alignment):
    """Padding ends inside a vector, at its end or behind it, and tensors do as well."""
    tensors = [
        random(numel, torch.float32, backend.device, numel) for numel in (1, 4, 5, 8, 10, 16)
    ]
    layout = kernels.layout_of(tensors, alignment=alignment)
    out = poisoned(layout.numel, torch.float32, backend.device)
    kernels.pack(tensors, layout=layout, out=out)
    assert torch.equal(out.double(), kernels.pack_reference(tensors, layout=layout))


@pytest.mark.parametrize(("alignment", "numel"), [(163840, 3), (96, 505), (12, 1411), (8192, 1024)])
def test_slots_beyond_a_tile_off_a_line(backend, alignment, numel):
    """Tiles of padding only, and the first elements of the tile behind a tensor's end."""
    memory = poisoned(2 * numel + 600, torch.float32, backend.device)
    # 4 bytes off a line of the caches, and 80 in the buffer.
    at = -memory.data_ptr() // 4 % 32 + 1
    tensor = memory[at : at + numel]
    tensor.copy_(random(numel, torch.float32, backend.device, 1))
    layout = kernels.layout_of([tensor], alignment=alignment)
    outer = poisoned(layout.numel + 600, torch.float32, backend.device)
    low = -outer.data_ptr() // 4 % 32 + 20
    out, found = outer[low : low + layout.numel], torch.zeros((), device=backend.device)
    kernels.pack([tensor], layout=layout, out=out, found_inf=found)
    assert torch.equal(out.double(), kernels.pack_reference([tensor], layout=layout))
    kernels.unpack(out, [tensor], layout=layout, scale=2.0, found_inf=found)
    assert torch.equal(tensor.double(), 2.0 * out[:numel].double()) and not found.item()
    for whole, start, stop in ((memory, at, at + numel), (outer, low, low + layout.numel)):
        assert whole[:start].isnan().all() and whole[stop:].isnan().all()


@pytest.mark.parametrize("scale", [math.inf, math.nan, 1e39])
def test_padding_is_zero_whatever_the_scale(backend, scale):
    tensors = [torch.ones(5, device=backend.device), torch.ones(3, device=backend.device)]
    layout = kernels.layout_of(tensors)
    out = poisoned(layout.numel, torch.float32, backend.device)
    kernels.pack(tensors, layout=layout, out=out, scale=scale)
    for offset, numel, end in zip(layout.offsets, layout.numels, layout.segments[1:], strict=True):
        assert not out[offset : offset + numel].isfinite().any()
        assert torch.equal(out[offset + numel : end], torch.zeros_like(out[offset + numel : end]))


def test_one_place_in_two_dtypes(backend):
    """What is kept for a list of addresses is not taken for shorter elements there."""
    numel = 3000
    wide = random(numel, torch.float32, backend.device, 1)
    short = wide.view(torch.float16)[:numel]
    layout = kernels.layout_of([wide, wide], dtype=torch.float64)
    for tensor in (wide, short):
        packed = kernels.pack([tensor, tensor], layout=layout)
        expected = kernels.pack_reference([tensor, tensor], layout=layout)
        # A conversion may change the bits of a NaN.
        assert torch.equal(packed.nan_to_num(), expected.nan_to_num())


def test_as_many_tiles_as_tensors_of_which_some_are_empty(backend):
    """A tile's number is its tensor's only where no tensor has more than one, or none."""
    for shapes in ([(0,), (1000,)], [(1000,), (0,)], [(0,), (0,), (1500,), (3,)], [(3,), (512,)]):
        tensors = [
            random(shape, torch.float32, backend.device, i) for i, shape in enumerate(shapes)
        ]
        packed = kernels.pack(tensors)
        assert torch.equal(packed.double(), kernels.pack_reference(tensors))
        into = [poisoned(shape, torch.float32, backend.device) for shape in shapes]
        assert list(map(bits, kernels.unpack(packed, into))) == list(map(bits, tensors))
