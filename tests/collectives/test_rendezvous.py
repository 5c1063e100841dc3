"""How ranks of one host find each other: what is refused, what is left behind."""

from __future__ import annotations

import gc
import json
import mmap
import os
import socket
from collections.abc import Callable
from typing import Any

import pytest

from collectives.transport.channel import RING_BYTES

from .neighbours import meet

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="shared memory between ranks needs Linux's memfd"
)


def rings() -> list[str]:
    """What this process's memory map calls the rings in it."""
    with open("/proc/self/maps") as maps:
        return [line.split(maxsplit=5)[-1].strip() for line in maps if "adasum-ring" in line]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_nothing_has_a_name_or_is_left_behind() -> None:
    gc.collect()
    mapped, files = len(rings()), descriptors()
    transports = meet(3)
    # Six ends of links: a ring each way, and three descriptors, since mmap keeps the rings'.
    assert len(rings()) - mapped == 12 and descriptors() - files == 18
    assert set(rings()) == {"/memfd:adasum-ring (deleted)"}
    for transport in transports:
        transport.close()
    assert len(rings()) == mapped and descriptors() == files


def test_strangers_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anyone in the network namespace can see the name and connect; the secret is what counts."""
    strangers: list[socket.socket] = []
    listen = socket.socket.listen

    def crowded(sock: socket.socket, backlog: int) -> None:
        listen(sock, backlog)
        for text in (b"", b"[]", json.dumps(["0" * 32, 1]).encode(), b"\xff"):
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stranger.connect(sock.getsockname())
            if text:
                fd = os.memfd_create("stranger")
                os.ftruncate(fd, RING_BYTES)
                socket.send_fds(stranger, [text], [fd])
                os.close(fd)
            strangers.append(stranger)

    monkeypatch.setattr(socket.socket, "listen", crowded)
    first, second = meet(2)
    assert first.peers == {1} and second.peers == {0}
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize("refused", ["mmap", "memfd", "socket"])
def test_where_the_system_refuses_there_is_no_link(
    refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For neither of the two ranks, and nothing is left open."""
    count = iter(range(100))

    def sometimes(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if next(count) == 1:
                raise OSError("refused")
            return real(*arguments, **options)

        return call

    gc.collect()
    files = descriptors()
    with monkeypatch.context() as patch:
        if refused == "mmap":
            patch.setattr(mmap, "mmap", sometimes(mmap.mmap))
        elif refused == "memfd":
            patch.setattr(os, "memfd_create", sometimes(os.memfd_create))
        else:
            patch.setattr(socket, "socket", sometimes(socket.socket))
        first, second = meet(2)
    assert first.peers == second.peers == set()
    assert descriptors() == files
