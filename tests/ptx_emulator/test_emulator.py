"""Kernels in the emulator: their results, traffic, stray accesses, races and hangs."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

import kernels  # noqa: E402
from tests.ptx_emulator import driver, machine  # noqa: E402
from tests.ptx_emulator.machine import HangError  # noqa: E402
from tests.ptx_emulator.memory import AccessError  # noqa: E402
from tests.ptx_emulator.parse import Immediate, Register, Vector, parse  # noqa: E402
from tests.ptx_emulator.races import RaceError  # noqa: E402

SIZE = 256


def test_parse_of_a_kernel_gives_its_instructions_and_rejects_other_text():
    program = parse("""
.visible .entry a_kernel(
	.param .u64 .ptr .global .align 1 a_kernel_param_0,
	.param .u32 a_kernel_param_1
)
.reqntid 128
{
	.reg .pred 	%p<2>;
	.reg .b64 	%rd<3>;
	ld.param.b64 	%rd1, [a_kernel_param_0];
	@!%p1 bra 	$L__BB0_2; // a comment
	mov.b64 	{_, %r1}, 0d3FF0000000000000;
$L__BB0_2:
	st.global.v2.b32 	[%rd1+-8], {%r1, %r1};
	ret;
}
""")
    assert (program.name, program.threads, program.labels) == ("a_kernel", 128, {"$L__BB0_2": 2})
    assert program.parameters == ("a_kernel_param_0", "a_kernel_param_1")
    assert program.registers == {"p": 2, "rd": 3}
    (_, jump), (move,), (store, _), _ = program.basic_blocks
    assert jump.guard == (Register("p", 1), False)
    assert move.operands[1] == Immediate(0x3FF0000000000000)
    address, values = store.operands
    assert address.offset == -8
    assert values == Vector((Register("r", 1), Register("r", 1)))
    with pytest.raises(ValueError, match="no kernel in this module"):
        parse("")
    with pytest.raises(ValueError, match=r"cannot read 'ld\.param\.b64'"):
        parse(".visible .entry a_kernel(\n)\n.reqntid 32\n{\nld.param.b64\n%rd1, [x];\n}\n")


@triton.jit
def _copy_kernel(x, out, element_count, STEP: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i * STEP, mask=i < element_count), mask=i < element_count)


@triton.jit
def _careless_kernel(x, out, BLOCK: tl.constexpr):
    """Tells the compiler that an address is a multiple of 16, whatever it is."""
    i = tl.arange(0, BLOCK)
    address = x.to(tl.int64) + 16 * tl.program_id(0)
    aligned = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)
    tl.store(out + i, tl.load(aligned + i))


@triton.jit
def _total_kernel(x, parts, arrivals, out, ORDER: tl.constexpr, BLOCK: tl.constexpr):
    """Let each block sum its part, and the last block to arrive sum those."""
    program = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    tl.store(parts + program, tl.sum(tl.load(x + program * BLOCK + i), axis=0))
    tl.debug_barrier()
    if tl.atomic_add(arrivals, 1, sem=ORDER) == tl.num_programs(0) - 1:
        tl.store(out, tl.sum(tl.load(parts + i, mask=i < tl.num_programs(0), other=0.0), axis=0))


@triton.jit
def _grid_barrier_kernel(arrivals, out):
    """Let every block wait for all others."""
    seen = tl.atomic_add(arrivals, 1, sem="acq_rel") + 1
    while seen < tl.num_programs(0):
        seen = tl.atomic_add(arrivals, 0, sem="acquire")
    tl.store(out + tl.program_id(0), seen)


@triton.jit
def _largest_kernel(x, out):
    """Raise the output to each block's element."""
    tl.atomic_max(out, tl.load(x + tl.program_id(0)), sem="relaxed")


@triton.jit
def _climbing_kernel(x, out, seen):
    program = tl.program_id(0)
    tl.store(seen + program, tl.atomic_max(out, tl.load(x + program), sem="relaxed"))


@triton.jit
def _store_id_kernel(out):
    tl.store(out, tl.program_id(0))


@triton.jit
def _store_and_load_kernel(out, seen):
    tl.store(out + tl.program_id(0), 1)
    tl.store(seen + tl.program_id(0), tl.load(out + 1 - tl.program_id(0)))


@pytest.fixture
def emulator():
    with driver.emulated(traffic=True) as emulator:
        yield emulator


def test_kernel_run_gives_its_result_and_traffic(emulator):
    x, out = torch.randn(SIZE), torch.full((SIZE,), torch.nan)
    _copy_kernel[(2,)](x, out, SIZE, STEP=1, BLOCK=SIZE // 2)
    assert torch.equal(out, x)
    (launched,) = emulator.launches
    assert (launched.name, launched.grid) == ("_copy_kernel", 2)
    traffic = launched.traffic
    assert traffic.load_sectors.total() == traffic.store_sectors.total() == SIZE * 4 // 32
    assert traffic.distinct_loaded == traffic.distinct_stored == SIZE * 4


def test_strided_loads_are_counted_as_a_sector_each(emulator):
    x, out = torch.randn(8 * SIZE), torch.full((SIZE,), torch.nan)
    _copy_kernel[(1,)](x, out, SIZE, STEP=8, BLOCK=SIZE, num_warps=4)
    assert torch.equal(out, x[::8])
    traffic = emulator.launches[0].traffic
    # A sector for every element of 4 bytes.
    assert traffic.loads == Counter({4: SIZE // 32})
    assert traffic.load_sectors == Counter({4: SIZE})
    assert traffic.distinct_loaded == 32 * SIZE
    assert traffic.past_l1[4] == SIZE + traffic.store_sectors[4]


@triton.jit
def _broadcast_kernel(x, out, CACHE: tl.constexpr):
    i = tl.program_id(0) * 128 + tl.arange(0, 128)
    tl.store(out + i, tl.load(x, cache_modifier=CACHE))


@pytest.mark.parametrize(("cache", "loads"), [("", 1), (".cg", 4)])
def test_loads_that_l1_answers_do_not_reach_l2(emulator, cache, loads):
    """One number for each of four warps: L2 gives it to each program once, or past L1 to each."""
    x, out = torch.randn(8), torch.full((256,), torch.nan)
    _broadcast_kernel[(2,)](x, out, CACHE=cache, num_warps=4)
    assert (out == x[0]).all()
    traffic = emulator.launches[0].traffic
    assert traffic.load_sectors.total() == 2 * 4
    assert traffic.past_l1.total() == 2 * loads + traffic.store_sectors.total()


def test_access_outside_every_tensor_raises(emulator):
    x, out = torch.randn(SIZE), torch.empty(SIZE)
    with pytest.raises(AccessError, match="outside every tensor"):
        _copy_kernel[(1,)](x, out, SIZE + 1, STEP=1, BLOCK=2 * SIZE)
    del x
    gone = torch.randn(1 << 20)
    address = torch.tensor([gone.data_ptr()])
    del gone
    with pytest.raises(AccessError, match="outside every tensor"):
        _address_kernel[(1,)](address, out)


@triton.jit
def _address_kernel(addresses, out):
    tl.store(out, tl.load(tl.load(addresses).to(tl.pointer_type(tl.float32))))


@triton.jit
def _waiting_kernel(x, out, EARLY: tl.constexpr, MOST: tl.constexpr):
    """Wait for the launch ahead, where EARLY after an access, in programs below MOST."""
    program = tl.program_id(0)
    if EARLY:
        tl.store(out + program, 0.0)
    if program < MOST:
        tl.extra.cuda.gdc_wait()
        tl.store(out + program, tl.load(x + program))


@pytest.mark.parametrize(
    ("early", "most", "found"), [(False, 2, None), (True, 2, "st.global"), (False, 1, "ret")]
)
def test_dependent_launch_that_does_not_wait_first_raises(emulator, early, most, found):
    """An access before the wait, or an exit without it; launched plainly both are right."""
    x, out = torch.randn(2), torch.full((2,), torch.nan)
    _waiting_kernel[(2,)](x, out, EARLY=early, MOST=most)
    assert torch.equal(out[:most], x[:most])
    outcome = pytest.raises(AccessError, match=f"{found}.*before griddepcontrol.wait")
    with outcome if found else contextlib.nullcontext():
        _waiting_kernel[(2,)](x, out, EARLY=early, MOST=most, launch_pdl=True)


def test_misaligned_access_raises(emulator):
    x, out = torch.randn(SIZE + 1)[1:], torch.empty(SIZE)
    with pytest.raises(AccessError, match="misaligned"):
        _careless_kernel[(1,)](x, out, BLOCK=SIZE)


@pytest.mark.parametrize("seed", range(4))
def test_accesses_ordered_by_barriers_and_atomics_do_not_race(seed):
    with driver.emulated(seed=seed):
        x, parts = torch.randint(9, (8 * SIZE,)).float(), torch.full((8,), torch.nan)
        arrivals, out = torch.zeros(1, dtype=torch.int64), torch.full((1,), torch.nan)
        _total_kernel[(8,)](x, parts, arrivals, out, ORDER="acq_rel", BLOCK=SIZE)
    assert out.item() == x.sum().item()


@pytest.mark.parametrize("order", ["relaxed", "acquire", "release"])
def test_blocks_without_acquire_and_release_race(emulator, order):
    x, parts, out = torch.randn(8 * SIZE), torch.empty(8), torch.empty(1)
    arrivals = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(RaceError, match="nothing orders the two"):
        _total_kernel[(8,)](x, parts, arrivals, out, ORDER=order, BLOCK=SIZE)


def test_stores_of_different_values_by_two_blocks_race(emulator):
    out = torch.zeros(1, dtype=torch.int32)
    with pytest.raises((RaceError, AccessError), match="store"):
        _store_id_kernel[(2,)](out)


def test_load_before_another_blocks_store_races(emulator):
    with pytest.raises(RaceError, match="nothing orders the two"):
        _store_and_load_kernel[(2,)](torch.zeros(2, dtype=torch.int32), torch.zeros(2).int())


def test_warps_that_share_memory_without_barriers_race():
    with driver.emulated():
        found = 0
        for seed in range(4):
            program, shared = reduction()
            stripped = program._replace(
                basic_blocks=tuple(
                    tuple(i for i in block if i.opcode != "bar.sync")
                    for block in program.basic_blocks
                )
            )
            x, out = torch.randn(SIZE), torch.empty(1)
            arguments = [x.data_ptr(), out.data_ptr(), 0, 0]
            machine.launch(program, 1, arguments, shared, resident=1, seed=seed)
            assert torch.isclose(out, x.sum(), atol=1e-4)
            try:
                machine.launch(stripped, 1, arguments, shared, resident=1, seed=seed)
            except RaceError:
                found += 1
    assert found == 4


@triton.jit
def _sum_kernel(x, out, BLOCK: tl.constexpr):
    tl.store(out, tl.sum(tl.load(x + tl.arange(0, BLOCK)), axis=0))


def reduction():
    compiled = _sum_kernel.warmup(torch.empty(SIZE), torch.empty(1), BLOCK=SIZE, grid=(1,))
    return parse(compiled.asm["ptx"]), compiled.metadata.shared


def test_grid_barrier_with_a_block_that_is_not_resident_hangs(monkeypatch):
    out = torch.zeros(4, dtype=torch.int64)
    for seed in range(4):
        with driver.emulated(resident=4, seed=seed):
            _grid_barrier_kernel[(4,)](torch.zeros(1, dtype=torch.int64), out.zero_())
        assert out.tolist() == [4] * 4
    monkeypatch.setattr(machine, "_MAX_STEPS", 200)
    with (
        driver.emulated(resident=3),
        pytest.raises(HangError, match="_grid_barrier_kernel: no end after 600 basic blocks"),
    ):
        _grid_barrier_kernel[(4,)](torch.zeros(1, dtype=torch.int64), out)


def test_barrier_that_some_threads_never_reach_hangs():
    program = parse("""
.visible .entry a_kernel(
)
.reqntid 64
{
	.reg .pred 	%p<2>;
	.reg .b32 	%r<2>;
	mov.u32 	%r1, %tid.x;
	setp.lt.u32 	%p1, %r1, 32;
	@%p1 bra 	$L__BB0_2;
	bar.sync 	0;
$L__BB0_2:
	ret;
}
""")
    with pytest.raises(HangError, match="wait at a barrier for others that have exited"):
        machine.launch(program, 1, [], 0, resident=1)


def test_order_of_blocks_follows_the_seed():
    def orders(seed: int) -> list[float]:
        x = torch.arange(8.0)
        with driver.emulated(seed=seed, resident=1, races=False):
            out = torch.zeros(1, dtype=torch.int32)
            last = []
            for _ in x:
                _store_id_kernel[(8,)](out)
                last.append(out.item())
        return last

    assert orders(1) == orders(1)
    assert len(set(map(tuple, itertools.starmap(orders, [(1,), (2,), (3,)])))) == 3


def test_cpu_path_is_used_again_after_emulation(monkeypatch):
    x = torch.randn(9)
    with driver.emulated() as emulator:
        kernels.sum_n([x, x])
    kernels.sum_n([x, x])
    assert [launched.name for launched in emulator.launches] == ["_sum_kernel"]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="unset TRITON_INTERPRET"), driver.emulated():
        pass


def test_emulators_nested_list_their_own_launches():
    x = torch.randn(9)
    with driver.emulated() as outer:
        with driver.emulated() as inner:
            kernels.sum_n([x, x])
        kernels.scaled_add(x, x)
    assert [launched.name for launched in inner.launches] == ["_sum_kernel"]
    assert [launched.name for launched in outer.launches] == ["_scaled_add_kernel"]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_atomic_maximum_of_signed_integers_is_the_largest(emulator, dtype):
    values = torch.tensor([-5, 7, -(2**31), 3, 2**31 - 1, 0, -1]).to(dtype)
    for count in range(1, len(values) + 1):
        out = torch.full((1,), -6, dtype=dtype)
        _largest_kernel[(count,)](values, out)
        assert out.item() == max(-6, *values[:count].tolist())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_atomic_maximum_returns_what_was_there(emulator, dtype):
    """In whatever order programs come: each that raises it sees what the one before has left."""
    values = torch.tensor([-5, 7, -(2**31), 3, 2**31 - 1, 0, -1]).to(dtype)
    out, seen = torch.full((1,), -6, dtype=dtype), torch.empty_like(values)
    _climbing_kernel[(len(values),)](values, out, seen)
    pairs = list(zip(values.tolist(), seen.tolist(), strict=True))
    raised = sorted((value, before) for value, before in pairs if value > before)
    left = [-6, *(value for value, _ in raised)]
    assert [before for _, before in raised] == left[:-1]
    assert out.item() == left[-1] == 2**31 - 1
    assert all(before in left for _, before in pairs)
