"""The emulator of compiled kernels: that it computes as a GPU does, and finds what it looks for."""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

import kernels  # noqa: E402
from tests.ptx_emulator import driver, machine  # noqa: E402
from tests.ptx_emulator.arithmetic import operation  # noqa: E402
from tests.ptx_emulator.machine import HangError  # noqa: E402
from tests.ptx_emulator.memory import AccessError  # noqa: E402
from tests.ptx_emulator.parse import Immediate, Register, Vector, parse  # noqa: E402
from tests.ptx_emulator.races import RaceError  # noqa: E402

SIZE = 256


def run(opcode: str, *operands: np.ndarray) -> np.ndarray:
    return operation(tuple(opcode.split(".")), len(operands)).compute(*operands)


def nearest(exact: Fraction, dtype: type[np.floating]) -> np.floating:
    """`exact` rounded once, to nearest even."""
    guess = dtype(float(exact))
    around = [np.nextafter(guess, dtype(-np.inf)), guess, np.nextafter(guess, dtype(np.inf))]
    bits = {x: int(x.view(f"u{x.itemsize}")) for x in around}
    return min(around, key=lambda x: (abs(Fraction(float(x)) - exact), bits[x] & 1))


@pytest.mark.parametrize(("kind", "dtype"), [("f32", np.float32), ("f64", np.float64)])
def test_fma_rounds_once(kind, dtype):
    random = np.random.default_rng(1)
    digits = np.finfo(dtype).nmant
    a, b = (1 + random.integers(0, 2**20, 2000) / 2**20 for _ in range(2))
    # Addends that leave the sum near the middle between two results, where rounding twice shows.
    c = random.choice([-1.0, 1.0], 2000) * 2.0 ** random.integers(-digits - 4, digits + 4, 2000)
    a, b, c = (x.astype(dtype) for x in (a, b, c))
    got = run(f"fma.rn.{kind}", a, b, c)
    for x, y, z, result in zip(a, b, c, got, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        assert result == nearest(exact, dtype), (x, y, z)


def test_conversions_round_as_torch_does():
    bits = np.random.default_rng(2).integers(0, 2**32, 200_000, dtype=np.uint32)
    values = bits.view(np.float32)
    wide = torch.from_numpy(values)
    with np.errstate(all="ignore"):
        half = run("cvt.rn.f16.f32", values)
        both = run("cvt.rn.bf16x2.f32", values, values[::-1])
    brain = wide.to(torch.bfloat16)
    numbers = ~np.isnan(values)
    expected = brain.view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(half[numbers], wide.to(torch.float16).numpy()[numbers])
    assert np.array_equal((both >> 16).astype(np.uint16)[numbers], expected[numbers])
    assert np.array_equal(both.astype(np.uint16)[numbers[::-1]], expected[::-1][numbers[::-1]])
    assert (both[~numbers] >> 16 == 0x7FFF).all()
    back = run("cvt.f32.bf16", expected[numbers])
    assert np.array_equal(back, brain.float().numpy()[numbers])


@pytest.mark.parametrize(
    ("opcode", "operands", "result"),
    [
        ("shl.b32", (np.uint32(3), np.uint32(33)), 0),
        ("shr.u32", (np.uint32(0x80000000), np.uint32(31)), 1),
        ("shr.s32", (np.int32(-8), np.uint32(40)), -1),
        ("div.s32", (np.int32(-7), np.int32(2)), -3),
        ("div.s32", (np.int32(-(2**31)), np.int32(3)), -715827882),
        ("rem.s64", (np.int64(-7), np.int64(2)), -1),
        ("prmt.b32", (np.uint32(0x33221100), np.uint32(0x77665544), np.uint32(0x5410)), 0x55441100),
        ("bfe.u32", (np.uint32(0xABCD), np.uint32(4), np.uint32(8)), 0xBC),
        ("bfe.u32", (np.uint32(0xABCD), np.uint32(0x104), np.uint32(0x108)), 0xBC),
        ("bfe.u32", (np.uint32(0xABCD), np.uint32(4), np.uint32(200)), 0xABC),
        ("mul.wide.s32", (np.int32(-(2**31)), np.int32(2)), -(2**32)),
        ("mad.wide.u32", (np.uint32(2**32 - 1), np.uint32(2), np.uint64(1)), 2**33 - 1),
        ("cvt.s64.s32", (np.int32(-5),), -5),
        ("cvt.u16.u32", (np.uint32(0x12345),), 0x2345),
        ("max.f32", (np.float32(np.nan), np.float32(1)), 1),
        ("setp.lt.f32", (np.float32(np.nan), np.float32(1)), False),
        ("setp.neu.f32", (np.float32(np.nan), np.float32(1)), True),
    ],
)
def test_operations(opcode, operands, result):
    assert run(opcode, *map(np.atleast_1d, operands)).item() == result


def test_nan_has_one_form():
    other = np.array([0xFFC00001], np.uint32).view(np.float32)
    for opcode in ("add.f32", "max.f32"):
        assert run(opcode, other, other).view(np.uint32).item() == 0x7FFFFFFF


def test_minus_zero_is_below_zero():
    # Of many, since numpy's answer for one depends on its place in the array.
    plus, minus = np.full(9, np.float32(0)), np.full(9, np.float32(-0.0))
    for pair in ((plus, minus), (minus, plus)):
        assert not np.signbit(run("max.f32", *pair)).any()
        assert np.signbit(run("min.f32", *pair)).all()


def test_what_has_no_meaning_is_refused():
    with pytest.raises(NotImplementedError, match=r"add\.ftz\.f32"):
        operation(("add", "ftz", "f32"), 2)
    with pytest.raises(NotImplementedError, match="cvt with"):
        operation(("cvt", "rzi", "s32", "f32"), 1)
    for opcode in ("setp.lt.bf16", "mul.hi.u32"):
        with pytest.raises(NotImplementedError, match=opcode.replace(".", r"\.")):
            operation(tuple(opcode.split(".")), 2)


def test_parse():
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
    (_, jump), (move,), (store, _), _ = program.blocks
    assert jump.guard == (Register("p", 1), False)
    assert move.operands[1] == Immediate(0x3FF0000000000000)
    place, values = store.operands
    assert place.offset == -8
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
    """Says that any address is a multiple of 16."""
    i = tl.arange(0, BLOCK)
    address = x.to(tl.int64) + 16 * tl.program_id(0)
    aligned = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)
    tl.store(out + i, tl.load(aligned + i))


@triton.jit
def _total_kernel(x, parts, arrivals, out, ORDER: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of blocks, and their sum by the last block to arrive."""
    program = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    tl.store(parts + program, tl.sum(tl.load(x + program * BLOCK + i), axis=0))
    tl.debug_barrier()
    if tl.atomic_add(arrivals, 1, sem=ORDER) == tl.num_programs(0) - 1:
        tl.store(out, tl.sum(tl.load(parts + i, mask=i < tl.num_programs(0), other=0.0), axis=0))


@triton.jit
def _meeting_kernel(arrivals, out):
    """Every block waits for all others."""
    seen = tl.atomic_add(arrivals, 1, sem="acq_rel") + 1
    while seen < tl.num_programs(0):
        seen = tl.atomic_add(arrivals, 0, sem="acquire")
    tl.store(out + tl.program_id(0), seen)


@triton.jit
def _claim_kernel(out):
    tl.store(out, tl.program_id(0))


@triton.jit
def _claim_and_look_kernel(out, seen):
    tl.store(out + tl.program_id(0), 1)
    tl.store(seen + tl.program_id(0), tl.load(out + 1 - tl.program_id(0)))


@pytest.fixture
def emulator():
    with driver.emulated(traffic=True) as emulator:
        yield emulator


def test_a_kernel_runs_and_is_counted(emulator):
    x, out = torch.randn(SIZE), torch.full((SIZE,), torch.nan)
    _copy_kernel[(2,)](x, out, SIZE, STEP=1, BLOCK=SIZE // 2)
    assert torch.equal(out, x)
    (launched,) = emulator.launches
    assert (launched.name, launched.grid) == ("_copy_kernel", 2)
    traffic = launched.traffic
    assert traffic.load_sectors.total() == traffic.store_sectors.total() == SIZE * 4 // 32
    assert traffic.distinct_loaded == traffic.distinct_stored == SIZE * 4


def test_gaps_between_threads_cost_sectors(emulator):
    x, out = torch.randn(8 * SIZE), torch.full((SIZE,), torch.nan)
    _copy_kernel[(1,)](x, out, SIZE, STEP=8, BLOCK=SIZE, num_warps=4)
    assert torch.equal(out, x[::8])
    traffic = emulator.launches[0].traffic
    # A sector for every element of 4 bytes.
    assert traffic.loads == Counter({4: SIZE // 32})
    assert traffic.load_sectors == Counter({4: SIZE})
    assert traffic.distinct_loaded == 32 * SIZE


def test_stray_accesses_are_found(emulator):
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


def test_misaligned_accesses_are_found(emulator):
    x, out = torch.randn(SIZE + 1)[1:], torch.empty(SIZE)
    with pytest.raises(AccessError, match="misaligned"):
        _careless_kernel[(1,)](x, out, BLOCK=SIZE)


@pytest.mark.parametrize("seed", range(4))
def test_what_barriers_and_atomics_order_is_no_race(seed):
    with driver.emulated(seed=seed):
        x, parts = torch.randint(9, (8 * SIZE,)).float(), torch.full((8,), torch.nan)
        arrivals, out = torch.zeros(1, dtype=torch.int64), torch.full((1,), torch.nan)
        _total_kernel[(8,)](x, parts, arrivals, out, ORDER="acq_rel", BLOCK=SIZE)
    assert out.item() == x.sum().item()


@pytest.mark.parametrize("order", ["relaxed", "acquire", "release"])
def test_races_between_blocks_are_found(emulator, order):
    x, parts, out = torch.randn(8 * SIZE), torch.empty(8), torch.empty(1)
    arrivals = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(RaceError, match="nothing orders the two"):
        _total_kernel[(8,)](x, parts, arrivals, out, ORDER=order, BLOCK=SIZE)


def test_two_stores_of_different_values_race(emulator):
    out = torch.zeros(1, dtype=torch.int32)
    with pytest.raises((RaceError, AccessError), match="store"):
        _claim_kernel[(2,)](out)


def test_a_load_before_a_store_races(emulator):
    with pytest.raises(RaceError, match="nothing orders the two"):
        _claim_and_look_kernel[(2,)](torch.zeros(2, dtype=torch.int32), torch.zeros(2).int())


def test_races_within_a_block_are_found():
    """What shared memory passes between warps, without its barriers."""
    with driver.emulated():
        found = 0
        for seed in range(4):
            program, shared = reduction()
            stripped = program._replace(
                blocks=tuple(
                    tuple(i for i in block if i.parts[0] != "bar") for block in program.blocks
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


def test_blocks_that_wait_for_each_other_need_to_be_resident(monkeypatch):
    out = torch.zeros(4, dtype=torch.int64)
    for seed in range(4):
        with driver.emulated(resident=4, seed=seed):
            _meeting_kernel[(4,)](torch.zeros(1, dtype=torch.int64), out.zero_())
        assert out.tolist() == [4] * 4
    monkeypatch.setattr(machine, "_PATIENCE", 200)
    with (
        driver.emulated(resident=3),
        pytest.raises(HangError, match="_meeting_kernel: no end after 600 runs"),
    ):
        _meeting_kernel[(4,)](torch.zeros(1, dtype=torch.int64), out)


def test_a_barrier_that_some_threads_miss_is_a_hang():
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
    with pytest.raises(HangError, match="wait at a barrier for others that have left"):
        machine.launch(program, 1, [], 0, resident=1)


def test_the_order_of_blocks_follows_the_seed():
    def orders(seed: int) -> list[float]:
        x = torch.arange(8.0)
        with driver.emulated(seed=seed, resident=1, races=False):
            out = torch.zeros(1, dtype=torch.int32)
            last = []
            for _ in x:
                _claim_kernel[(8,)](out)
                last.append(out.item())
        return last

    assert orders(1) == orders(1)
    assert len(set(map(tuple, itertools.starmap(orders, [(1,), (2,), (3,)])))) == 3


def test_the_cpu_path_is_back_afterwards(monkeypatch):
    x = torch.randn(9)
    with driver.emulated() as emulator:
        kernels.sum_n([x, x])
    kernels.sum_n([x, x])
    assert [launched.name for launched in emulator.launches] == ["_sum_kernel"]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="unset TRITON_INTERPRET"), driver.emulated():
        pass


def test_one_emulator_within_another():
    x = torch.randn(9)
    with driver.emulated() as outer:
        with driver.emulated() as inner:
            kernels.sum_n([x, x])
        kernels.scaled_add(x, x)
    assert [launched.name for launched in inner.launches] == ["_sum_kernel"]
    assert [launched.name for launched in outer.launches] == ["_scaled_add_kernel"]
