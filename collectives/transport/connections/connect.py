"""How the ranks of a group open links to each other: by memory on one host, else over TCP."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

from collectives.transport.connections.connection import Link
from collectives.transport.connections.shm import ShmLink
from collectives.transport.connections.shm_listener import ShmDoor
from collectives.transport.connections.tcp_listener import TcpDoor, find_address

Gather = Callable[[bytes], list[bytes]]

# The better one first.
WAYS = ("shm", "tcp")


class Met(NamedTuple):
    """links: by rank. memory: zeros that all ranks of the group share, where all have links through
    memory to all and the system gave it; on every rank or on none."""

    links: dict[int, Link]
    memory: memoryview | None


class _Door(Protocol):
    """One way to open links. offer: what other ranks need to call, for json."""

    @property
    def offer(self) -> Sequence[Any]: ...

    def call(self, peer: int, offer: Sequence[Any], timeout: float) -> None: ...

    def open(self, callers: Collection[int], timeout: float) -> dict[int, Link]: ...


def open_links(
    rank: int,
    size: int,
    gather: Gather,
    timeout: float,
    *,
    ways: Collection[str] = WAYS,
    toward: str = "localhost",
    near: Collection[int] | None = None,
) -> Met:
    """Meet the other ranks, each by the best way that both offer and that works.

    A collective: `gather` returns every rank's bytes by rank, and every rank calls it four times
    whatever fails here. Both ranks of a pair get a link, or neither does: where the system refuses
    sockets, memory or descriptors, there is none. timeout: seconds that a peer's answer may take.
    ways: what this rank offers. toward: a host that all ranks know (tcp_door.find_address). near:
    the ranks to share memory with, symmetrically; all unless given.
    """
    at = find_address(toward if "tcp" in ways else None, gather)
    links: dict[int, Link] = {}
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as failed:
        failed.callback(_close_all, links)
        doors: dict[str, _Door] = {}
        if "shm" in ways:
            with contextlib.suppress(OSError):
                doors["shm"] = ShmDoor(rank, size, stack)
        if "tcp" in ways and at is not None:
            with contextlib.suppress(OSError):
                doors["tcp"] = TcpDoor(rank, at, stack)
        mine = {way: door.offer for way, door in doors.items()}
        offers = [json.loads(data) for data in gather(json.dumps(mine).encode())]
        called: dict[int, str] = {}
        for peer in range(rank):
            for way, door in doors.items():
                if way in offers[peer] and (way != "shm" or near is None or peer in near):
                    with contextlib.suppress(OSError):
                        door.call(peer, offers[peer][way], timeout)
                        called[peer] = way
                        break

        calls = json.dumps(list(called.items())).encode()
        told = [dict(json.loads(data)) for data in gather(calls)]
        for way, door in doors.items():
            callers = [peer for peer, others in enumerate(told) if others.get(rank) == way]
            links.update(door.open(callers, timeout))

        shm = doors.get("shm")
        memory = shm.symmetric_memory if isinstance(shm, ShmDoor) else None
        shared = [peer for peer, link in links.items() if isinstance(link, ShmLink)]
        report = [list(links), memory is not None and len(shared) == size - 1]
        reports = [json.loads(data) for data in gather(json.dumps(report).encode())]
        for peer in [peer for peer in links if rank not in reports[peer][0]]:
            links.pop(peer).close()
        failed.pop_all()
    if memory is None or not all(has and len(peers) == size - 1 for peers, has in reports):
        return Met(dict(sorted(links.items())), None)
    return Met(dict(sorted(links.items())), memoryview(memory))


def _close_all(links: dict[int, Link]) -> None:
    for link in links.values():
        link.close()
