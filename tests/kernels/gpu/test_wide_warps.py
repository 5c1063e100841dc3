"""The kernels with two warps of 64 threads in the place of four of 32, in the emulator.

So they run on AMD's GPUs. This finds what takes a warp for 32 threads in them and their launchers.
It is Triton's code for NVIDIA all the same (tests/ptx_emulator/wide_warps.py), not what Triton
compiles for AMD, of which test_amd.py says that it compiles. The kernels that the ranks of a node
launch together stay out: their waits are limited by NVIDIA's timer. `backend` runs the other tests
of kernels at this width as `wide_warps`, which is slow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

import kernels
from tests.kernels.cases import DTYPES, bits, misaligned, poisoned, random, relative_l2
from tests.kernels.gpu.test_architectures import CUTS, NUMEL, elementwise
from tests.kernels.gpu.test_gram_kernels import reach_of
from tests.kernels.test_projection import bound_of
from tests.kernels.test_weighted_sum import assert_rounded_once
from tests.kernels.trees import balanced
from tests.ptx_emulator import driver
from tests.ptx_emulator.driver import emulated
from tests.ptx_emulator.memory import AccessError
from tests.ptx_emulator.parse import Immediate, Instruction, Program

EPS = torch.finfo(torch.float64).eps
LARGE = [dtype for dtype in DTYPES if dtype != torch.float32]
ALL = [torch.float32, *[pytest.param(dtype, marks=pytest.mark.slow) for dtype in LARGE]]


def launching(change: Callable[[Program], Program]) -> Any:
    """Have the emulator launch, in the place of each program, what `change` returns."""
    launch = driver.launch
    return mock.patch.object(
        driver, "launch", lambda program, *given, **how: launch(change(program), *given, **how)
    )


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_what_adds_no_dot_products_has_the_bits_of_warps_of_32(dtype):
    with emulated():
        expected = elementwise(dtype)
    shapes = []

    def noted(program: Program) -> Program:
        shapes.append((program.threads, program.warp))
        return program

    with emulated(warp=64), launching(noted):
        got = elementwise(dtype)
    assert shapes == [(128, 64)] * 7
    assert list(map(bits, got)) == list(map(bits, expected))


def check_adasum(dtype: torch.dtype) -> None:
    """Run the kernels of Adasum of two tensors against float64; all ways have the same bits."""
    a, b = (random(NUMEL, dtype, "cpu", seed) for seed in (1, 2))
    dots = kernels.dot_and_norms(a, b, CUTS)
    expected = kernels.dot_and_norms_reference(a, b, CUTS)
    # As in test_projection.py.
    wide = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    scale = torch.stack([expected[:, 1:].sqrt().prod(1), *expected[:, 1:].unbind(1)], 1)
    assert ((dots - expected).abs() <= (33 + math.log2(NUMEL)) * wide * scale).all()
    out = kernels.adasum(a, b, CUTS, out=poisoned(NUMEL, dtype, "cpu"))
    assert relative_l2(out, kernels.adasum_reference(a, b, CUTS)) <= bound_of(dtype, NUMEL)
    assert bits(kernels.adasum(a, misaligned(b), CUTS, cooperative=False)) == bits(out)
    assert bits(kernels.combine(a, b, dots, CUTS)) == bits(out)
    assert bits(kernels.plan_adasum(a, b, CUTS)()) == bits(out)


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_adasum_is_right_in_one_launch_and_in_two(dtype):
    with emulated(warp=64) as emulator:
        check_adasum(dtype)
    one, two = ["_one_launch_kernel"], ["_dots_kernel", "_combine_kernel"]
    assert [launched.name for launched in emulator.launches] == [two[0], *one, *two, two[1], *one]


def check_gram(count: int, dtype: torch.dtype) -> None:
    """Run the three kernels of Adasum of `count` tensors against float64."""
    tensors = [random(NUMEL, dtype, "cpu", 100 * count + i) for i in range(count)]
    matrices = kernels.gram(tensors, CUTS, out=poisoned((4, count, count), torch.float64, "cpu"))
    expected = kernels.gram_reference(tensors, CUTS)
    # A rounding for each term, and in float64 one for its product; as many in the reference.
    assert ((matrices - expected).abs() <= 2 * NUMEL * EPS * reach_of(expected)).all()
    precise = kernels.gram(tensors, CUTS, precise=True).sum(-1)
    assert ((precise - expected).abs() <= 2 * NUMEL * EPS * reach_of(expected)).all()
    spread, tree = poisoned(4, torch.float64, "cpu"), balanced(count)
    factors = kernels.adasum_coefficients(matrices[None], tree, spread=spread)
    exact = kernels.adasum_coefficients_reference(matrices[None], tree)
    # As in test_adasum_coefficients.py.
    bound = 8 * count**3 * EPS * spread[:, None] * (1 + exact.abs())
    assert ((factors - exact).abs() <= bound).all()
    out = kernels.weighted_sum(tensors, factors, CUTS, out=poisoned(NUMEL, dtype, "cpu"))
    assert_rounded_once(out, tensors, factors, CUTS)


@pytest.mark.parametrize(
    ("dtype", "count"),
    [
        pytest.param(dtype, count, marks=() if (dtype, count) == fast else pytest.mark.slow)
        for fast in [(torch.float32, 3)]
        for dtype in DTYPES
        for count in range(1, 9)
    ],
    ids=str,
)
def test_adasum_of_several_tensors_is_right(dtype, count):
    with emulated(warp=64):
        check_gram(count, dtype)


def within_32_lanes(program: Program) -> Program:
    """Leave out the step of each sum over a warp's lanes that 32 do not need."""

    def left_out(one: Instruction) -> Instruction:
        if one.opcode != "shfl.sync.bfly.b32" or one.operands[2] != Immediate(32):
            return one
        # Shuffled by nothing, it is the thread's own value, so that sums are of one half, doubled.
        return one._replace(operands=(*one.operands[:2], Immediate(0), *one.operands[3:]))

    blocks = [tuple(map(left_out, block)) for block in program.basic_blocks]
    if blocks == list(program.basic_blocks):
        raise ValueError(f"{program.name} adds over no lanes")
    return program._replace(basic_blocks=tuple(blocks))


def test_a_sum_over_32_lanes_alone_is_found():
    """The halves of a warp have other sums, and store them at one address, or one half its own."""
    found = pytest.raises((AccessError, AssertionError))
    with emulated(warp=64), launching(within_32_lanes), found:
        check_adasum(torch.float32)
