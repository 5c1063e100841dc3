"""Instructions whose slips no kernel would show, and the refusal of all that are not listed.

What the others compute the tests of kernels compare with C's and torch's bits.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.ptx_emulator import machine
from tests.ptx_emulator.arithmetic import OPERATIONS, numpy_type
from tests.ptx_emulator.programs import program_of

NAN, INF = math.nan, math.inf
# As PTX has it where numpy or C have it otherwise.
VALUES = [
    ("div.s32", (-7, 2), -3),
    ("div.s64", (-(2**63), 2), -(2**62)),
    ("rem.s32", (-7, 2), -1),
    ("mul.wide.s32", (2**30, -8), -(2**33)),
    ("mad.wide.u32", (2**31, 4, 1), 2**33 + 1),
    ("shr.s32", (-8, 1), -4),
    ("shr.s32", (-8, 40), -1),
    ("shr.u64", (2**63, 64), 0),
    ("shl.b32", (1, 32), 0),
    ("bfe.u32", (0xFFFFFFFF, 4, 40), 0x0FFFFFFF),
    ("bfe.u32", (0xFFFFFFFF, 0, 31), 0x7FFFFFFF),
    ("bfe.u64", (0xF0F0, 4, 8), 0x0F),
    ("bfe.s32", (0x80, 4, 4), -8),
    ("bfe.s32", (5, 0, 0), 0),
    ("prmt.b32", (0x81, 0, 0x9048), 0x8100FF),
    ("max.f32", (NAN, 1.0), 1.0),
    ("min.f64", (1.0, NAN), 1.0),
    ("max.f64", (NAN, NAN), NAN),
    ("min.f32", (0.0, -0.0), -0.0),
    ("max.f32", (-0.0, 0.0), 0.0),
    ("max.f32", (-1.0, NAN, 2.0), 2.0),
    ("setp.lt.f64", (NAN, 1.0), False),
    ("setp.ltu.f64", (NAN, 1.0), True),
    ("setp.ne.f32", (NAN, NAN), False),
    ("setp.geu.f64", (1.0, 2.0), False),
    ("sqrt.rn.f64", (-1.0,), NAN),
    ("div.rn.f64", (1.0, -0.0), -INF),
    ("neg.s32", (-(2**31),), -(2**31)),
    ("cvt.rn.f16.f32", (65520.0,), INF),
    ("cvt.u16.u32", (0x12345,), 0x2345),
    ("cvt.s64.s32", (-5,), -5),
    ("add.s32", (2**31 - 1, 1), -(2**31)),
    ("selp.b32", (1, 2, False), 2),
]


@pytest.mark.parametrize(("opcode", "given", "result"), VALUES, ids=str)
def test_instruction_computes_what_ptx_says(opcode, given, result):
    operation = OPERATIONS[opcode, len(given)]
    values = [np.array([x], numpy_type(k)) for x, k in zip(given, operation.sources, strict=True)]
    with np.errstate(all="ignore"):
        got = np.asarray(operation.compute(*values))
    assert got.dtype == numpy_type(operation.result)
    assert np.array_equal(got, [result], equal_nan=isinstance(result, float))
    if isinstance(result, float) and not math.isnan(result):
        assert math.copysign(1, got[0]) == math.copysign(1, result)


@pytest.mark.parametrize(("kind", "dtype"), [("f32", np.float32), ("f64", np.float64)])
def test_fma_near_a_tie_rounds_once(kind, dtype):
    random = np.random.default_rng(1)
    digits = np.finfo(dtype).nmant
    a, b = (1 + random.integers(0, 2**20, 2000) / 2**20 for _ in range(2))
    # Addends that leave the sum near the middle between two results, where rounding twice shows.
    c = random.choice([-1.0, 1.0], 2000) * 2.0 ** random.integers(-digits - 4, digits + 4, 2000)
    a, b, c = (x.astype(dtype) for x in (a, b, c))
    got = OPERATIONS[f"fma.rn.{kind}", 3].compute(a, b, c)
    for x, y, z, result in zip(a, b, c, got, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        beside = [result, *(np.nextafter(result, dtype(end)) for end in (-np.inf, np.inf))]
        away = [abs(Fraction(float(each)) - exact) for each in beside]
        assert away[0] == min(away), (x, y, z)


def test_conversions_of_random_bits_round_as_torch_does():
    bits = np.random.default_rng(2).integers(0, 2**32, 200_000, dtype=np.uint32)
    values = bits.view(np.float32)
    wide, numbers = torch.from_numpy(values), ~np.isnan(values)
    brain = wide.to(torch.bfloat16)
    brain_bits = brain.view(torch.int16).numpy().view(np.uint16)
    with np.errstate(all="ignore"):
        half = OPERATIONS["cvt.rn.f16.f32", 1].compute(values)
        pair = OPERATIONS["cvt.rn.bf16x2.f32", 2].compute(values, values[::-1])
    assert np.array_equal(half[numbers], wide.to(torch.float16).numpy()[numbers])
    assert np.array_equal((pair >> 16)[numbers], brain_bits[numbers])
    assert np.array_equal((pair & 0xFFFF)[numbers[::-1]], brain_bits[::-1][numbers[::-1]])
    back = OPERATIONS["cvt.f32.bf16", 1].compute(brain_bits[numbers])
    assert np.array_equal(back, brain.float().numpy()[numbers])


@pytest.mark.parametrize("name", ["div.s32", "rem.u64"])
def test_division_of_integers_by_zero_raises(name):
    dtype = {"s32": np.int32, "u64": np.uint64}[name[-3:]]
    with pytest.raises(ZeroDivisionError, match="divided by zero"):
        OPERATIONS[name, 2].compute(np.array([1], dtype), np.array([0], dtype))


# A packed pair, saturation, a dtype, an order, a lane and a fence of others.
UNLISTED = """
neg.f16x2 %r1, %r2
add.sat.s32 %r1, %r2, %r2
cvt.rn.satfinite.e4m3x2.f32 %rs1, %r2, %r2
st.global.gpu.release.b32 [%rd1], %r1
shfl.sync.down.b32 %r1, %r2, 1, 31, -1
fence.acq_rel.gpu
""".strip().splitlines()


@pytest.mark.parametrize("text", UNLISTED)
def test_unlisted_instruction_is_refused_by_name_before_anything_runs(text):
    memory = torch.zeros(1, dtype=torch.int64)
    program = program_of(f"st.global.b64 [%rd1], 1;\n{text};")
    with pytest.raises(NotImplementedError, match=re.escape(text)):
        machine.launch(program, 1, [memory.data_ptr()], 0, resident=1)
    assert memory.item() == 0


@pytest.mark.parametrize(
    "text",
    [
        "max.s32 %r1, %r2, %r2, %r2",
        "add.s32 %r1, %r2",
        "setp.lt.s32 %p1|%p2, %r2, %r2",
        "and.pred %p1, !%p1, %p2",
        "add.s32 %r1, %rs1, %r2",
        "mov.u32 %r1, %clock",
        "ld.global.v2.b32 {%r1}, [%rd1]",
    ],
)
def test_listed_instruction_with_unknown_operands_is_refused_by_name(text):
    memory = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match=re.escape(text)):
        machine.launch(program_of(f"{text};"), 1, [memory.data_ptr()], 0, resident=1)


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("ld.global.b16 %r1, [%rd1]", 0xFFFE),
        ("ld.global.u16 %r1, [%rd1]", 0xFFFE),
        ("ld.global.s16 %r1, [%rd1]", -2),
        ("ld.global.b32 %r1, [%rd1]", 0xFFFFFFFE),
        ("ld.global.f32 %r1, [%rd1]", 0xFFFFFFFE),
        ("mov.b32 {%rs1, _}, -2147418114; cvt.u32.u16 %r1, %rs1", 0xFFFE),
        ("mov.b32 {_, %rs1}, -2147418114; cvt.s32.s16 %r1, %rs1", -(2**15)),
        ("mov.b16 %rs1, 5; mov.b16 %rs2, 9; mov.b32 %r1, {%rs1, %rs2}", (9 << 16) + 5),
        ("mov.u32 %r2, %tid.x; redux.sync.max.s32 %r1, %r2, -1", 31),
        ("mov.u32 %r2, %tid.x; redux.sync.min.u32 %r1, %r2, -1", 0),
        ("mov.u32 %r2, %tid.x; redux.sync.add.s32 %r1, %r2, -1", 496),
        ("mov.u32 %r2, %tid.x; shfl.sync.bfly.b32 %r1, %r2, 16, 31, -1", 16),
        ("mov.u32 %r2, %tid.x; shfl.sync.idx.b32 %r1, %r2, 37, 31, -1", 5),
        ("mov.u32 %r2, %tid.x; add.s32 %r1, %r2, 7; shfl.sync.idx.b32 %r1, %r2, %r1, 31, -1", 7),
    ],
)
def test_loads_and_moves_of_parts_and_warps_give_what_ptx_says(text, result):
    """What lane 0 has in %r1 afterwards."""
    memory = torch.tensor([-2, 0])
    stores = ["mov.u32 %r2, %tid.x", "setp.eq.u32 %p1, %r2, 0", "@%p1 st.global.b32 [%rd1+8], %r1"]
    program = program_of("".join(f"{one};\n" for one in (*text.split("; "), *stores)))
    machine.launch(program, 1, [memory.data_ptr()], 0, resident=1)
    assert memory[1].item() == result % 2**32
