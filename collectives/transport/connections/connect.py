"""How the ranks of a group open connections: through memory on one host, else over TCP."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Any

from collectives.transport.base import Transport
from collectives.transport.byte_gathering import gather_objects
from collectives.transport.connections.connection import Connection
from collectives.transport.connections.listener import Listener
from collectives.transport.connections.shm_listener import ShmListener
from collectives.transport.connections.tcp_listener import TcpListener, find_address

KINDS = ("shm", "tcp")


def open_connections(
    other: Transport,
    timeout: float,
    *,
    kinds: Collection[str] = KINDS,
    toward: str = "localhost",
    near: Collection[int] | None = None,
) -> tuple[dict[int, Connection], memoryview | None]:
    """Open a connection to every rank, of the best kind that both offer and that works.

    A collective. Both ranks of a pair get a connection, or neither does: where the system refuses
    sockets, memory or descriptors, there is none.

    Args:
        other: A transport between the ranks, over which they tell each other how to connect.
        timeout: Seconds that a peer's answer may take.
        kinds: What this rank offers.
        toward: A host that all ranks know (`find_address`).
        near: The ranks to share memory with, symmetrically; all unless given.

    Returns:
        The connections by peer; and zeros that all ranks share, on every rank or on none: where all
        have connections through memory to all, and the system gave it.
    """

    def gather(value: Any) -> list[Any]:
        return gather_objects(value, other, timeout)

    rank, size = other.rank, other.size
    host = find_address(toward if "tcp" in kinds else None, gather)
    connections: dict[int, Connection] = {}
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as failed:
        failed.callback(_close_all, connections)
        listeners = _listen(rank, size, kinds, host, stack)
        offers = gather({kind: listener.offer for kind, listener in listeners.items()})
        connected = []
        for peer in range(rank):
            for kind, listener in listeners.items():
                if kind in offers[peer] and (kind != "shm" or near is None or peer in near):
                    with contextlib.suppress(OSError):
                        connections[peer] = listener.connect(peer, offers[peer][kind], timeout)
                        connected.append([peer, kind])
                        break
        told = gather(connected)
        for kind, listener in listeners.items():
            expected = [peer for peer, others in enumerate(told) if [rank, kind] in others]
            connections.update(listener.accept(expected, timeout))

        memory = listeners["shm"].symmetric_memory if "shm" in listeners else None
        near_by = sum(each.shares_memory for each in connections.values())
        reports = gather([list(connections), memory is not None and near_by == size - 1])
        for peer in [peer for peer in connections if rank not in reports[peer][0]]:
            connections.pop(peer).close()
        failed.pop_all()
    everywhere = all(has and len(peers) == size - 1 for peers, has in reports)
    shared = memoryview(memory) if memory is not None and everywhere else None
    return dict(sorted(connections.items())), shared


def _listen(
    rank: int, size: int, kinds: Collection[str], host: str | None, stack: contextlib.ExitStack
) -> dict[str, Listener]:
    """Return what this rank offers of `kinds`, the better one first; it ends with the stack."""
    listeners: dict[str, Listener] = {}
    if "shm" in kinds:
        with contextlib.suppress(OSError):
            listeners["shm"] = ShmListener(rank, size, stack)
    if "tcp" in kinds and host is not None:
        with contextlib.suppress(OSError):
            listeners["tcp"] = TcpListener(rank, host, stack)
    return listeners


def _close_all(connections: dict[int, Connection]) -> None:
    for connection in connections.values():
        connection.close()
