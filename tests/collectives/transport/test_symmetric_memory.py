"""The board: agreement without a message, and the way back from messages sent in good faith."""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from collectives import CollectiveTimeoutError
from collectives.transport import LinkTransport, Message, ThreadTransport, ThreadWorld, threads
from collectives.transport.connections.shm import INLINE_BYTES, RING_BYTES
from collectives.transport.shared_memory import futex, symmetric_memory
from collectives.transport.shared_memory.symmetric_memory import (
    JOINED,
    Board,
    RanksDiffer,
    board_bytes,
)
from tests.collectives.transport.neighbours import TIMEOUT, meet, noise, poisoned, together

LENGTHS = (3, INLINE_BYTES + 1, 2 * RING_BYTES)


def transports(kind: str, size: int) -> list[Any]:
    if kind == "threads":
        world = ThreadWorld(size)
        return [world.transport(rank) for rank in range(size)]
    if not hasattr(os, "memfd_create"):
        pytest.skip("shared memory between ranks needs Linux's memfd")
    return meet(size)


def board_of(transport: LinkTransport | ThreadTransport) -> Board:
    assert transport.board is not None
    return transport.board


both = pytest.mark.parametrize("kind", ["threads", "shm"])


@both
def test_all_wait_for_the_last(kind: str) -> None:
    ranks = transports(kind, 3)
    arrived: list[int] = []

    def run(transport: Any) -> None:
        for call in range(300):
            if transport.rank == call % 3:
                arrived.append(call)
            board_of(transport).enter(call + 1)
            board_of(transport).wait("a step", TIMEOUT)
            # The late rank of this call wrote before it entered, and none is a call further.
            assert len(arrived) in (call + 1, call + 2)

    together(*(lambda t=t: run(t) for t in ranks))


@both
@pytest.mark.parametrize("codes", [(1, 1, 2), (2, 1, 1), (1, 2, 3), (JOINED, 1, 1)])
def test_a_difference_is_seen_by_all(kind: str, codes: tuple[int, ...]) -> None:
    """Also by a rank that comes last; the next call starts from nothing."""
    ranks = transports(kind, 3)

    def run(transport: Any) -> None:
        board = board_of(transport)
        for late in range(3):
            if transport.rank == late:
                time.sleep(0.05)
            board.enter(codes[transport.rank])
            with pytest.raises(RanksDiffer):
                board.wait("a step", TIMEOUT)
            board.clear("a step", TIMEOUT)
            board.enter(7)
            board.wait("a step", TIMEOUT)

    together(*(lambda t=t: run(t) for t in ranks))


def test_fences_stand_around_what_a_rank_says_of_its_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the code: x86-64 keeps stores in order, so a run there would not miss one."""
    events: list[str] = []

    class Peers:
        def discard(self) -> None:
            events.append("discard")

    def noted(name: str) -> None:
        method = getattr(Board, name)

        def note(self: Board, *args: Any) -> Any:
            events.append(name)
            return method(self, *args)

        monkeypatch.setattr(Board, name, note)

    alone = Board(memoryview(mmap.mmap(-1, board_bytes(1))), 0, 1, cast(Any, Peers()), cores=[0])
    alone.enter(1)
    for name in ("_fence", "_post", "_until"):
        noted(name)
    alone.clear("a step", TIMEOUT)
    # Those of `_post` itself stand between the word and the look at the others'.
    said = ["_fence", "_post", "_fence", "_until", "_fence"]
    assert events == [*said, "discard", *said]


@both
@pytest.mark.parametrize("length", LENGTHS)
def test_messages_sent_in_good_faith_are_discarded(kind: str, length: int) -> None:
    """The ring full and more to come, a receiver that was sent another length, one that takes none;
    afterwards every byte arrives."""
    ranks = transports(kind, 3)

    def call(transport: Any, *messages: list[Message]) -> None:
        transport.exchange(*messages, "a step", TIMEOUT)
        board_of(transport).wait("a step", TIMEOUT)

    def run(transport: Any) -> None:
        board, me = board_of(transport), transport.rank
        peers = [peer for peer in range(3) if peer != me]
        for turn in range(3):
            # Rank 2 is in another call, and late.
            if me == 2:
                time.sleep(0.05)
            board.enter(1 + (me == 2))
            board.watched = True
            mine = length if me < 2 else 5
            sends = [Message(peer, noise(mine, 0)) for peer in peers for _ in range(2)]
            recvs = [Message(peer, poisoned(mine)) for peer in peers]
            if me == 1 and turn == 2:
                sends = []
            with pytest.raises(RanksDiffer):
                call(transport, sends, recvs)
            board.watched = False
            board.clear("a step", TIMEOUT)
            for size in (4, length, RING_BYTES + 5):
                recvs = [Message(peer, poisoned(size)) for peer in peers]
                sends = [Message(peer, noise(size, 10 * me + peer)) for peer in peers]
                transport.exchange(sends, recvs, "another step", TIMEOUT)
                for peer, got in recvs:
                    assert torch.equal(got, noise(size, 10 * peer + me))

    together(*(lambda t=t: run(t) for t in ranks))


@both
def test_rows_are_gathered_by_place(kind: str) -> None:
    """Each time as all give them, also where one is late or gives none."""
    ranks = transports(kind, 3)
    tables = [torch.rand(3, 15, dtype=torch.float64).numpy() for _ in range(60)]

    def run(transport: Any) -> None:
        board = board_of(transport)
        board.enter(1)
        board.wait("a step", TIMEOUT)
        for call, table in enumerate(tables):
            if call % 3 == transport.rank and call < 9:
                time.sleep(0.01)
            # Two ranks give one row, or one of them gives both.
            giver = {0: [2], 1: [0]} if call % 2 else {0: [0, 2]}
            if transport.rank in giver:
                places = giver[transport.rank]
                got = board.gather(places, table[places], 3, "a step", TIMEOUT)
                assert (got[[0, 2]] == table[[0, 2]]).all(), call
            else:
                board.meet("a step", TIMEOUT)

    together(*(lambda t=t: run(t) for t in ranks))


@both
def test_a_rank_may_leave_out_meetings(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others do not wait for it, and it comes back with the last; nobody sleeps too long."""
    monkeypatch.setattr(symmetric_memory, "_GLANCE", 10.0)
    ranks = transports(kind, 3)
    done: list[int] = []
    began = time.monotonic()

    def run(transport: Any) -> None:
        mine = board_of(transport)
        for call in range(20):
            if transport.rank == call % 5 % 3:
                time.sleep(0.02 * (call % 2))
                mine.meet("the end", TIMEOUT, 4, last=True)
            else:
                for _ in range(3):
                    mine.meet("a step", TIMEOUT)
                done.append(call)
                mine.meet("the end", TIMEOUT, last=True)
            assert done.count(call) == 2

    together(*(lambda t=t: run(t) for t in ranks))
    assert time.monotonic() - began < 8.0


def test_processors_in_common_and_of_their_own() -> None:
    shared, own = [{0, 1}, {0, 1}, {0, 1}], [{0, 1}, {2}, {3}]
    for cores, want in ((shared, 2), (own, 4)):
        memory = memoryview(mmap.mmap(-1, board_bytes(3)))
        boards = [
            Board(memory, rank, 3, cast(Any, None), cores=each) for rank, each in enumerate(cores)
        ]
        assert [board.workers for board in boards] == [want] * 3


@both
def test_a_rank_that_is_late_within_a_call_is_named(kind: str) -> None:
    first, second, third = transports(kind, 3)

    def meet_twice(transport: Any) -> str:
        # The first time the third one comes, too.
        board_of(transport).meet("a step", TIMEOUT)
        with pytest.raises(CollectiveTimeoutError) as caught:
            board_of(transport).meet("another", 0.2)
        return str(caught.value)

    texts = together(
        lambda: meet_twice(first),
        lambda: meet_twice(second),
        lambda: board_of(third).meet("a step", TIMEOUT),
    )[:2]
    assert any("got no answer from rank 2 in another within 0.2 s" in text for text in texts), texts


@both
def test_a_rank_that_has_ended_is_seen_at_once(kind: str) -> None:
    first, second, third = transports(kind, 3)
    start = time.monotonic()
    board_of(first).enter(1)
    board_of(second).enter(1)
    third.close()
    with pytest.raises(
        CollectiveTimeoutError, match=r"rank 0 .* rank 2 in a step: rank 2 has ended"
    ):
        board_of(first).wait("a step", TIMEOUT)
    if kind == "shm":
        # Its own waiting peer is told the cause.
        with pytest.raises(
            CollectiveTimeoutError, match=r"rank 1 .* in a step: .*rank 2 has ended"
        ):
            board_of(second).wait("a step", TIMEOUT)
    assert time.monotonic() - start < 2.0


@both
def test_a_rank_that_ended_after_the_call_is_no_error(kind: str) -> None:
    first, second = transports(kind, 2)
    for transport in (second, first):
        board_of(transport).enter(1)
    second.close()
    board_of(first).wait("a step", TIMEOUT)


@both
@pytest.mark.parametrize("differ", [False, True])
def test_a_rank_that_does_not_come_is_named(kind: str, differ: bool) -> None:
    """Also where the others differ already: they cannot go on without it."""
    ranks = transports(kind, 3)

    def run(transport: Any) -> float:
        board = board_of(transport)
        start = time.monotonic()
        board.enter(1 + (transport.rank if differ else 0))
        wait = board.wait
        if differ:
            with pytest.raises(RanksDiffer):
                board.wait("a step", TIMEOUT)
            wait = board.clear
        with pytest.raises(CollectiveTimeoutError, match=r"rank 2 in a step within 0\.3 s"):
            wait("a step", 0.3)
        return time.monotonic() - start

    waited = together(*(lambda t=t: run(t) for t in ranks[:2]))
    # The one that began later is told by the other, whose time is up first.
    assert 0.3 <= max(waited) < 2.0
    # The late one does not find the others there.
    late = board_of(ranks[2])
    late.enter(1)
    with pytest.raises(CollectiveTimeoutError, match="rank 2 got no answer from rank 0"):
        late.wait("a step", 0.1)


def test_an_interrupt_is_told_to_the_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = transports("shm", 2)
    board = board_of(first)
    board.enter(1)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    monkeypatch.setattr(futex, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        board.wait("a step", TIMEOUT)
    monkeypatch.undo()
    assert first.board is None
    with pytest.raises(CollectiveTimeoutError, match="KeyboardInterrupt"):
        second.exchange([], [Message(0, poisoned(5))], "a step", TIMEOUT)


def test_numbers_come_round() -> None:
    """What is left in a row from 255 calls ago is not taken for this call's."""

    class Nobody:
        def gone(self) -> None:
            return None

        def last_words(self, peer: int) -> str:
            raise AssertionError

        discard: Callable[[], None]
        abandon: Callable[[str], None]

    memory = memoryview(mmap.mmap(-1, board_bytes(2)))
    first, second = (Board(memory, r, 2, Nobody(), cores=[0]) for r in range(2))
    for call in range(1000):
        first.enter(1 + call % 2)
        assert not first.agreed(), call
        second.enter(1 + call % 2)
        assert first.agreed() and second.agreed()


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux how much memory there is")
def test_boards_of_threads_may_be_larger_than_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of 512 ranks are where there are 32 GiB: memory goes to what is written alone."""
    said = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    whole = sum(int(said[name].split()[0]) << 10 for name in ("MemTotal", "SwapTotal"))
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":
        pytest.skip("this machine promises no more memory than it has")
    monkeypatch.setattr(threads, "board_bytes", lambda size: board_bytes(size) + whole)
    first, second = transports("threads", 2)
    board_of(first).enter(1)
    board_of(second).enter(1)
    assert board_of(first).agreed() and board_of(second).agreed()
