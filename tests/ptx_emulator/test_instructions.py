"""Every listed instruction against plain Python on edge values, and the refusal of all others."""

from __future__ import annotations

import itertools
import math
import re
from fractions import Fraction

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.ptx_emulator import machine
from tests.ptx_emulator.arithmetic import OPERATIONS, from_bits
from tests.ptx_emulator.definitions import decoded, edges, expected, nearest, width_of
from tests.ptx_emulator.programs import program_of


def check(
    opcode: str, kinds: tuple[str, ...], result: str, got: int, bits: tuple[int, ...]
) -> None:
    """Compare one result bit by bit, a NaN by what PTX promises of it."""
    wanted = expected(opcode, kinds, result, bits)
    halves = {"f32x2": "f32", "f16x2": "f16", "bf16x2": "bf16"}.get(result)
    if halves:
        width = width_of(halves)
        pairs = [(w >> s & (1 << width) - 1, g >> s & (1 << width) - 1)
                 for w, g in [(wanted, got)] for s in (0, width)]  # fmt: skip
    else:
        pairs = [(wanted, got)]
    for one, other in pairs:
        kind = halves or result
        if "f" in kind and math.isnan(decoded(kind, one)):
            assert math.isnan(decoded(kind, other)), (bits, hex(other))
            if kind != "f64" and not opcode.startswith(("mov", "selp", "neg", "abs")):
                assert other == (1 << width_of(kind) - 1) - 1, (bits, hex(other))
        else:
            assert one == other, (list(map(hex, bits)), hex(one), hex(other))


@pytest.mark.parametrize(("opcode", "count"), OPERATIONS, ids=lambda value: str(value))
def test_instruction_on_edge_values_computes_what_ptx_says(opcode, count):
    operation = OPERATIONS[opcode, count]
    assert len(operation.sources) == count
    choices = [edges(kind) if kind != "pred" else [0, 1] for kind in operation.sources]
    cases = list(itertools.product(*choices))
    if opcode.startswith(("div", "rem")) and operation.result[0] != "f":
        cases = [case for case in cases if case[1]]
    operands = [
        np.array([from_bits(kind, bits) for bits in column])
        for kind, column in zip(operation.sources, zip(*cases, strict=True), strict=True)
    ]
    with np.errstate(all="ignore"):
        results = np.asarray(operation.compute(*operands))
    assert results.shape == (len(cases),)
    raw = results if results.dtype == bool else results.view(f"u{results.dtype.itemsize}")
    for case, got in zip(cases, raw, strict=True):
        check(opcode, operation.sources, operation.result, int(got), case)


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
        assert int(result.view(f"u{result.itemsize}")) == nearest(exact, kind), (x, y, z)


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


# As a compiler would write them: a packed pair, saturation, flushing, other roundings,
# approximations, carries, and other forms of what is listed.
UNLISTED = """
neg.f16x2 %r1, %r2
abs.ftz.f32 %r1, %r2
max.xorsign.abs.f32 %r1, %r2, %r2
add.sat.s32 %r1, %r2, %r2
fma.rm.f64 %rd1, %rd2, %rd2, %rd2
div.approx.f32 %r1, %r2, %r2
add.cc.u32 %r1, %r2, %r2
mul.hi.u32 %r1, %r2, %r2
setp.lt.and.s32 %p1, %r2, %r2, %p2
cvt.rn.satfinite.e4m3x2.f32 %rs1, %r2, %r2
ld.volatile.global.b32 %r1, [%rd1]
ld.local.b32 %r1, [%rd1]
st.global.gpu.release.b32 [%rd1], %r1
atom.global.cta.acq_rel.add.u64 %rd1, [%rd2], %rd2
red.global.add.u64 [%rd2], %rd2
shfl.sync.down.b32 %r1, %r2, 1, 31, -1
bar.red.popc.u32 %r1, 0, %p1
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


def matrices(load: str, trans: str) -> torch.Tensor:
    """Return an 8 x 8 matrix after a way through shared memory, with `load` at one end."""
    memory = torch.arange(64, dtype=torch.int16)
    memory = torch.cat([memory, torch.zeros(64, dtype=torch.int16)])
    own = ["mov.u32 %r1, %tid.x", "shl.b32 %r2, %r1, 2", "cvt.u64.u32 %rd2, %r2",
           "add.s64 %rd2, %rd1, %rd2", "shl.b32 %r1, %r1, 4", "min.u32 %r1, %r1, 112"]  # fmt: skip
    if load == "ldmatrix":
        moves = [
            "ld.global.b32 %r0, [%rd2]", "st.shared.b32 [%r2], %r0", "bar.sync 0",
            f"ldmatrix.sync.aligned.m8n8.x1{trans}.shared.b16 {{%r0}}, [%r1]",
        ]  # fmt: skip
    else:
        moves = [
            "ld.global.b32 %r0, [%rd2]",
            f"stmatrix.sync.aligned.m8n8.x1{trans}.shared.b16 [%r1], {{%r0}}", "bar.sync 0",
            "ld.shared.b32 %r0, [%r2]",
        ]  # fmt: skip
    steps = [*own, *moves, "st.global.b32 [%rd2+128], %r0"]
    program = program_of("".join(f"{one};\n" for one in steps))
    machine.launch(program, 1, [memory.data_ptr()], 128, resident=1)
    return memory[64:].view(8, 8)


@pytest.mark.parametrize("name", ["ldmatrix", "stmatrix"])
def test_matrices_move_rows_or_with_trans_columns(name):
    matrix = torch.arange(64, dtype=torch.int16).view(8, 8)
    assert torch.equal(matrices(name, ""), matrix)
    assert torch.equal(matrices(name, ".trans"), matrix.T)
