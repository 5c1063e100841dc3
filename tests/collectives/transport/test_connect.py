"""How ranks of one host find each other: what is refused, what is left behind."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from collectives.transport.connections import listener
from collectives.transport.connections.shm import RING_BYTES
from collectives.transport.connections.shm_listener import ShmListener
from tests.collectives.transport.thread_ranks import TIMEOUT, connect

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="shared memory between ranks needs Linux's memfd"
)


# Where no connection is to come, waiting for one longer proves nothing more.
ACCEPT_SECONDS = 0.5


def mapped(what: str = "memfd:adasum") -> list[str]:
    """What this process's memory map calls the memory of connections and of all ranks in it."""
    with open("/proc/self/maps") as maps:
        return [line.split(maxsplit=5)[-1].strip() for line in maps if what in line]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_nothing_has_a_name_or_is_left_behind() -> None:
    gc.collect()
    before, files = len(mapped()), descriptors()
    transports = connect(3)
    # Six ends of connections: two rings in one mapping, and two descriptors, since mmap keeps one;
    # and a symmetric memory a rank, which has one.
    assert len(mapped("adasum-ring")) == 6 and len(mapped("adasum-symmetric")) == 3
    assert len(mapped()) - before == 9 and descriptors() - files == 15
    assert set(mapped()) == {
        "/memfd:adasum-ring (deleted)",
        "/memfd:adasum-symmetric (deleted)",
    }
    for transport in transports:
        transport.close()
    assert len(mapped()) == before and descriptors() == files


def test_symmetric_memory_is_for_ranks_that_all_share_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert all(transport.symmetric_memory is not None for transport in connect(3))
    assert [transport.symmetric_memory for transport in connect(3, unwilling=(1,))] == [None] * 3
    real = os.memfd_create

    def refused(name: str) -> int:
        if name == "adasum-symmetric":
            raise OSError("refused")
        return real(name)

    monkeypatch.setattr(os, "memfd_create", refused)
    transports = connect(3)
    assert [transport.symmetric_memory for transport in transports] == [None] * 3
    assert [len(transport.connected_peers) for transport in transports] == [2] * 3


def test_strangers_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anyone in the network namespace can see the name and connect; the secret is what counts."""
    strangers: list[socket.socket] = []
    listen = socket.socket.listen

    def crowded(sock: socket.socket, backlog: int) -> None:
        listen(sock, backlog)
        for text in (b"", b"hello", b"\0" * 15 + b"\1\1" + b"\0" * 47, b"\xff"):
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stranger.connect(sock.getsockname())
            if text:
                fd = os.memfd_create("stranger")
                os.ftruncate(fd, 2 * RING_BYTES)
                socket.send_fds(stranger, [text], [fd])
                os.close(fd)
            strangers.append(stranger)

    monkeypatch.setattr(socket.socket, "listen", crowded)
    first, second = connect(2)
    assert first.connected_peers == {1} and second.connected_peers == {0}
    for stranger in strangers:
        stranger.close()


def test_ranks_that_have_stopped_are_not_waited_for() -> None:
    """They answer nothing, and nothing of theirs is needed to connect to them."""
    gc.collect()
    files = descriptors()
    with contextlib.ExitStack() as stack:
        stopped = [ShmListener(rank, 4, stack) for rank in range(3)]
        last = ShmListener(3, 4, stack)
        start = time.monotonic()
        for rank, other in enumerate(stopped):
            last.connect(rank, other.offer, TIMEOUT).close()
        assert last.accept([], TIMEOUT) == {}
        assert time.monotonic() - start < 2.0
    del stopped, last, other
    gc.collect()
    assert descriptors() == files


@pytest.mark.parametrize("sent", [0, 1])
def test_a_peer_whose_memory_does_not_arrive_has_no_connection(
    sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where no descriptor is left for it, or where it is of another size."""
    real = socket.send_fds
    fd = os.memfd_create("other")
    os.ftruncate(fd, 5)
    monkeypatch.setattr(listener, "_ACCEPT_SECONDS", ACCEPT_SECONDS)
    monkeypatch.setattr(socket, "send_fds", lambda sock, data, _: real(sock, data, [fd] * sent))
    first, second = connect(2)
    os.close(fd)
    assert first.connected_peers == second.connected_peers == set()


@pytest.mark.parametrize("refused", ["mmap", "memfd", "socket", "symmetric memory"])
def test_where_the_system_refuses_there_is_no_connection(
    refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused to one rank, none of two ranks has it, and nothing is left open."""
    count = iter(range(100))
    # Of two ranks one makes the memory, and both map it.
    at = 0 if refused == "memfd" else 1

    def sometimes(
        real: Callable[..., Any], here: Callable[..., bool] = lambda *_: True
    ) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if here(*arguments) and (refused == "symmetric memory" or next(count) == at):
                raise OSError("refused")
            return real(*arguments, **options)

        return call

    gc.collect()
    files = descriptors()
    with monkeypatch.context() as patch:
        if refused != "symmetric memory":
            patch.setattr(listener, "_ACCEPT_SECONDS", ACCEPT_SECONDS)
        if refused == "mmap":
            patch.setattr(
                mmap, "mmap", sometimes(mmap.mmap, lambda _, size: size == 2 * RING_BYTES)
            )
        elif refused in ("memfd", "symmetric memory"):
            name = "adasum-ring" if refused == "memfd" else "adasum-symmetric"
            patch.setattr(os, "memfd_create", sometimes(os.memfd_create, name.__eq__))
        else:
            unix = socket.AF_UNIX
            patch.setattr(socket, "socket", sometimes(socket.socket, lambda *of: of[0] == unix))
        first, second = connect(2)
    if refused == "symmetric memory":
        assert (first.connected_peers, second.connected_peers) == ({1}, {0})
        assert first.symmetric_memory is second.symmetric_memory is None
        first.close()
        second.close()
    else:
        assert first.connected_peers == second.connected_peers == set()
    assert descriptors() == files
