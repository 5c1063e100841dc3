"""Launches of several ranks at once: what orders their accesses, who is late, and hangs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from tests.ptx_emulator import streams  # noqa: E402
from tests.ptx_emulator.driver import Emulator, emulated  # noqa: E402
from tests.ptx_emulator.machine import HangError  # noqa: E402
from tests.ptx_emulator.races import RaceError  # noqa: E402

BLOCK = 64


@triton.jit
def _hand_over_kernel(
    mine,
    theirs,
    my_flag,
    their_flag,
    out,
    RELEASE: tl.constexpr,
    ACQUIRE: tl.constexpr,
    SCOPE: tl.constexpr,
    WAIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each rank stores a program's numbers, raises the peer's flag, and reads those of the peer."""
    program = tl.program_id(0)
    i = program * BLOCK + tl.arange(0, BLOCK)
    tl.store(mine + i, tl.load(mine + i) + 1)
    tl.debug_barrier()
    tl.atomic_add(their_flag + program, 1, sem=RELEASE, scope=SCOPE)
    if WAIT:
        while tl.atomic_add(my_flag + program, 0, sem=ACQUIRE, scope=SCOPE) < 1:
            pass
    tl.store(out + i, tl.load(theirs + i))


def hand_over(
    emulator: Emulator,
    release: str = "release",
    acquire: str = "acquire",
    scope: str = "sys",
    *,
    wait: bool = True,
    delays: tuple[int, ...] = (),
    ranks: int = 2,
    nodes: tuple[int, int] = (0, 0),
) -> tuple[list[Tensor], list[Tensor]]:
    """Run two ranks, of which the first `ranks` come; return what each held, and what it read."""
    held = [torch.randn(2 * BLOCK) for _ in range(2)]
    flags = [torch.zeros(2, dtype=torch.int64) for _ in range(2)]
    read = [torch.full((2 * BLOCK,), torch.nan) for _ in range(2)]
    with emulator.together(delays):
        for rank in range(ranks):
            emulator.rank, emulator.node = rank, nodes[rank]
            _hand_over_kernel[(2,)](
                held[rank], held[1 - rank], flags[rank], flags[1 - rank], read[rank],
                RELEASE=release, ACQUIRE=acquire, SCOPE=scope, WAIT=wait, BLOCK=BLOCK,
                num_warps=2,
            )  # fmt: skip
    return held, read


@pytest.mark.parametrize("delays", [(), (0, 300), (300, 0)])
def test_flag_that_is_released_and_acquired_orders_ranks(delays):
    with emulated() as emulator:
        for _ in range(5):
            held, read = hand_over(emulator, delays=delays)
            assert torch.equal(read[0], held[1])
            assert torch.equal(read[1], held[0])


@pytest.mark.parametrize(
    "fault",
    [
        {"release": "relaxed"},
        {"acquire": "relaxed"},
        {"scope": "gpu"},
        {"wait": False},
    ],
    ids=lambda fault: "_".join(map(str, fault)),
)
def test_hand_over_that_lacks_one_part_of_it_races_in_every_order(fault):
    found = r"thread \d+ of rank \d.*thread \d+ of rank \d"
    with emulated() as emulator:
        for _ in range(5):
            with pytest.raises(RaceError, match=found):
                hand_over(emulator, **fault)


def test_ranks_of_two_nodes_that_share_memory_race_whatever_they_signal():
    with emulated() as emulator, pytest.raises(RaceError, match="nothing orders the two"):
        hand_over(emulator, nodes=(0, 1))


def test_rank_that_never_comes_hangs_the_other_which_says_where_it_stands(monkeypatch):
    monkeypatch.setattr(streams, "_MAX_STEPS", 200)
    with (
        emulated() as emulator,
        pytest.raises(HangError, match=r"400 basic blocks: rank 0, programs 0.* before") as found,
    ):
        hand_over(emulator, ranks=1)
    assert "rank 1" not in str(found.value)


@triton.jit
def _add_kernel(counter, SCOPE: tl.constexpr):
    tl.atomic_add(counter, 1, sem="relaxed", scope=SCOPE)


def test_atomic_for_one_gpu_is_none_beside_another_ranks():
    counter = torch.zeros(1, dtype=torch.int64)
    for first, second in (("gpu", "sys"), ("sys", "gpu")):
        with (  # noqa: PT012 - the launches run when the inner context ends
            emulated() as emulator,
            pytest.raises(RaceError, match="in the scope of a GPU"),
            emulator.together(),
        ):
            _add_kernel[(1,)](counter, SCOPE=first)
            emulator.rank = 1
            _add_kernel[(1,)](counter, SCOPE=second)
    for ranks, scope in ((2, "sys"), (1, "gpu")):
        with emulated() as emulator, emulator.together():
            for emulator.rank in range(ranks):
                _add_kernel[(2,)](counter.zero_(), SCOPE=scope)
        assert counter.item() == 2 * ranks


@triton.jit
def _bounded_wait_kernel(flag, clock, out, limit: tl.int64):
    """Give a flag up after so many nanoseconds, of which all threads learn by memory."""
    start = tl.extra.cuda.globaltimer()
    tl.atomic_max(clock, start, sem="relaxed")
    begun = tl.atomic_add(clock, 0, sem="relaxed")
    now = begun
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    while (seen < 1) & (now - begun < limit):
        tl.atomic_max(clock, tl.extra.cuda.globaltimer(), sem="relaxed")
        now = tl.atomic_add(clock, 0, sem="relaxed")
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    tl.store(out, seen)


def test_timer_ends_a_wait_that_nobody_else_does():
    flag, clock = (torch.zeros(1, dtype=torch.int64) for _ in range(2))
    for delay, expected in ((0, 1), (100, 1), (20_000, 0)):
        out = torch.full((1,), -1, dtype=torch.int64)
        with emulated(seed=delay) as emulator, emulator.together((0, delay)):
            _bounded_wait_kernel[(1,)](flag.zero_(), clock, out, 3_000)
            emulator.rank = 1
            _add_kernel[(1,)](flag, SCOPE="sys")
        assert out.item() == expected
