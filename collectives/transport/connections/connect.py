"""Open the connections of a group: through shared memory on one host, otherwise over TCP."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeAlias

from collectives.transport.base import Transport
from collectives.transport.byte_gathering import gather_objects
from collectives.transport.connections.connection import Connection
from collectives.transport.connections.listener import Listener
from collectives.transport.connections.shm_listener import ShmListener
from collectives.transport.connections.tcp_listener import TcpListener, find_address
from collectives.transport.connections.unopened import Unopened

_logger = logging.getLogger(__name__)

KINDS = ("shm", "tcp")
# By rank: the class of the error, and its text.
Refusals: TypeAlias = dict[int, tuple[type[OSError], str]]


# Descriptors in addition to those of the connections: of the symmetric memory, two listeners, a
# socket that a listener has just accepted, a memory that is being sent, and gloo's listener.
_BESIDE = 6


def neighbours(rank: int, size: int) -> set[int]:
    """Return the ranks to which one connects at start: at distances 1, 2, 4, ..., both ways.

    Every call's negotiation needs these. Any rank is reached from any other one in at most log2 n
    steps over them, so that all ranks learn the reason when one has ended.
    """
    distances = [1 << bit for bit in range((size - 1).bit_length())]
    return {(rank + way * each) % size for each in distances for way in (-1, 1)} - {rank}


def descriptors_of(near: int, far: int) -> int:
    """Return how many descriptors a rank's connections need at most.

    Each of the `near` peers, which share memory with it, takes two: the socket's, and the memory's,
    which mmap duplicates. The `far` ones are connected over TCP.
    """
    return 2 * near + far + _BESIDE


Opened: TypeAlias = tuple[dict[int, Connection], memoryview | None, Unopened | None, bool]
"""The attributes of an `_Opening`, in their order."""


def open_connections(
    other: Transport,
    timeout: float,
    *,
    kinds: Collection[str] = KINDS,
    store_host: str = "localhost",
    near: Collection[int] | None = None,
) -> Opened:
    """Open connections, of the best kind that both ranks offer and that works. A collective.

    They are opened through memory to all ranks of this host, and over TCP to `neighbours`; over TCP
    to further ranks when they are first used. Either both ranks of a pair get a connection or
    neither does: there is none if the system refuses sockets, memory or descriptors. If that is so
    for any neighbour over TCP, no rank opens connections later. A rank listens over TCP only if it
    shares no memory with some rank.

    Args:
        other: A transport between the ranks, over which they tell each other how to connect.
        timeout: Seconds that a peer's answer may take.
        kinds: The kinds that this rank offers.
        store_host: As `find_address` takes it.
        near: The ranks with which to share memory, symmetrically; all unless given.
    """
    everyone = {*range(other.size)} - {other.rank}
    opening = _Opening(other, timeout)
    with contextlib.ExitStack() as failed:
        failed.callback(opening.close)
        wanted = everyone & (everyone if near is None else {*near}) if "shm" in kinds else set()
        opening.through_memory(wanted)
        if not opening.complete:
            wanted = everyone - opening.connections.keys() if "tcp" in kinds else set()
            opening.over_tcp(wanted, store_host, failed)
        failed.pop_all()
    for peer, connection in opening.connections.items():
        connection.name = other.name(peer)
    connections = dict(sorted(opening.connections.items()))
    return connections, opening.memory, opening.unopened, opening.complete


class _Opening:
    """What one rank has opened so far.

    Attributes:
        connections: The open connections by peer.
        memory: Memory that all ranks share, zeros at first; on all ranks or on none. It needs
            connections through memory between all ranks, and the system to provide it.
        unopened: The connections that are opened when they are first used, if any.
        complete: Whether every rank has a connection to every other one, or can open it.
    """

    def __init__(self, other: Transport, timeout: float) -> None:
        self.connections: dict[int, Connection] = {}
        self.memory: memoryview | None = None
        self.unopened: Unopened | None = None
        self.complete = False
        self._other = other
        self._timeout = timeout

    def through_memory(self, wanted: Collection[int]) -> None:
        """Open connections through memory; complete if they are all that there are."""
        rank, size = self._other.rank, self._other.size
        with contextlib.ExitStack() as stack:
            listener = None
            with contextlib.suppress(OSError):
                listener = ShmListener(rank, size, stack) if wanted else None
            reports = self._connect(listener, self._offers(listener), wanted)
            self.complete = all(len(peers) == size - 1 for peers, _ in reports)
            memory = None if listener is None else listener.symmetric_memory
            if memory is not None and self.complete and all(has for _, has in reports):
                self.memory = memoryview(memory)

    def over_tcp(self, wanted: set[int], store_host: str, failed: contextlib.ExitStack) -> None:
        """Open connections over TCP to neighbours; keep the listener for others, till `failed`."""
        rank, size = self._other.rank, self._other.size
        host = find_address(store_host if wanted else None, self._gather)
        with contextlib.ExitStack() as stack:
            listener = None
            with contextlib.suppress(OSError):
                listener = None if host is None else TcpListener(rank, host, stack)
            offers = self._offers(listener)
            reports = self._connect(listener, offers, wanted & neighbours(rank, size))
            if all(len(peers) == size - 1 for peers, _ in reports):
                self.complete = True
                return
            listen = all(offer is not None and offer[0] == TcpListener.FORMAT for offer in offers)
            self.complete = listen and all(
                neighbours(each, size) <= {*peers} for each, (peers, _) in enumerate(reports)
            )
            left = {*range(size)} - {rank} - self.connections.keys()
            if self.complete and listener is not None and left:
                own = {peer: offers[peer] for peer in left}
                self.unopened = Unopened(rank, self._other.name, listener, own)
                # The listener must then live on: its stack becomes part of the outer one.
                failed.push(stack.pop_all())

    def close(self) -> None:
        """Close what was opened."""
        for connection in self.connections.values():
            connection.close()

    def _gather(self, value: Any) -> list[Any]:
        return gather_objects(value, self._other, self._timeout)

    def _offers(self, listener: Listener | None) -> list[Any]:
        return self._gather(None if listener is None else listener.offer)

    def _connect(
        self, listener: Listener | None, offers: list[Any], wanted: Collection[int]
    ) -> list[Any]:
        """Add connections of one kind: to those ranks of `wanted` that offer them.

        Of two ranks the higher one connects to the lower one. By rank, the peers that it has
        connections to, and whether it has memory that all share, are returned.
        """
        rank, connected = self._other.rank, []
        refused: Refusals = {}
        for peer in range(rank):
            if listener is not None and offers[peer] is not None and peer in wanted:
                try:
                    self.connections[peer] = listener.connect(peer, offers[peer], self._timeout)
                    connected.append(peer)
                except OSError as error:
                    # Not the error itself: its traceback would keep alive what has to be closed.
                    refused[peer] = type(error), str(error)
        if listener is not None:
            _warn_of_refusals(rank, listener, refused)
        reached = self._gather(connected)
        if listener is not None:
            expected = [peer for peer, others in enumerate(reached) if rank in others]
            self.connections.update(listener.accept(expected, self._timeout))
        has = listener is not None and listener.symmetric_memory is not None
        everyone = len(self.connections) == self._other.size - 1
        reports = self._gather([list(self.connections), has and everyone])
        # Close those that the peer does not have.
        for peer in [peer for peer in self.connections if rank not in reports[peer][0]]:
            self.connections.pop(peer).close()
        return reports


def _warn_of_refusals(rank: int, listener: Listener, refused: Refusals) -> None:
    """Log why this rank has no connections of a kind to ranks that offered them."""
    near = isinstance(listener, ShmListener)
    if near:
        # A refusal is the usual answer on different hosts, which cannot share memory anyway.
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
    """Return the limit of waiting connections and how to raise it; "" if the system hides it."""
    try:
        limit = Path("/proc/sys/net/core/somaxconn").read_text().strip()
    except OSError:
        return ""
    return f": net.core.somaxconn is {limit} here, and sysctl -w net.core.somaxconn=... raises it"
