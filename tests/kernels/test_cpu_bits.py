"""The CPU path to the bit: compiled or by torch, of any size, dtype and flag, one arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import kernels
from tests.kernels.cases import DTYPES, bits, poisoned, random

pytestmark = pytest.mark.usefixtures("cpu_path")

SCALES = [1.0, 1 / 3, 0.0, -0.0, -1 / 3, 1.5, 1e39, math.inf, math.nan]
SPECIAL = torch.tensor(
    [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-40, 6e-8, 65504.0, 3e38, 1e300],
    dtype=torch.float64,
)
# A few to copy in one piece, and one of more than its share of a piece.
LISTS = [((7,), (0,), (3, 5), (), (64,)), ((16,), (64,)), ((40_000,), (5,))]


def values(shape: int | tuple[int, ...], dtype: torch.dtype, seed: int, special: bool) -> Tensor:
    tensor = random(shape, torch.float64, "cpu", seed)
    if special and tensor.numel() >= len(SPECIAL):
        tensor.view(-1)[: len(SPECIAL)] = SPECIAL
    return tensor.to(dtype)


def wide_of(*dtypes: torch.dtype) -> torch.dtype:
    return torch.float64 if torch.float64 in dtypes else torch.float32


def canonical(tensor: Tensor) -> bytes:
    """The bits, with one NaN for all: which one comes out is up to the processor."""
    return bits(torch.where(tensor.isnan(), torch.full_like(tensor, math.nan), tensor))


def flag_of(*tensors: Tensor) -> float:
    return float(any(not bool(tensor.isfinite().all()) for tensor in tensors))


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("alignment", [8, 64])
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
@pytest.mark.parametrize("count", [1, 2, 3])
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


def test_blocks_have_the_bits_of_one_piece():
    """More elements than any block, and the same ones in pieces."""
    numel = (1 << 22) + 5
    for dtype in (torch.float16, torch.float32):
        a, b = (random(numel, dtype, "cpu", seed) for seed in (1, 2))
        parts = [slice(low, low + 300_001) for low in range(0, numel, 300_001)]
        calls = [
            lambda x, y: kernels.sum_n([x, y, x], scale=0.3),
            lambda x, y: kernels.scaled_add(x, y, alpha=0.3, beta=-1.7),
        ]
        for call in calls:
            in_parts = torch.cat([call(a[part], b[part]) for part in parts])
            assert bits(call(a, b)) == bits(in_parts)
