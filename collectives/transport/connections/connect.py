"""How the ranks of a group open connections: through memory on one host, else over TCP."""

from __future__ import annotations

import contextlib
import json
import mmap
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

from collectives.transport.connections.connection import Connection
from collectives.transport.connections.shm_listener import ShmListener
from collectives.transport.connections.tcp_listener import TcpListener, find_address

Gather = Callable[[bytes], list[bytes]]

# The better one first.
KINDS = ("shm", "tcp")


class Opened(NamedTuple):
    """What a rank has opened.

    Attributes:
        connections: By peer.
        memory: Zeros that all ranks of the group share, on every rank or on none: where all have
            connections through memory to all, and the system gave it.
    """

    connections: dict[int, Connection]
    memory: memoryview | None


class _Listener(Protocol):
    """One kind of connections.

    offer: what other ranks need to connect, for JSON. symmetric_memory: what the ranks connected by
    this kind share, once all have accepted; None where it shares none.
    """

    @property
    def offer(self) -> Sequence[Any]: ...

    @property
    def symmetric_memory(self) -> mmap.mmap | None: ...

    def connect(self, peer: int, offer: Sequence[Any], timeout: float) -> None: ...

    def accept(self, expected: Collection[int], timeout: float) -> dict[int, Connection]: ...


def open_connections(
    rank: int,
    size: int,
    gather: Gather,
    timeout: float,
    *,
    kinds: Collection[str] = KINDS,
    toward: str = "localhost",
    near: Collection[int] | None = None,
) -> Opened:
    """Open a connection to every rank, of the best kind that both offer and that works.

    A collective. Both ranks of a pair get a connection, or neither does: where the system refuses
    sockets, memory or descriptors, there is none.

    Args:
        rank: This rank.
        size: How many ranks there are.
        gather: Returns every rank's bytes, by rank. Every rank calls it four times, whatever fails.
        timeout: Seconds that a peer's answer may take.
        kinds: What this rank offers.
        toward: A host that all ranks know (`find_address`).
        near: The ranks to share memory with, symmetrically; all unless given.
    """
    at = find_address(toward if "tcp" in kinds else None, gather)
    connections: dict[int, Connection] = {}
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as failed:
        failed.callback(_close_all, connections)
        listeners: dict[str, _Listener] = {}
        if "shm" in kinds:
            with contextlib.suppress(OSError):
                listeners["shm"] = ShmListener(rank, size, stack)
        if "tcp" in kinds and at is not None:
            with contextlib.suppress(OSError):
                listeners["tcp"] = TcpListener(rank, at, stack)
        mine = {kind: listener.offer for kind, listener in listeners.items()}
        offers = [json.loads(data) for data in gather(json.dumps(mine).encode())]
        connected = _connect_to_lower(rank, listeners, offers, near, timeout)
        told = [dict(json.loads(data)) for data in gather(json.dumps(connected).encode())]
        for kind, listener in listeners.items():
            expected = [peer for peer, others in enumerate(told) if others.get(rank) == kind]
            connections.update(listener.accept(expected, timeout))

        memories = [listener.symmetric_memory for listener in listeners.values()]
        memory = next((each for each in memories if each is not None), None)
        shared = [each for each in connections.values() if each.shares_memory]
        report = [list(connections), memory is not None and len(shared) == size - 1]
        reports = [json.loads(data) for data in gather(json.dumps(report).encode())]
        for peer in [peer for peer in connections if rank not in reports[peer][0]]:
            connections.pop(peer).close()
        failed.pop_all()
    if memory is None or not all(has and len(peers) == size - 1 for peers, has in reports):
        return Opened(dict(sorted(connections.items())), None)
    return Opened(dict(sorted(connections.items())), memoryview(memory))


def _connect_to_lower(
    rank: int,
    listeners: dict[str, _Listener],
    offers: Sequence[dict[str, Sequence[Any]]],
    near: Collection[int] | None,
    timeout: float,
) -> list[tuple[int, str]]:
    """Connect to every rank below this one; return (peer, kind) where that worked."""
    connected = []
    for peer in range(rank):
        for kind, listener in listeners.items():
            if kind in offers[peer] and (kind != "shm" or near is None or peer in near):
                with contextlib.suppress(OSError):
                    listener.connect(peer, offers[peer][kind], timeout)
                    connected.append((peer, kind))
                    break
    return connected


def _close_all(connections: dict[int, Connection]) -> None:
    for connection in connections.values():
        connection.close()
