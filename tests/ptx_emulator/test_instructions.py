"""Conversions against torch, and the refusal of every instruction that is not listed."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.ptx_emulator import machine
from tests.ptx_emulator.arithmetic import OPERATIONS
from tests.ptx_emulator.parse import parse


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


def program_of(*instructions: str):
    """Return a program of one warp with these instructions."""
    body = "\n".join(f"\t{text};" for text in instructions)
    return parse(f"""
.visible .entry a_kernel(
	.param .u64 .ptr .global .align 1 a_kernel_param_0
)
.reqntid 32
{{
	.reg .pred 	%p<3>;
	.reg .b16 	%rs<3>;
	.reg .b32 	%r<3>;
	.reg .b64 	%rd<3>;
	ld.param.b64 	%rd1, [a_kernel_param_0];
{body}
	ret;
}}
""")


@pytest.mark.parametrize("text", UNLISTED)
def test_unlisted_instruction_is_refused_by_name_before_anything_runs(text):
    memory = torch.zeros(1, dtype=torch.int64)
    program = program_of("st.global.b64 [%rd1], 1", text)
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
        machine.launch(program_of(text), 1, [memory.data_ptr()], 0, resident=1)
