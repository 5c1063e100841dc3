"""Sizes past 2^31 elements and 2 GiB, without the memory: address space, meta and index arithmetic.

That the kernels compute in 64 bits is read from the intermediate code that Triton makes of them.
"""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import kernels
from bench.static_analysis import compiled
from bench.static_analysis.cases import KERNELS, cases
from collectives import plan_groups, split_bounds, split_by_size
from collectives.schedules.schedule import segment_bounds
from tests.fuzz.outcome import SETTINGS
from tests.kernels.cases import reserved

HUGE = 2**33 + 5
numels = st.integers(2**31 - 2, 2**45)


@SETTINGS
@given(numel=numels, pieces=st.integers(1, 1000))
def test_splits(numel: int, pieces: int) -> None:
    bounds = split_bounds(numel, pieces)
    sizes = [b - a for a, b in pairwise(bounds)]
    assert bounds[0] == 0 and bounds[-1] == numel and len(sizes) == pieces
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    cuts = [0, numel // 3, numel // 2, numel]
    whole = segment_bounds(cuts, pieces)
    assert whole == sorted(whole) and {*whole} <= {*cuts} and whole[-1] == numel


@pytest.mark.parametrize("dtype", kernels.DTYPES)
def test_layouts_and_bytes(dtype: torch.dtype) -> None:
    memory = reserved(3 * 2**32 * dtype.itemsize)
    flat = memory.view(dtype)
    tensors = [flat[: 2**32 + 1], flat[2**32 + 1 : 2**32 + 3], flat[2**32 + 3 :]]
    step = 64 // dtype.itemsize
    layout = kernels.layout_of(tensors)
    assert layout.offsets == (0, 2**32 + step, 2**32 + 2 * step)
    assert (
        layout.numel == -(-layout.offsets[2] // step) * step + -(-tensors[2].numel() // step) * step
    )
    assert layout.sound
    size = dtype.itemsize
    assert kernels.pack_bytes(tensors) == flat.numel() * size + layout.numel * size
    assert kernels.unpack_bytes(flat[:1], tensors, layout=layout) == 2 * flat.numel() * size
    assert kernels.sum_n_bytes([flat, flat]) == 3 * flat.numel() * size
    assert kernels.scaled_add_bytes(flat, flat, dtype=torch.float64) == flat.numel() * (
        2 * size + 8
    )
    assert kernels.dot_and_norms_bytes(flat, flat) == 2 * flat.numel() * size + 24
    assert kernels.combine_bytes(flat, flat) == 3 * flat.numel() * size + 24
    assert kernels.adasum_bytes(flat, flat) == 3 * flat.numel() * size


def test_overlap_is_found_past_4_gib() -> None:
    flat = reserved(2**33).view(torch.float16)
    with pytest.raises(ValueError, match="out overlaps a"):
        kernels.adasum(flat[: 2**31], flat[2**31 :], out=flat[2**31 - 1 : -1])
    with pytest.raises(ValueError, match="segments must start at 0 and end at the 2147483648"):
        kernels.dot_and_norms(flat[: 2**31], flat[2**31 :], (0, 2**31 - 1))


def test_meta_tensors_are_planned_and_not_computed() -> None:
    huge = torch.empty(HUGE, dtype=torch.float16, device="meta")
    small = torch.empty(3, dtype=torch.float16, device="meta")
    assert split_by_size([huge, small], HUGE - 1) == ([small], [huge])
    # 16384 MiB and 10 bytes each, and 6 bytes.
    assert plan_groups([huge, huge, small], memory_size=2.0**15 + 1) == [[0, 1, 2]]
    assert plan_groups([huge, huge, small], memory_size=2.0**14 + 1) == [[0], [1, 2]]
    assert plan_groups([huge, huge, small], memory_size=2.0**14) == [[0], [1], [2]]
    assert kernels.adasum_bytes(huge, huge) == 6 * HUGE
    with pytest.raises(ValueError, match="a is on meta"):
        kernels.adasum(huge, huge)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_traced_shapes(device: str) -> None:
    with FakeTensorMode():
        a, b = (torch.empty(HUGE, dtype=torch.bfloat16, device=device) for _ in range(2))
        assert kernels.adasum(a, b, (0, 2**32, HUGE)).shape == (HUGE,)
        assert kernels.dot_and_norms(a, b, (0, 2**32, HUGE)).shape == (2, 3)
        assert kernels.sum_n([a, b], dtype=torch.float32).shape == (HUGE,)
        align = 128 if device == "cuda" else 32
        assert kernels.pack([a, b]).shape == (2 * (HUGE + -HUGE % align),)


_OFFSET = re.compile(r"tt\.addptr \S+, (\S+) : (tensor<\S+?x)?!tt\.ptr<(\w+)>.*?i(32|64)>?( |$)")


def _name(name: str) -> object:
    """Of kernels that Triton takes long to compile the smallest is enough by default."""
    long = name in ("node_adasum4", "node_adasum8")
    return pytest.param(name, marks=pytest.mark.slow) if long else name


@pytest.mark.parametrize("name", map(_name, KERNELS))
def test_kernels_address_in_64_bits(name: str) -> None:
    """In Triton's code an offset to a tensor's address is an i64, or one within a tile.

    Tables, with a few words a tile, may be addressed by the tile's number.
    """
    plain = [
        case
        for case in cases()
        if (case.kernel, case.capability, case.variant) == (name, 90, "plain")
    ]
    case = min(plain, key=lambda case: case.dtype != "fp16")
    code = compiled.compile_case(case).asm["ttir"]
    small = re.findall(r"(\S+) = (?:tt\.make_range|arith\.constant)", code)
    found = [_OFFSET.search(line) for line in code.splitlines() if "tt.addptr" in line]
    assert found and all(found)
    for match in found:
        offset, many, element, width = match.group(1, 2, 3, 4)
        if width == "32":
            # Words of 64 bits are tables: of addresses, and of the ranks' signals.
            within = offset in small or element == "i64" if many else element != "f16"
            assert within, match[0]
