"""How ranks find each other over TCP: by which address, who is turned away, what is left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from collectives import CollectiveTimeoutError
from collectives.transport import ThreadTransport, ThreadWorld
from collectives.transport.connections import address, listener
from collectives.transport.connections.connect import open_connections
from collectives.transport.connections.tcp import LINE_BYTES
from collectives.transport.connections.tcp_listener import TcpListener, find_address
from tests.collectives.transport.thread_ranks import (
    TIMEOUT,
    connect,
    exchange,
    noise,
    poisoned,
    together,
)

LOOPBACK = "127.0.0.1"


def sockets() -> int:
    """How many this process has."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        # Of what lists them there is no more.
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    return count


def test_nothing_is_left_open() -> None:
    gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    transports = connect(3, kinds=("tcp",))
    assert [t.connected_peers for t in transports] == [{1, 2}, {0, 2}, {0, 1}]
    assert [t.symmetric_memory for t in transports] == [None] * 3
    assert len(os.listdir("/proc/self/fd")) - files == 6
    for transport in transports:
        transport.close()
    assert len(os.listdir("/proc/self/fd")) == files


@pytest.mark.parametrize(
    ("kind", "last"), [*(("shm", n) for n in range(3)), *(("tcp", n) for n in range(3, 7))]
)
def test_nothing_is_left_open_where_a_rank_ends_in_between(kind: str, last: int) -> None:
    """A rank that dies in between ends the others' start: the error may be kept, no socket is."""
    gc.collect()
    before = sockets()
    world = ThreadWorld(2)

    class Ending(ThreadTransport):
        """Ends with what the ranks tell each other in two exchanges each time."""

        exchanges = 0

        def exchange(self, *arguments: Any, **options: Any) -> None:
            super().exchange(*arguments, **options)
            self.exchanges += 1
            if self.exchanges == 2 * (last + 1):
                raise CollectiveTimeoutError("gone")

    def connect_until(rank: int) -> None:
        open_connections(Ending(world, rank), TIMEOUT, kinds=(kind,))

    errors = []
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(connect_until, rank) for rank in range(2)]:
            with pytest.raises(CollectiveTimeoutError) as caught:
                future.result()
            errors.append(caught)
    assert sockets() == before


def test_ranks_that_share_memory_use_that() -> None:
    """Only what memory does not reach goes over TCP; who offers neither has none."""
    assert [t.memory_peers for t in connect(2, kinds=("shm", "tcp"))] == [{1}, {0}]
    transports = connect(3, unwilling=(1,), kinds=("shm", "tcp"))
    assert [t.connected_peers for t in transports] == [{2}, set(), {0}]


def test_ranks_listen_only_where_memory_does_not_reach_and_until_they_are_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[socket.socket] = []
    create = socket.create_server

    def counted(*given: Any, **options: Any) -> socket.socket:
        made.append(create(*given, **options))
        return made[-1]

    monkeypatch.setattr(socket, "create_server", counted)
    connect(3, kinds=("shm", "tcp"))
    assert not made
    transports = connect(3, kinds=("tcp",))
    assert len(made) == 3 and all(each.fileno() == -1 for each in made)
    together(*(lambda t=t: t.split([0, 1, 2], TIMEOUT) for t in transports))
    assert len(made) == 6 and all(each.fileno() == -1 for each in made)


def test_strangers_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent ones, those who say something else, and one who goes; none of them is waited for."""
    strangers: list[socket.socket] = []
    create = socket.create_server

    def crowded(at: tuple[str, int], **options: Any) -> socket.socket:
        crowd = create(at, **options)
        for text in (b"", b"hello", b"x" * LINE_BYTES, b"y" * 1000, None):
            stranger = socket.create_connection(crowd.getsockname())
            if text is None:
                stranger.close()
                continue
            stranger.sendall(text)
            strangers.append(stranger)
        return crowd

    monkeypatch.setattr(socket, "create_server", crowded)
    start = time.monotonic()
    first, second = connect(2, kinds=("tcp",))
    assert first.connected_peers == {1} and second.connected_peers == {0}
    assert time.monotonic() - start < 2.0
    for stranger in strangers:
        stranger.settimeout(5.0)
        # What was not read when the listener closed resets the connection.
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
        stranger.close()


def test_the_secret_is_needed() -> None:
    with contextlib.ExitStack() as stack:
        own = TcpListener(0, LOOPBACK, stack)
        wrong = [*own.offer[:2], "00" * 16]
        assert wrong != own.offer
        other = TcpListener.FORMAT + 1
        said = f"rank 0 speaks {other}, this one {TcpListener.FORMAT}"
        for offer in ([other, *own.offer[1:]], [other]):
            with pytest.raises(OSError, match=said):
                TcpListener(2, LOOPBACK, stack).connect(0, offer, 5.0)
        TcpListener(1, LOOPBACK, stack).connect(0, wrong, 5.0).close()
        start = time.monotonic()
        assert own.accept([1], 0.3) == {}
        assert 0.3 <= time.monotonic() - start < 2.0


def test_a_rank_that_cannot_listen_has_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> socket.socket:
        raise OSError("refused")

    monkeypatch.setattr(socket, "create_server", refused)
    first, second = connect(2, kinds=("tcp",))
    assert first.connected_peers == second.connected_peers == set()


@pytest.mark.parametrize(("limit", "timeout"), [(0.4, 30.0), (10.0, 0.8)])
def test_connecting_stops_where_a_network_answers_nothing(
    limit: float, timeout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One limit for all ranks together, not one for each; before the others give this rank up."""
    monkeypatch.setattr(listener, "_CONNECT_SECONDS", limit)

    def swallow(at: tuple[str, int], timeout: float) -> socket.socket:
        time.sleep(timeout)
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", swallow)
    with contextlib.ExitStack() as stack:
        own = TcpListener(9, LOOPBACK, stack)
        start = time.monotonic()
        for peer in range(9):
            with pytest.raises(TimeoutError):
                own.connect(peer, [TcpListener.FORMAT, ["10.255.0.1", 1], "00" * 16], timeout)
        assert 0.4 <= time.monotonic() - start < 2.0


def test_the_address_is_the_one_that_leads_to_the_store() -> None:
    assert address.source_of("localhost") in (LOOPBACK, "::1")
    assert address.source_of(LOOPBACK) == LOOPBACK
    with pytest.raises(OSError):
        address.source_of("no-such-host.invalid")
    assert address.reaches_others("10.0.0.3") and address.reaches_others("fd00::2")
    for near in (LOOPBACK, "127.0.1.1", "::1", "fe80::1%eth0", "169.254.7.7"):
        assert not address.reaches_others(near)


def test_an_interface_may_have_ipv6_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table = tmp_path / "if_inet6"
    table.write_text(
        "fe80000000000000a45349fffede9c54 02 40 20 80      v6-0\n"
        "fd000000000000000000000000000003 03 40 00 80      v6-1\n"
        "fd000000000000000000000000000002 02 40 00 80      v6-0\n"
        "fe80000000000000a45349fffede9c55 04 40 20 80      v6-2\n"
    )
    monkeypatch.setattr(address, "_INET6", table)
    assert address.of_interface("v6-0") == "fd00::2"
    # A connection-local address leads to one machine or another.
    for lacking in ("v6-2", "v6"):
        with pytest.raises(OSError, match="No such device"):
            address.of_interface(lacking)
    table.unlink()
    with pytest.raises(OSError, match="No such device"):
        address.of_interface("v6-0")


def test_the_interface_that_is_chosen_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert address.of_interface("lo") == LOOPBACK
    said: list[str | None] = []

    def gather(value: str | None) -> list[str | None]:
        said.append(value)
        return [value, "10.9.9.9"]

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth7")
    assert find_address("10.9.9.1", gather) == LOOPBACK
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    assert find_address("10.9.9.1", gather) is None
    with pytest.raises(OSError, match="as long as lo"):
        # Cut to what an interface's name can have, it would be another's.
        address.of_interface("lo" + "\0" * 14)
    assert find_address(None, gather) is None
    assert said == [LOOPBACK, None, None]


def test_a_rank_whose_own_name_the_store_has_goes_by_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a host whose own name is 127.0.1.1 in /etc/hosts."""
    kinds = {"node0": "127.0.1.1", "10.1.0.2": "10.1.0.1"}
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(address, "source_of", lambda host: kinds[host])
    told = ["127.0.1.1", None, "10.1.0.2"]
    assert find_address("node0", lambda mine: told) == "10.1.0.1"
    # All on one host: loopback it is.
    assert find_address("node0", lambda mine: [mine, mine]) == "127.0.1.1"


def test_ipv6() -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with contextlib.ExitStack() as stack:
        listeners = [TcpListener(rank, "::1", stack) for rank in range(2)]
        listeners[1].connect(0, listeners[0].offer, 5.0).close()
        listeners[0].accept([1], 5.0)[1].close()


def test_frames_are_whole_cache_lines() -> None:
    """Where they are not, the next message's data come to lie a few bytes too far in a line."""
    first, second = connect(2, kinds=("tcp",))
    (connection,) = first._connections.values()
    sent: list[int] = []
    real = connection._socket

    class Counting:
        def __getattr__(self, asked: str) -> Any:
            return getattr(real, asked)

        def sendmsg(self, parts: list[memoryview]) -> int:
            sent.append(real.sendmsg(parts))
            return sent[-1]

    connection._socket = Counting()
    lengths = (1, 63, 64, 65, 5000)
    got = [poisoned(n) for n in lengths]
    together(
        lambda: exchange(first, [(1, noise(n, n)) for n in lengths], []),
        lambda: exchange(second, [], [(0, tensor) for tensor in got]),
    )
    assert sent == [128, 128, 128, 192, 5120]
    for n, tensor in zip(lengths, got, strict=True):
        assert torch.equal(tensor, noise(n, n))


@contextlib.contextmanager
def callers(count: int) -> Iterator[tuple[TcpListener, list[socket.socket]]]:
    """A listener, and as many sockets that have connected to it and said nothing yet."""
    with contextlib.ExitStack() as stack:
        made = TcpListener(0, LOOPBACK, stack)
        yield (
            made,
            [
                stack.enter_context(socket.create_connection(made.offer[1], timeout=TIMEOUT))
                for _ in range(count)
            ],
        )


def say_hello(made: TcpListener, callers: Iterable[socket.socket]) -> None:
    for rank, caller in enumerate(callers, 1):
        caller.sendall(listener._HELLO.pack(bytes.fromhex(made.offer[2]), rank))


def test_all_ranks_that_have_connected_before_one_looks_have_connections() -> None:
    """However many, and others' silent ones among them."""
    count = 3 * listener._MAX_SILENT
    with callers(count + 5) as (made, sockets):
        say_hello(made, sockets[:count])
        come = {each.peer: each for each in made.come(range(1, count + 1))}
        assert come.keys() == {*range(1, count + 1)}
        for each in come.values():
            each.close()


def test_of_too_many_silent_connections_the_oldest_are_closed() -> None:
    with callers(listener._MAX_SILENT + 10) as (made, sockets):
        assert not [*made.come([1])]
        assert len(made.sockets()) == 1 + listener._MAX_SILENT
        for each in sockets[:10]:
            assert each.recv(1) == b""
        say_hello(made, sockets[10:11])
        (come,) = made.come([1])
        come.close()


def test_where_descriptors_end_those_accepted_before_have_connections() -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with callers(3) as (made, sockets):
        say_hello(made, sockets)
        with socket.socket() as free:
            lowest = free.fileno()
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, hard))
        try:
            coming = made.come([1, 2, 3])
            come = next(coming)
            with pytest.raises(OSError, match="open files"):
                next(coming)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert come.peer == 1
        come.close()


def test_where_descriptors_end_silent_connections_make_room() -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with callers(listener._MAX_SILENT + 3) as (made, sockets):
        made.most_silent = 1000
        assert not [*made.come([1])]
        with socket.create_connection(made.offer[1], timeout=TIMEOUT) as caller:
            say_hello(made, [caller])
            with socket.socket() as free:
                lowest = free.fileno()
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
            try:
                come = [*made.come([1]), *made.come([1])]
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert [each.peer for each in come] == [1]
        come[0].close()
        assert sockets[0].recv(1) == b""
