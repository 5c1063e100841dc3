"""Connections over TCP that are opened when first used: who connects, ends, descriptors."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import socket
import threading
import time
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from collectives import CollectiveTimeoutError, TransportError
from collectives.schedules.levels import schedule_of
from collectives.schedules.schedule import steps_of
from collectives.schedules.spec import parse_all_reduce_spec
from collectives.schedules.topology import Topology
from collectives.transport import ConnectionTransport
from collectives.transport.connections import tcp_listener, transport, unopened
from collectives.transport.connections.connect import descriptors_of, neighbours
from collectives.transport.descriptors import SPARE
from tests.collectives.transport.thread_ranks import (
    TIMEOUT,
    connect,
    exchange,
    noise,
    poisoned,
    together,
)

# Of 8 ranks these are neighbours of no one else's start: 0 and 3, 0 and 5, 1 and 4, ...
SIZE = 8


@pytest.fixture
def ranks() -> Iterable[list[ConnectionTransport]]:
    transports = connect(SIZE, kinds=("tcp",))
    yield transports
    for each in transports:
        each.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def send(transport: ConnectionTransport, peer: int, length: int = 9) -> None:
    exchange(transport, [(peer, noise(length, transport.rank))], [])


def receive(transport: ConnectionTransport, peer: int, length: int = 9, **options: Any) -> None:
    got = poisoned(length)
    exchange(transport, [], [(peer, got)], **options)
    assert torch.equal(got, noise(length, peer))


def swap(transport: ConnectionTransport, peer: int, length: int = 9) -> None:
    got = poisoned(length)
    exchange(transport, [(peer, noise(length, transport.rank))], [(peer, got)])
    assert torch.equal(got, noise(length, peer))


def test_connections_beyond_the_neighbours_are_opened_when_first_used() -> None:
    gc.collect()
    before = descriptors()
    ranks = connect(SIZE, kinds=("tcp",))
    assert all(each.connected_peers == {*range(SIZE)} - {each.rank} for each in ranks)
    # Five neighbours and a listener each.
    at_start = SIZE * (5 + 1)
    assert descriptors() - before == at_start
    for length in (9, 2**22):
        together(lambda n=length: swap(ranks[0], 3, n), lambda n=length: swap(ranks[3], 0, n))
        assert descriptors() - before == at_start + 2
    for each in ranks:
        each.close()
    assert descriptors() == before


@pytest.mark.parametrize("length", [9, 2**22])
def test_two_ranks_that_open_at_once_have_one_connection(
    length: int, ranks: list[ConnectionTransport]
) -> None:
    before = descriptors()
    barrier = threading.Barrier(2)

    def meet(rank: int, peer: int) -> None:
        barrier.wait()
        swap(ranks[rank], peer, length)

    for low, high in ((0, 3), (0, 5), (1, 4), (1, 6), (2, 5)):
        together(lambda a=low, b=high: meet(a, b), lambda a=low, b=high: meet(b, a))
    assert descriptors() - before == 2 * 5


def test_all_pairs_at_once_open_their_connections(ranks: list[ConnectionTransport]) -> None:
    def all_to_all(transport: ConnectionTransport) -> None:
        peers = [peer for peer in range(SIZE) if peer != transport.rank]
        for length in (1, 5000, 2**20):
            got = {peer: poisoned(length) for peer in peers}
            sent = noise(length, transport.rank)
            exchange(transport, [(peer, sent) for peer in peers], [*got.items()])
            for peer, tensor in got.items():
                assert torch.equal(tensor, noise(length, peer))

    together(*(lambda each=each: all_to_all(each) for each in ranks))


def test_a_rank_that_computes_keeps_nobody_from_connecting(
    ranks: list[ConnectionTransport],
) -> None:
    """What is sent waits with the connection until the rank looks."""
    start = time.monotonic()
    send(ranks[3], 0)
    assert time.monotonic() - start < 1.0
    receive(ranks[0], 3)


@pytest.mark.parametrize(("waits", "ends"), [(0, 3), (3, 0)])
def test_a_rank_that_ends_before_its_connection_is_opened_is_named(
    waits: int, ends: int, ranks: list[ConnectionTransport]
) -> None:
    """Whichever of the two was to connect, before the other waits and while it does."""
    named = rf"rank {waits} got no answer from rank {ends} in a step: rank {ends} has ended"
    start = time.monotonic()

    def end() -> None:
        time.sleep(0.3)
        ranks[ends].close()

    def wait() -> None:
        with pytest.raises(CollectiveTimeoutError, match=named):
            receive(ranks[waits], ends)

    together(end, wait)
    assert time.monotonic() - start < 5.0
    other = {0: 5, 3: 6}[waits]
    with pytest.raises(CollectiveTimeoutError, match=f"from rank {ends} in a step"):
        receive(ranks[other], ends) if ends not in neighbours(other, SIZE) else wait_for(
            ranks[other], ends
        )
    assert ranks[1].gone([ends]) == ends or knocked(ranks[1], ends)


def wait_for(transport: ConnectionTransport, peer: int) -> None:
    exchange(transport, [], [(peer, poisoned(1))])


def knocked(transport: ConnectionTransport, peer: int) -> bool:
    """Whether it is found out by asking some times."""
    for _ in range(20):
        if transport.gone([peer]) == peer:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(("waits", "fails"), [(0, 3), (3, 0)])
def test_the_rank_that_ended_first_is_named_where_no_connection_leads_to_who_saw_it(
    waits: int, fails: int, ranks: list[ConnectionTransport]
) -> None:
    """Rank 7 ends; who waits for it fails, and who waits for that one hears why over others."""

    def fail() -> None:
        with pytest.raises(CollectiveTimeoutError, match="from rank 7 in a step: rank 7 has ended"):
            wait_for(ranks[fails], 7)

    def wait() -> None:
        with pytest.raises(
            CollectiveTimeoutError, match=f"from rank {fails} in a step: .*rank 7 has ended"
        ):
            wait_for(ranks[waits], fails)

    def between(rank: int) -> None:
        """Waits for a neighbour of both."""
        with pytest.raises(CollectiveTimeoutError, match="rank 7 has ended"):
            wait_for(ranks[rank], fails)

    ranks[7].close()
    start = time.monotonic()
    together(fail, wait, lambda: between(1), lambda: between(2))
    assert time.monotonic() - start < 5.0


def test_what_a_rank_sent_before_it_ended_arrives_where_it_ends_as_this_one_knocks(
    ranks: list[ConnectionTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It connects, sends and ends between a wait without an answer and the knock."""
    refuses = unopened.Unopened.refuses

    def late(self: unopened.Unopened, peer: int) -> bool:
        send(ranks[3], 0)
        ranks[3].close()
        return refuses(self, peer)

    monkeypatch.setattr(unopened.Unopened, "refuses", late)
    receive(ranks[0], 3)


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENETUNREACH])
def test_a_knock_that_the_system_refuses_ends_nothing(
    error: int, ranks: list[ConnectionTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    knocked = threading.Event()

    def refused(offer: Any) -> socket.socket:
        knocked.set()
        raise OSError(error, os.strerror(error))

    def answer() -> None:
        assert knocked.wait(5.0)
        send(ranks[3], 0)

    monkeypatch.setattr(unopened, "reach", refused)
    together(answer, lambda: receive(ranks[0], 3))
    assert ranks[1].gone([4]) is None


def test_knocks_leave_the_programs_descriptors_alone(
    ranks: list[ConnectionTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(unopened, "shortage", lambda count: "as many as are open")
        assert ranks[0].gone(range(SIZE)) is None
        assert descriptors() == before
    assert ranks[0].gone(range(SIZE)) is None
    # Of ranks 3 and 5.
    assert descriptors() == before + 2


def test_a_split_makes_room_for_connections_that_are_opened_later(
    ranks: list[ConnectionTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def shortage(count: int) -> str:
        asked.append(count)
        return ""

    monkeypatch.setattr(transport, "shortage", shortage)
    parts = together(*(lambda each=each: each.split(range(SIZE), TIMEOUT) for each in ranks))
    for part in parts:
        part.close()
    assert asked.count(descriptors_of(0, SIZE - 1)) == SIZE
    # What cannot be had at start is an error.
    assert asked.count(descriptors_of(0, 5)) == SIZE


def test_who_knows_no_secret_is_turned_away(ranks: list[ConnectionTransport]) -> None:
    """Also while a rank waits to be connected to."""
    others: list[socket.socket] = []
    listening = ranks[0]._unopened.sockets()[0]  # type: ignore[union-attr]

    def crowd() -> None:
        for text in (b"", b"hello", b"x" * 64, b"y" * 1000):
            other = socket.create_connection(listening.getsockname())
            others.append(other)
            if text:
                other.sendall(text)
        time.sleep(0.2)
        send(ranks[3], 0)

    together(crowd, lambda: receive(ranks[0], 3))
    for other in others[1:]:
        other.settimeout(5.0)
        with contextlib.suppress(ConnectionResetError):
            assert other.recv(1) == b""
        other.close()
    others[0].close()


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_without_descriptors_to_open_a_connection_says_so(
    rank: int, ranks: list[ConnectionTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    doing = {3: "connect to rank 0", 0: "accept another rank's connection"}[rank]
    with monkeypatch.context() as patch:
        if rank == 3:
            patch.setattr(tcp_listener, "reach", refused)
        else:
            patch.setattr(ranks[0]._unopened._listener, "come", refused)  # type: ignore[union-attr]
        with pytest.raises(TransportError, match=f"rank {rank} cannot {doing}: .*open files"):
            swap(ranks[rank], 3 - rank)
    with pytest.raises(CollectiveTimeoutError, match=r"Too many open files|file descriptors"):
        wait_for(ranks[1], rank) if rank == 0 else wait_for(ranks[4], rank)


def test_a_forked_child_listens_no_longer(ranks: list[ConnectionTransport]) -> None:
    """And the parent's listener ends with the parent's transport while the child lives."""
    child = os.fork()
    if child == 0:
        time.sleep(5.0)
        os._exit(0)
    try:
        together(lambda: swap(ranks[0], 3), lambda: swap(ranks[3], 0))
        ranks[0].close()
        with pytest.raises(CollectiveTimeoutError, match="from rank 0 in a step"):
            receive(ranks[5], 0)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_a_network_that_swallows_what_is_sent_ends_by_the_time_limit(
    ranks: list[ConnectionTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connecting is part of the step, and its time that of the step."""
    kept: list[socket.socket] = []

    def silent(offer: Any) -> socket.socket:
        theirs, mine = socket.socket(), socket.socket()
        theirs.bind(("127.0.0.1", 0))
        theirs.listen(0)
        mine.connect(theirs.getsockname())
        kept.append(theirs)
        return mine

    monkeypatch.setattr(tcp_listener, "reach", silent)
    monkeypatch.setattr(unopened, "reach", silent)
    for waits, peer in ((3, 0), (1, 4)):
        start = time.monotonic()
        with pytest.raises(
            CollectiveTimeoutError, match=rf"from rank {peer} in a step within 0\.5 s"
        ):
            receive(ranks[waits], peer, timeout=0.5)
        assert time.monotonic() - start < 2.0


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 8, 9, 31, 64, 512])
def test_neighbours_are_mutual_and_lead_everywhere(size: int) -> None:
    for rank in range(size):
        assert all(rank in neighbours(peer, size) for peer in neighbours(rank, size))
        assert rank not in neighbours(rank, size)
    reached = {0}
    for _ in range((size - 1).bit_length()):
        reached |= {peer for rank in reached for peer in neighbours(rank, size)}
    assert reached == {*range(size)}


def peers_of(spec: str, topology: Topology, rank: int) -> set[int]:
    """With which ranks one exchanges messages, those of dot products among them."""
    (each,) = parse_all_reduce_spec(spec)
    found = set()
    for step in steps_of(schedule_of(each, topology, one_tree=True), rank):
        found |= {transfer.peer for transfer in (*step.sends, *step.recvs)}
        group = tuple(step.group)
        if rank in group and len(group) > 1:
            doubling = schedule_of(parse_all_reduce_spec("rd")[0], Topology(len(group), len(group)))
            for inner in steps_of(doubling, group.index(rank)):
                found |= {group[t.peer] for t in (*inner.sends, *inner.recvs)}
    return found


NODES, LOCAL = 64, 8
# What a process has open beside connections: gloo's mesh of the group, torch's libraries and the
# standard streams, and what is spared for the program.
BESIDE = NODES * LOCAL + 8 + 64 + SPARE
LIMIT = 1024


def descriptors_of_group(topology: Topology, specs: list[str], rank: int) -> int:
    """How many connections take once a group has run some algorithms."""
    near = topology.local_size - 1
    first = rank - rank % topology.local_size
    node = {*range(first, first + topology.local_size)}
    used = neighbours(rank, topology.size).union(*(peers_of(s, topology, rank) for s in specs))
    return descriptors_of(near, len(used - node))


def test_a_group_of_64_times_8_ranks_and_its_levels_fit_into_1024_descriptors() -> None:
    """The group's own algorithms, flat and of two levels, and both kinds of groups split from it.

    `psgpu` between all ranks does not fit: each then exchanges messages with all others.
    """
    whole, inner = Topology(NODES * LOCAL, LOCAL), Topology(LOCAL, LOCAL)
    outer = Topology(NODES, 1)
    flat = ["rd", "rechd", "vhdd", "xring", "rechd/rd", "xring/rechd", "rechd/vhdd", "xring/xring"]
    most = 0
    for rank in (0, 1, 7, 8, 100, 255, 256, 300, 511):
        most = max(
            most,
            descriptors_of_group(whole, flat, rank)
            + descriptors_of_group(inner, flat[:4], rank % LOCAL)
            + descriptors_of_group(outer, flat[:4], rank // LOCAL),
        )
    assert BESIDE + most <= LIMIT
    # Not by little: a program may split it some more times.
    assert most < 200
    everyone = descriptors_of_group(whole, ["psgpu"], 0)
    assert everyone == 2 * (LOCAL - 1) + (NODES - 1) * LOCAL + 6
    assert BESIDE + everyone > LIMIT
