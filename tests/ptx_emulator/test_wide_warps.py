"""Compiling for warps of 64 threads, and what these do together."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")

from tests.ptx_emulator import machine
from tests.ptx_emulator.driver import emulated
from tests.ptx_emulator.test_instructions import program_of
from tests.ptx_emulator.wide_warps import widened

HEAD = """
  llvm.func @a_kernel(%x: !llvm.ptr<1>) attributes {nvvm.reqntid = array<i32: THREADS>} {
    %0 = llvm.mlir.constant(32 : i32) : i32 loc(#loc1)
    %1 = llvm.mlir.constant(MASK : i32) : i32 loc(#loc1)
    %2 = llvm.mlir.constant(64 : i32) : i32 loc(#loc1)
    %i = nvvm.read.ptx.sreg.tid.x : i32 loc(#loc2)
"""
TWO_WARPS = HEAD.replace("THREADS", "64").replace("MASK", "127")


def test_warps_are_numbered_by_64_threads():
    lines = ["%m = llvm.and %i, %1", "%lane = llvm.urem %m, %2", "%warp = llvm.udiv %m, %0"]
    text = TWO_WARPS + "\n".join(f"    {line} : i32 loc(#loc2)" for line in lines)
    expected = text.replace("array<i32: 64>", "array<i32: 128>").replace(
        "    %warp = llvm.udiv %m, %0",
        "%width_of_warp = llvm.mlir.constant(64 : i32) : i32\n"
        "    %warp = llvm.udiv %m, %width_of_warp",
    )
    assert widened(text) == expected
    one = HEAD.replace("THREADS", "32").replace("MASK", "63") + "    %l = llvm.and %i, %1 : i32\n"
    # What has no bit of the warp's number is the lane, of which everything is allowed.
    one += "    %j = llvm.shl %l, %0 : i32\n"
    assert widened(one) == one.replace("array<i32: 32>", "array<i32: 64>")


@pytest.mark.parametrize(
    "line",
    [
        "%j = llvm.lshr %i, %0 : i32",
        "%j = llvm.udiv %i, %1 : i32",
        "%j = llvm.urem %i, %0 : i32",
        "%j = llvm.and %i, %0 : i32",
        "%j = llvm.udiv %0, %i : i32",
        "llvm.br ^bb1(%i : i32)",
        "%j = llvm.zext %i : i32 to i64",
    ],
)
def test_what_else_is_done_with_the_number_of_a_thread_is_refused(line):
    with pytest.raises(NotImplementedError, match=r"only the lane and the warp are known"):
        widened(f"{TWO_WARPS}    {line} loc(#loc2)\n")


def test_what_is_no_single_kernel_is_refused():
    for text in ("", TWO_WARPS + TWO_WARPS, TWO_WARPS + "  llvm.func @a() {\n"):
        with pytest.raises(NotImplementedError, match="one module"):
            widened(text)


def test_other_targets_than_that_for_wide_warps_are_refused():
    for capability, warp in ((90, 64), (None, 16)):
        with (
            pytest.raises(ValueError, match="nothing is compiled"),
            emulated(capability, warp=warp),
        ):
            pass


@pytest.mark.parametrize(
    ("shuffle", "expected"),
    [
        ("shfl.sync.bfly.b32 %r1, %r2, 32, 31, -1", [lane ^ 32 for lane in range(64)] * 2),
        ("shfl.sync.bfly.b32 %r1, %r2, 1, 31, -1", [lane ^ 1 for lane in range(64)] * 2),
        ("shfl.sync.idx.b32 %r1, %r2, 37, 31, -1", [37] * 128),
    ],
)
def test_a_shuffle_reaches_all_lanes_of_its_warp(shuffle, expected):
    lines = ["mov.u32 %r2, %tid.x", "and.b32 %r2, %r2, 63", shuffle, "mov.u32 %r2, %tid.x"]
    lines += ["shl.b32 %r2, %r2, 2", "cvt.u64.u32 %rd2, %r2", "add.s64 %rd2, %rd1, %rd2"]
    program = program_of(*lines, "st.global.b32 [%rd2], %r1")._replace(threads=128, warp=64)
    memory = torch.full((128,), -1, dtype=torch.int32)
    machine.launch(program, 1, [memory.data_ptr()], 0, resident=1)
    assert memory.tolist() == expected


@pytest.mark.parametrize(
    ("text", "threads"),
    [
        ("redux.sync.max.s32 %r1, %r2, -1", 64),
        ("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r0}, [%r1]", 64),
        ("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r1], {%r0}", 64),
        ("bar.warp.sync -1", 128),
    ],
)
def test_an_instruction_that_is_known_for_32_threads_is_refused(text, threads):
    memory = torch.zeros(1, dtype=torch.int64)
    program = program_of(text)._replace(threads=threads, warp=64)
    with pytest.raises(NotImplementedError, match=re.escape(text)):
        machine.launch(program, 1, [memory.data_ptr()], 0, resident=1)
