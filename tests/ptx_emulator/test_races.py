"""Races of a store with one of several loads, and of loads and stores with atomics."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.ptx_emulator import machine
from tests.ptx_emulator.parse import Program
from tests.ptx_emulator.programs import program_of
from tests.ptx_emulator.races import RaceError


def program(body: str, threads: int = 64) -> Program:
    return program_of(f"mov.u32 %r1, %tid.x;\nmov.u32 %r3, %ctaid.x;\n{body}", threads)


def launch(body: str, blocks: int = 1) -> None:
    for seed in range(8):
        memory = torch.full((8,), 7, dtype=torch.int64)
        machine.launch(program(body), blocks, [memory.data_ptr()], 16, resident=blocks, seed=seed)


@pytest.mark.parametrize("writer", [0, 31, 40, 63])
def test_store_to_what_all_threads_load_races_whichever_thread_stores(writer):
    body = """
	ld.shared.b32 	%r2, [global_smem];
	setp.eq.b32 	%p1, %r1, {};
	{}
	@%p1 st.shared.b32 	[global_smem], %r1;"""
    with pytest.raises(RaceError, match="has loaded, and nothing orders the two"):
        launch(body.format(writer, ""))
    launch(body.format(writer, "bar.sync 0;"))


def test_barrier_of_one_warp_orders_a_block_that_is_one():
    body = """
	ld.shared.b32 	%r2, [global_smem];
	bar.warp.sync 	-1;
	setp.eq.b32 	%p1, %r1, 9;
	@%p1 st.shared.b32 	[global_smem], %r1;"""
    memory = torch.zeros(8, dtype=torch.int64)
    machine.launch(program(body, 32), 1, [memory.data_ptr()], 16, resident=1)
    with pytest.raises(NotImplementedError, match="only a block of one warp"):
        launch(body)


def test_store_by_the_second_of_two_loading_threads_races_with_the_first():
    body = """
	setp.eq.b32 	%p1, %r1, 5;
	@%p1 ld.shared.b32 	%r2, [global_smem];
	setp.eq.b32 	%p1, %r1, 40;
	@%p1 ld.shared.b32 	%r2, [global_smem];
	@%p1 st.shared.b32 	[global_smem], %r1;"""
    with pytest.raises(RaceError, match="thread 40 where thread 5 has loaded"):
        launch(body)


ADD = "@%p1 atom.global.gpu.{}add.u64 	%rd2, [%rd1], 1;"
FIRST = """
	setp.eq.b32 	%p1, %r1, 0;
	setp.eq.b32 	%p2, %r3, 0;
	and.pred 	%p2, %p1, %p2;
"""


@pytest.mark.parametrize(
    "access", ["@%p1 ld.global.b64 	%rd3, [%rd1];", "@%p2 st.global.b64 	[%rd1], 1;"]
)
@pytest.mark.parametrize("first", [True, False])
def test_loads_and_stores_race_with_atomics(access, first):
    add = ADD.format("acq_rel.")
    with pytest.raises(RaceError, match=r"updated atomically|atom\.global"):
        launch(FIRST + "\n".join([access, add] if first else [add, access]), blocks=2)


def test_atomics_do_not_race_with_each_other():
    launch(FIRST + ADD.format(""), blocks=2)
    # Of one block, whose barrier orders the two.
    launch(FIRST + "@%p2 st.global.b64 	[%rd1], 1;\nbar.sync 0;\n" + ADD.format(""))
