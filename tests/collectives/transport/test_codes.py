"""Codes of calls in the headers of messages: ranks that differ find out, flush, and go on."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from collectives import CollectiveTimeoutError
from collectives.transport import ConnectionTransport
from collectives.transport.base import call_code
from collectives.transport.connections.shm import INLINE_BYTES, RING_BYTES, SLOT_BYTES
from collectives.transport.shared_memory.symmetric_memory import RanksDiffer
from tests.collectives.transport.thread_ranks import (
    TIMEOUT,
    both,
    connect,
    exchange,
    noise,
    poisoned,
    together,
)

# More than the ring or the kernel holds.
LONG = 64 * 2**20
LENGTHS = (1, INLINE_BYTES, INLINE_BYTES + 1, SLOT_BYTES + 7, 2 * RING_BYTES + 5)


def swap(transport: ConnectionTransport, length: int, code: int, seed: int = 0) -> None:
    """Messages between all pairs, which must arrive."""
    peers = sorted(transport.connected_peers)
    got = {peer: poisoned(length) for peer in peers}
    sent = noise(length, seed + transport.rank)
    sends = [(peer, sent) for peer in peers]
    exchange(transport, sends, list(got.items()), code=code)
    for peer, tensor in got.items():
        assert torch.equal(tensor, noise(length, seed + peer))


def around(transport: ConnectionTransport, length: int, code: int) -> torch.Tensor:
    """A ring's step to the next rank and from the one before; what came."""
    rank, size = transport.rank, transport.size
    got = poisoned(length)
    sends = [((rank + 1) % size, noise(length, rank))]
    exchange(transport, sends, [((rank - 1) % size, got)], code=code)
    return got


def differ(transport: ConnectionTransport, length: int, code: int) -> None:
    """A ring of which one rank is in another call: all steps of a call, until that is found out."""

    def steps() -> None:
        for _ in range(transport.size):
            around(transport, length, code)

    with pytest.raises(RanksDiffer):
        steps()
    transport.flush("a flush", TIMEOUT)


@both
@pytest.mark.parametrize("length", LENGTHS)
def test_messages_of_one_code_arrive(kind: str, length: int) -> None:
    transports = connect(3, kinds=(kind,))
    assert all(transport.carries_codes for transport in transports)
    together(*(lambda t=t: swap(t, length, 2**64 - 1) for t in transports))


@both
@pytest.mark.parametrize("length", LENGTHS)
def test_a_message_of_another_code_writes_nothing(kind: str, length: int) -> None:
    first, second = connect(2, kinds=(kind,))

    def receive(transport: ConnectionTransport) -> None:
        got = poisoned(length)
        sends = [(1 - transport.rank, noise(length, transport.rank))]
        with pytest.raises(RanksDiffer):
            exchange(transport, sends, [(1 - transport.rank, got)], code=5 + transport.rank)
        assert torch.equal(got, poisoned(length))
        transport.flush("a flush", TIMEOUT)
        swap(transport, length, 7, seed=9)

    together(lambda: receive(first), lambda: receive(second))


@both
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("length", [1, SLOT_BYTES + 7])
def test_all_ranks_find_out_and_go_on(kind: str, size: int, length: int) -> None:
    """Also those whose neighbours are in the same call, with one code or none on the odd rank."""
    transports = connect(size, kinds=(kind,))

    def run(transport: ConnectionTransport) -> None:
        for number, odd in enumerate((7, 0)):
            what = odd if transport.rank == size - 1 else 5
            differ(transport, length, call_code(2 * number, what))
            swap(transport, length, call_code(2 * number + 1, 1), seed=number)

    together(*(lambda t=t: run(t) for t in transports))


@both
def test_a_message_that_is_half_sent_is_dropped(kind: str) -> None:
    """Rank 1 takes nothing of a long message before it knows that the calls differ."""
    transports = connect(3, kinds=(kind,))

    def run(transport: ConnectionTransport) -> None:
        sends = {0: [(1, noise(LONG, 0))], 1: [], 2: [(0, noise(3, 2))]}[transport.rank]
        recvs = {0: [(2, poisoned(3))], 1: [(2, poisoned(3))], 2: []}[transport.rank]

        def steps() -> None:
            exchange(transport, sends, recvs, code=transport.rank)
            # Of rank 2, whose message the others take for one of another call.
            exchange(transport, [], [(1, poisoned(3))], code=transport.rank)

        with pytest.raises(RanksDiffer):
            steps()
        transport.flush("a flush", TIMEOUT)
        swap(transport, SLOT_BYTES + 7, 3)

    together(*(lambda t=t: run(t) for t in transports))


@both
@pytest.mark.parametrize("other", [0, 6])
def test_ranks_that_wait_for_each_other_find_out(kind: str, other: int) -> None:
    """Neither has sent anything."""
    transports = connect(2, kinds=(kind,))

    def run(transport: ConnectionTransport) -> None:
        rank = transport.rank
        start = time.monotonic()
        what = (5, other)[rank]
        with pytest.raises(RanksDiffer):
            exchange(transport, [], [(1 - rank, poisoned(4))], code=call_code(7, what))
        assert time.monotonic() - start < TIMEOUT / 4
        transport.flush("a flush", TIMEOUT)
        swap(transport, 5, 1)

    together(*(lambda t=t: run(t) for t in transports))


@both
def test_a_late_rank_of_the_same_call_disturbs_nothing(kind: str) -> None:
    """Those that wait have said which call it is, on all connections, before its messages."""
    transports = connect(3, kinds=(kind,))

    def run(transport: ConnectionTransport) -> None:
        for number, late in enumerate((0, 2, 1)):
            if transport.rank == late:
                time.sleep(0.2)
            swap(transport, 1000, call_code(2 * number, 5), seed=3 * number)
            came = around(transport, 99, call_code(2 * number + 1, 6))
            assert torch.equal(came, noise(99, (transport.rank - 1) % 3))

    together(*(lambda t=t: run(t) for t in transports))


@both
def test_the_last_messages_of_a_rank_that_has_ended_arrive(kind: str) -> None:
    """Also on a rank that has told all peers meanwhile that it waits."""
    first, second, third = connect(3, kinds=(kind,))
    length = 1000
    exchange(first, [(1, noise(length, 1))], [], code=5)
    first.close()

    def receive() -> None:
        got = [poisoned(length), poisoned(length)]
        exchange(second, [], [(2, got[1])], code=5)
        time.sleep(0.1)
        exchange(second, [], [(0, got[0])], code=5)
        assert torch.equal(got[0], noise(length, 1)) and torch.equal(got[1], noise(length, 2))

    def late() -> None:
        time.sleep(0.2)
        exchange(third, [(1, noise(length, 2))], [], code=5)

    together(receive, late)


@both
def test_a_rank_that_ends_before_it_flushes_is_named(kind: str) -> None:
    first, second = connect(2, kinds=(kind,))
    exchange(second, [(0, noise(4, 0))], [], code=6)
    with pytest.raises(RanksDiffer):
        exchange(first, [], [(1, poisoned(4))], code=5)
    second.close()
    with pytest.raises(CollectiveTimeoutError, match="from rank 1 in a flush: rank 1 has ended"):
        first.flush("a flush", TIMEOUT)


@both
def test_a_rank_that_does_not_flush_is_named(kind: str) -> None:
    first, second, third = connect(3, kinds=(kind,))
    exchange(second, [(0, noise(4, 0))], [], code=6)
    with pytest.raises(RanksDiffer):
        exchange(first, [], [(1, poisoned(4))], code=5)
    caught = []

    def flush(transport: ConnectionTransport) -> None:
        with pytest.raises(CollectiveTimeoutError) as error:
            transport.flush("a flush", 0.2)
        caught.append(str(error.value))

    together(lambda: flush(first), lambda: flush(third))
    assert any("from rank 1 in a flush within 0.2 s" in text for text in caught)
    with pytest.raises(RanksDiffer):
        exchange(second, [], [(0, poisoned(4))], code=6)

    def go_on() -> None:
        second.flush("a flush", TIMEOUT)
        # The kernel may have taken the marker.
        exchange(second, [], [(0, poisoned(4))], code=7)

    with pytest.raises(CollectiveTimeoutError, match="from rank 1 in a flush within"):
        go_on()


@both
def test_many_calls_of_which_some_differ(kind: str) -> None:
    """Ranks run ahead of each other by what is under kind; a flush never takes another call's."""
    size = 4
    transports = connect(size, kinds=(kind,))
    plan = random.Random(3)
    calls = [
        (plan.choice((1, 100, INLINE_BYTES + 1, SLOT_BYTES + 7)), plan.random() < 0.3)
        for _ in range(60)
    ]
    odd = [plan.randrange(size) for _ in calls]
    barrier = threading.Barrier(size)

    def run(transport: ConnectionTransport) -> None:
        barrier.wait(TIMEOUT)
        for number, (length, differs) in enumerate(calls):
            if differs:
                what = 6 if transport.rank == odd[number] else 5
                differ(transport, length, call_code(number, what))
            else:
                swap(transport, length, call_code(number, 5), seed=number)

    together(*(lambda t=t: run(t) for t in transports))
