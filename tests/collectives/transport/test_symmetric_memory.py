"""Symmetric memory: negotiation without a message, buffers, rows and barriers."""

from __future__ import annotations

import mmap
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from collectives import CollectiveTimeoutError
from collectives.transport import HostTransport, futex
from collectives.transport.symmetric_memory import (
    SymmetricMemory,
    symmetric_memory_bytes,
)
from tests.collectives.transport.thread_ranks import TIMEOUT, both, connect, together


def transports(kind: str, size: int) -> list[Any]:
    return connect(size, kind)


def memory_of(transport: HostTransport) -> SymmetricMemory:
    assert transport.symmetric_memory is not None
    return transport.symmetric_memory


@both
@pytest.mark.parametrize("futexes", [True, False])
def test_wait_returns_when_the_last_rank_has_signalled(
    kind: str, futexes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futex, "available", futexes and futex.available)
    ranks = transports(kind, 3)
    arrived: list[int] = []
    met: list[int] = []

    def run(transport: Any) -> None:
        for call in range(300):
            if transport.rank == call % 3:
                if call < 9:
                    time.sleep(0.03)
                arrived.append(call)
            memory_of(transport).signal(call + 1)
            memory_of(transport).wait("a step", TIMEOUT)
            # The late rank of this call wrote before it entered, and none is a call further.
            assert len(arrived) in (call + 1, call + 2)
            if call < 9:
                # Each rank is the late one at a barrier, too.
                time.sleep(0.03 * (transport.rank == (call + 1) % 3))
                met.append(call)
                memory_of(transport).barrier("a step", TIMEOUT)
                assert met.count(call) == 3

    together(*(lambda t=t: run(t) for t in ranks))


@both
def test_gather_row_returns_every_ranks_row(kind: str) -> None:
    """Each time as all give them, also where one is late."""
    ranks = transports(kind, 3)
    tables = [torch.rand(3, 15, dtype=torch.float64).numpy() for _ in range(60)]

    def run(transport: Any) -> None:
        memory = memory_of(transport)
        memory.signal(1)
        memory.wait("a step", TIMEOUT)
        for call, table in enumerate(tables):
            if call % 3 == transport.rank and call < 9:
                time.sleep(0.01)
            numel = 1 + call % 15
            got = memory.gather_row(table[transport.rank, :numel], "a step", TIMEOUT)
            assert (got == table[:, :numel]).all(), call

    together(*(lambda t=t: run(t) for t in ranks))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the pages stay")
@both
def test_buffer_beyond_32_mib_is_released_when_a_smaller_call_follows(kind: str) -> None:
    """Which leaves zeros; in a run of large calls it stays, as what is below does always."""
    ranks = transports(kind, 2)
    memories, kept, large = [memory_of(rank) for rank in ranks], 32 << 20, 33 << 20

    def last_bytes(nbytes: int) -> list[int]:
        """Make a call; return each buffer's byte below the bound, and its last one above it."""
        for memory in memories:
            if nbytes:
                memory.next_buffer(nbytes, torch.uint8).fill_(7)
        for memory in memories:
            memory.signal(1)
        for memory in memories:
            memory.wait("a step", TIMEOUT)
        whole = memories[0]._buffers
        # Both ranks do alike.
        assert torch.equal(whole[:, 0, : 34 << 20], whole[:, 1, : 34 << 20])
        return whole[:, 0, [kept - 1, large - 1]].flatten().tolist()

    sizes = (large, large, large, large, 9, large, 9, 0)
    assert [last_bytes(nbytes) for nbytes in sizes] == [
        # In the second buffer first, as calls take turns.
        [0, 0, 7, 7],
        *[[7, 7, 7, 7]] * 3,
        [7, 0, 7, 7],
        [7, 7, 7, 7],
        # A small call's own buffer is released by the next.
        [7, 0, 7, 7],
        [7, 0, 7, 0],
    ]


@both
def test_wait_for_a_rank_that_has_ended_raises_at_once(kind: str) -> None:
    first, second, third = transports(kind, 3)
    start = time.monotonic()
    memory_of(first).signal(1)
    memory_of(second).signal(1)
    third.close()
    with pytest.raises(
        CollectiveTimeoutError, match=r"rank 0 .* rank 2 in a step: rank 2 has ended"
    ):
        memory_of(first).wait("a step", TIMEOUT)
    # Its own waiting peer is told the cause.
    with pytest.raises(CollectiveTimeoutError, match=r"rank 1 .* in a step: .*rank 2 has ended"):
        memory_of(second).wait("a step", TIMEOUT)
    assert time.monotonic() - start < 2.0


@both
def test_wait_for_a_rank_that_ended_after_its_signal_returns(kind: str) -> None:
    first, second = transports(kind, 2)
    for transport in (second, first):
        memory_of(transport).signal(1)
    second.close()
    memory_of(first).wait("a step", TIMEOUT)


def test_signals_of_255_calls_ago_are_not_taken_for_todays() -> None:
    """What is left in a row from 255 calls ago is not taken for this call's."""

    class Nobody:
        def gone(self) -> None:
            return None

        def why_gone(self, peer: int) -> str:
            raise AssertionError

        abort: Callable[[str], None]

    memory = memoryview(mmap.mmap(-1, symmetric_memory_bytes(2)))
    first, second = (SymmetricMemory(memory, r, 2, Nobody(), cores=[0]) for r in range(2))
    for call in range(1000):
        first.signal(1 + call % 2)
        assert not first.all_signalled(), call
        second.signal(1 + call % 2)
        assert first.all_signalled() and second.all_signalled()
