"""Kernels in the emulator: their results, traffic, stray accesses, races and hangs."""

from __future__ import annotations

import contextlib
from collections import Counter

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from tests.ptx_emulator import driver, machine  # noqa: E402
from tests.ptx_emulator.machine import HangError  # noqa: E402
from tests.ptx_emulator.memory import AccessError  # noqa: E402
from tests.ptx_emulator.programs import program_of  # noqa: E402
from tests.ptx_emulator.races import RaceError  # noqa: E402

SIZE = 256


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
def _store_id_kernel(out):
    tl.store(out, tl.program_id(0))


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
    program = program_of(
        """
	mov.u32 	%r1, %tid.x;
	setp.lt.u32 	%p1, %r1, 32;
	@%p1 bra 	$L__BB0_2;
	bar.sync 	0;
$L__BB0_2:""",
        threads=64,
    )
    with pytest.raises(HangError, match="wait at a barrier for others that have exited"):
        machine.launch(program, 1, [0], 0, resident=1)
