"""How the ranks of a group open connections: through memory on one host, else over TCP."""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from collectives.transport.base import Transport
from collectives.transport.byte_gathering import gather_objects
from collectives.transport.connections.connection import Connection
from collectives.transport.connections.listener import Listener
from collectives.transport.connections.shm_listener import ShmListener
from collectives.transport.connections.tcp_listener import TcpListener, find_address
from collectives.transport.connections.unopened import Unopened

_logger = logging.getLogger(__name__)

KINDS = ("shm", "tcp")
# By rank: the kind of error, and its text.
Refusals: TypeAlias = dict[int, tuple[type[OSError], str]]


# Beside those of connections: the symmetric memory's, two listeners' and one that a listener has
# accepted, a memory's own on its way, and a listener of gloo's.
_BESIDE = 6


def neighbours(rank: int, size: int) -> set[int]:
    """Return the ranks to which one connects at start: those 1, 2, 4, ... further, both ways.

    These are the ones that every call's negotiation needs, and from each to each other one it is
    no more than log2 n steps: by them all ranks learn why one has ended.
    """
    distances = [1 << bit for bit in range((size - 1).bit_length())]
    return {(rank + way * each) % size for each in distances for way in (-1, 1)} - {rank}


def descriptors_of(near: int, far: int) -> int:
    """Return how many descriptors a rank's connections need at most.

    Args:
        near: Peers that it shares memory with: a socket, and the memory's, which mmap keeps.
        far: Those over TCP.
    """
    return 2 * near + far + _BESIDE


class Opened(NamedTuple):
    """What `open_connections` returns.

    Attributes:
        connections: By peer.
        memory: Zeros that all ranks share, on every rank or on none: where all have connections
            through memory to all, and the system gave it.
        unopened: Those that are opened when they are first used, if any.
        complete: Whether every rank has a connection to every other one, or can open it.
    """

    connections: dict[int, Connection]
    memory: memoryview | None
    unopened: Unopened | None
    complete: bool


def open_connections(
    other: Transport,
    timeout: float,
    *,
    kinds: Collection[str] = KINDS,
    store_host: str = "localhost",
    near: Collection[int] | None = None,
) -> Opened:
    """Open connections of the best kind that both ranks offer and that works.

    A collective. Through memory to all ranks of this host, over TCP to `neighbours`; to further
    ranks when they are first used. Both ranks of a pair get a connection, or neither does: where
    the system refuses sockets, memory or descriptors, there is none, and where that is so for any
    of the neighbours over TCP, none is opened later. A rank listens over TCP only where there is a
    rank that it shares no memory with.

    Args:
        other: A transport between the ranks, over which they say how to connect.
        timeout: Seconds that a peer's answer may take.
        kinds: What this rank offers.
        store_host: As `find_address` takes it.
        near: The ranks to share memory with, symmetrically; all unless given.
    """

    def gather(value: Any) -> list[Any]:
        return gather_objects(value, other, timeout)

    rank, size = other.rank, other.size
    everyone = {*range(size)} - {rank}
    connections: dict[int, Connection] = {}
    memory: mmap.mmap | None = None
    unopened: Unopened | None = None
    whole = complete = False
    with contextlib.ExitStack() as failed:
        failed.callback(_close_all, connections)
        for kind in KINDS:
            wanted = everyone - connections.keys() if kind in kinds else set()
            host = None
            if kind == "shm":
                wanted &= everyone if near is None else {*near}
            else:
                host = find_address(store_host if wanted else None, gather)
            with contextlib.ExitStack() as stack:
                listener = _listen(kind, rank, size, host, stack) if wanted else None
                offers = gather(None if listener is None else listener.offer)
                at_start = wanted if kind == "shm" else wanted & neighbours(rank, size)
                _connect(listener, offers, at_start, connections, rank, timeout, gather)
                if kind == "shm" and listener is not None:
                    memory = listener.symmetric_memory
                near_by = sum(each.shares_memory for each in connections.values())
                reports = gather([list(connections), memory is not None and near_by == size - 1])
                for peer in [peer for peer in connections if rank not in reports[peer][0]]:
                    connections.pop(peer).close()
                whole = complete = all(len(peers) == size - 1 for peers, _ in reports)
                if kind == "tcp" and not whole:
                    complete = all(
                        offer is not None and offer[0] == TcpListener.FORMAT for offer in offers
                    ) and all(
                        neighbours(each, size) <= {*peers}
                        for each, (peers, _) in enumerate(reports)
                    )
                    if complete and isinstance(listener, TcpListener):
                        left = {peer: offers[peer] for peer in everyone - connections.keys()}
                        if left:
                            unopened = Unopened(listener, left)
                            failed.push(stack.pop_all())
            if whole:
                break
        failed.pop_all()
    everywhere = whole and all(has for _, has in reports)
    mapped = memoryview(memory) if memory is not None and everywhere else None
    return Opened(dict(sorted(connections.items())), mapped, unopened, complete)


def _connect(
    listener: Listener | None,
    offers: list[Any],
    wanted: Collection[int],
    connections: dict[int, Connection],
    rank: int,
    timeout: float,
    gather: Callable[[Any], list[Any]],
) -> None:
    """Add connections of one kind to `connections`: to those of `wanted` that offer them.

    A rank connects to the lower ones, and the higher ones connect to it.
    """
    connected = []
    refused: Refusals = {}
    for peer in range(rank):
        if listener is not None and offers[peer] is not None and peer in wanted:
            try:
                connections[peer] = listener.connect(peer, offers[peer], timeout)
                connected.append(peer)
            except OSError as error:
                # Not the error itself, whose traceback would hold what has to be closed.
                refused[peer] = type(error), str(error)
    if listener is not None:
        _warn_of_refusals(rank, listener, refused)
    reached = gather(connected)
    if listener is not None:
        expected = [peer for peer, others in enumerate(reached) if rank in others]
        connections.update(listener.accept(expected, timeout))


def _warn_of_refusals(rank: int, listener: Listener, refused: Refusals) -> None:
    """Log why this rank has no connections of a kind to ranks that offered them."""
    near = isinstance(listener, ShmListener)
    if near:
        # The usual answer from another host, whose memory nobody expects to share.
        refused = {
            peer: why
            for peer, why in refused.items()
            if not issubclass(why[0], ConnectionRefusedError)
        }
    if not refused:
        return
    peer, (kind, text) = next(iter(refused.items()))
    why = f"{kind.__name__}: {text}"
    if issubclass(kind, BlockingIOError | TimeoutError):
        why += f"; as when more ranks connect at once than its host lets wait{_backlog()}"
    _logger.warning(
        "rank %d has no connection %s to ranks %s, and takes a slower way: rank %d did not answer "
        "(%s)",
        rank,
        "through shared memory" if near else "over TCP",
        list(refused),
        peer,
        why,
    )


def _backlog() -> str:
    """Return the limit of waiting connections and how to raise it, where the system tells."""
    try:
        limit = Path("/proc/sys/net/core/somaxconn").read_text().strip()
    except OSError:
        return ""
    return f": net.core.somaxconn is {limit} here, and sysctl -w net.core.somaxconn=... raises it"


def _listen(
    kind: str, rank: int, size: int, host: str | None, stack: contextlib.ExitStack
) -> Listener | None:
    """Return what offers connections of a kind, until the stack ends; None where none can be."""
    with contextlib.suppress(OSError):
        if kind == "shm":
            return ShmListener(rank, size, stack)
        if host is not None:
            return TcpListener(rank, host, stack)
    return None


def _close_all(connections: dict[int, Connection]) -> None:
    for connection in connections.values():
        connection.close()
