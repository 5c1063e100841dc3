"""The CPU path to the bit: compiled or by torch, of any size, dtype and flag, one arithmetic."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

import kernels
from tests.kernels.cases import DTYPES, SPECIAL, canonical, poisoned, random

pytestmark = pytest.mark.usefixtures("cpu_path")

SCALES = [1.0, 1 / 3, 0.0, -0.0, -1 / 3, 1.5, 1e39, math.inf, math.nan]
# A few to copy in one piece, and one of more than its share of a piece.
LISTS = [((7,), (0,), (3, 5), (), (64,)), ((16,), (64,)), ((40_000,), (5,))]


def values(shape: int | tuple[int, ...], dtype: torch.dtype, seed: int, special: bool) -> Tensor:
    tensor = random(shape, torch.float64, "cpu", seed)
    if special and tensor.numel() >= len(SPECIAL):
        tensor.view(-1)[: len(SPECIAL)] = SPECIAL
    return tensor.to(dtype)


def wide_of(*dtypes: torch.dtype) -> torch.dtype:
    return torch.float64 if torch.float64 in dtypes else torch.float32


def flag_of(*tensors: Tensor) -> float:
    return float(any(not bool(tensor.isfinite().all()) for tensor in tensors))


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("alignment", [8, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shapes", LISTS)
def test_pack_and_unpack_round_one_product_once(source, target, alignment, shapes):
    for special in (False, True):
        tensors = [values(shape, source, i, special) for i, shape in enumerate(shapes)]
        layout = kernels.layout_of(tensors, dtype=target, alignment=alignment)
        wide = wide_of(source, target)
        for scale in SCALES:
            products = [tensor.to(wide).mul(scale).to(target) for tensor in tensors]
            expected = torch.zeros(layout.numel, dtype=target)
            for view, product in zip(layout.views(expected), products, strict=True):
                view.copy_(product)
            for found in (None, torch.zeros(())):
                out = poisoned(layout.numel, target, "cpu")
                kernels.pack(tensors, layout=layout, out=out, scale=scale, found_inf=found)
                assert canonical(out) == canonical(expected), scale
                assert found is None or found.item() == flag_of(expected), scale
            again = [part.to(wide).mul(scale).to(source) for part in layout.views(expected)]
            for found in (None, torch.zeros(())):
                back = [poisoned(shape, source, "cpu") for shape in shapes]
                kernels.unpack(expected, back, layout=layout, scale=scale, found_inf=found)
                assert [*map(canonical, back)] == [*map(canonical, again)], scale
                assert found is None or found.item() == flag_of(*again), scale


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_sums_round_once(source, target, count):
    for special in (False, True):
        tensors = [values((30, 5), source, seed, special) for seed in range(count)]
        wide = wide_of(source, target)
        total = tensors[0].to(wide)
        for tensor in tensors[1:]:
            total = total + tensor.to(wide)
        for scale in SCALES:
            expected = (total * scale).to(target)
            for found in (None, torch.zeros(())):
                got = kernels.sum_n(tensors, dtype=target, scale=scale, found_inf=found)
                assert canonical(got) == canonical(expected), scale
                assert found is None or found.item() == flag_of(expected), scale


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", range(3, 10))
def test_few_side_by_side_have_the_bits_of_one_after_the_other(dtype, count):
    """Over more than a tile, with a tail, at any place, and written to any of them."""
    for numel, place in ((1, 0), (1029, 1), (8192 + 24, 3)):
        tensors = [values(numel + place, dtype, i, numel > 1)[place:] for i in range(count)]
        wide = wide_of(dtype)
        total = tensors[0].to(wide)
        for tensor in tensors[1:]:
            total = total + tensor.to(wide)
        for scale in (1.0, 1 / 3):
            expected = canonical((total * scale).to(dtype))
            assert canonical(kernels.sum_n(tensors, scale=scale)) == expected
            for written in range(count):
                copies = [tensor.clone() for tensor in tensors]
                kernels.sum_n(copies, out=copies[written], scale=scale)
                assert canonical(copies[written]) == expected, written


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_nothing_beside_the_output_is_written(source, target):
    """Of every length up to two vectors, and around tiles, at places that are not aligned."""
    for numel, place in itertools.product([*range(18), 1023, 1025, 8193], (1, 3)):
        a, b = (random(numel, source, "cpu", seed) for seed in (1, 2))
        around = torch.full((numel + 20,), -7.0, dtype=target)
        out = around[place : place + numel]
        kernels.sum_n([a, b], out=out)
        kernels.scaled_add(a, b, alpha=0.3, beta=0.5, out=out)
        if source == target:
            kernels.adasum(a, b, out=out)
        assert (around[:place] == -7).all() and (around[place + numel :] == -7).all()
        whole = torch.full((numel + 20,), -7.0, dtype=source)
        layout = kernels.layout_of([out], alignment=target.itemsize)
        kernels.unpack(out, [whole[place : place + numel]], layout=layout)
        assert (whole[:place] == -7).all() and (whole[place + numel :] == -7).all()
        layout = kernels.layout_of([a, b[:1]], dtype=target)
        around = torch.full((layout.numel + 20,), -7.0, dtype=target)
        kernels.pack([a, b[:1]], layout=layout, out=around[place : place + layout.numel])
        assert (around[:place] == -7).all() and (around[place + layout.numel :] == -7).all()


def test_every_nan_stays_one():
    """Also those whose set bits are all rounded away, and that rounding up makes another number."""
    patterns = [0x7F800001, 0x7FC00000, 0x7FFFFFFF, -0x7FFFFF, -1]
    nans = torch.tensor(patterns, dtype=torch.int32).view(torch.float32)
    assert nans.isnan().all()
    for dtype in DTYPES:
        assert kernels.sum_n([nans], dtype=dtype).isnan().all()
        layout = kernels.layout_of([nans], dtype=dtype)
        assert kernels.pack([nans], layout=layout)[: len(nans)].isnan().all()
