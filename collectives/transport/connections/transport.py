"""Messages of CPU tensors over connections: through memory to ranks of this host, otherwise TCP.

connect.py opens connections at start, unopened.py when they are first used; shm.py and tcp.py are
the two kinds. Messages to ranks without a connection, and those of other devices' tensors, go
through another transport.
"""

from __future__ import annotations

import ctypes
import os
import select
import time
import weakref
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import torch

from collectives.errors import CollectiveTimeoutError, TransportError, describe
from collectives.stall import Stall, warning_seconds
from collectives.transport.base import Message, Messages, Transport
from collectives.transport.byte_gathering import gather_objects
from collectives.transport.connections.connect import (
    KINDS,
    descriptors_of,
    neighbours,
    open_connections,
)
from collectives.transport.connections.connection import Connection, PeerGone
from collectives.transport.connections.waiting import ENDED, first_reason, wait_for_any
from collectives.transport.descriptors import shortage
from collectives.transport.members import Members
from collectives.transport.shared_memory.symmetric_memory import SymmetricMemory

# How often a wait checks for interrupts, and for ranks that have ended before they connected.
_INTERRUPT_SECONDS = 0.1
# A Stall is made only after a wait of this length: a short one needs none.
_FIRST_SECONDS = 0.5
# The longest time for sending the reason to all peers, some of which may not be reading.
_REASON_SECONDS = 0.5
# How long to wait until the ranks in between pass on the reason of a rank that this one was not
# connected to. Short of the 5 s after the timeout within which every rank is to raise its error.
_PASS_ON_SECONDS = 1.0


class ConnectionTransport(Transport):
    """Point-to-point messages over connections if there are any, and all others through `other`.

    Making one is a collective of all ranks of `other`.

    One exchange may use both, first `other` and then connections. That cannot deadlock: every rank
    uses them in this order, and `other` waits for no message of a connection.

    After a failed exchange it is unusable, and the peers get the reason, so that they fail with it
    at once instead of waiting. In a forked child it is unusable; the parent's is not affected.

    Ranks tell each other how to connect over `through`, `other` unless given; the other arguments
    are those of `open_connections`.

    Attributes:
        connected_peers: The ranks to which there is a connection, open already or not.
        memory_peers: The ranks to which there is one through memory.
    """

    symmetric_memory: SymmetricMemory | None = None

    def __init__(
        self,
        other: Transport,
        timeout: float,
        *,
        kinds: Collection[str] = KINDS,
        store_host: str = "localhost",
        near: Collection[int] | None = None,
        through: Transport | None = None,
    ) -> None:
        self.rank = other.rank
        self.size = other.size
        self.names = other.names
        self.process_group = other.process_group
        self.device = other.device
        self._other = other
        self._kinds = tuple(kinds)
        self._store_host = store_host
        self._unusable = ""
        self._connections, memory, self._unopened, self._complete = open_connections(
            other if through is None else through,
            timeout,
            kinds=kinds if self.size > 1 else (),
            store_host=store_host,
            near=near,
        )
        self.connected_peers = frozenset(self._connections)
        if self._unopened is not None:
            self.connected_peers = frozenset({*range(self.size)} - {self.rank})
        self.memory_peers = frozenset(
            peer for peer, each in self._connections.items() if each.shares_memory
        )
        if memory is not None:
            self.symmetric_memory = SymmetricMemory(
                memory, self.rank, self.size, self, cores=_cores()
            )
        _transports.add(self)

    def __repr__(self) -> str:
        shared, connected = len(self.memory_peers), len(self.connected_peers)
        counts = {
            "shared memory": shared,
            "TCP": connected - shared,
            repr(self._other): self.size - 1 - connected,
        }
        peers = [f"{kind} to {count}" for kind, count in counts.items() if count]
        return f"ConnectionTransport({', '.join(peers)})"

    def check_device(self, device: torch.device) -> None:
        self._other.check_device(device)

    def exchange(self, sends: Messages, recvs: Messages, step: str, timeout: float) -> None:
        if self._unusable:
            raise TransportError(f"the connections cannot be used in {step}: {self._unusable}")
        active: dict[int, Connection] = {}
        far: tuple[list[Message], list[Message]] = ([], [])
        try:
            if self._interrupted:
                self.check_interrupt(step)
            for sending, messages in ((True, sends), (False, recvs)):
                for message in messages:
                    peer, tensor = message
                    if not tensor.is_cpu or peer not in self.connected_peers:
                        far[not sending].append(message)
                    elif nbytes := tensor.nbytes:
                        connection = self._connections.get(peer)
                        if connection is None:
                            assert self._unopened is not None
                            connection = self._unopened.open(peer, self._connections)
                        active[peer] = connection
                        # Not by Tensor.numpy(), after which torch refuses to resize the tensor's
                        # storage. The array keeps the tensor alive.
                        memory: Any = (ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())
                        memory.tensor = tensor
                        data = np.frombuffer(memory, np.uint8)
                        (connection.send if sending else connection.receive)(data)
            if far[0] or far[1]:
                start = time.monotonic()
                self._other.exchange(*far, step, timeout)
                timeout = max(start + timeout - time.monotonic(), 0.0)
            for connection in active.values():
                connection.advance()
            if busy := [each for each in active.values() if each.busy]:
                self._run(busy, step, timeout)
        except BaseException as error:
            self._fail(error, step)
            raise

    def _fail(self, error: BaseException, step: str) -> None:
        """Abort after an error in a step; if a peer is gone, raise a CollectiveTimeoutError."""
        if not isinstance(error, PeerGone):
            self.abort(describe(error))
            return
        reason = str(error)
        if not error.reason and error.peer not in neighbours(self.rank, self.size):
            # It may have ended because of another rank, whose reason the ranks in between pass on.
            reason = first_reason([*self._connections.values()], _PASS_ON_SECONDS) or reason
        self.abort(reason)
        raise CollectiveTimeoutError(
            f"{self.me} got no answer from {self.named([error.peer])} in {step}: {reason}"
        ) from None

    def _run(self, connections: list[Connection], step: str, timeout: float) -> None:
        """Advance the connections until none is busy."""
        deadline = time.monotonic() + timeout
        nap, waited = min(_FIRST_SECONDS, warning_seconds()), 0.0
        stall: Stall | None = None

        def late() -> str:
            return self.named(connection.peer for connection in connections)

        while connections:
            moved = False
            for connection in connections:
                moved = connection.advance() or moved
            connections = [connection for connection in connections if connection.busy]
            if self._interrupted:
                self.check_interrupt(step)
            if moved:
                waited = 0.0
                if stall is not None:
                    stall.restart()
            slept = min(nap, _INTERRUPT_SECONDS)
            if moved or not connections:
                continue
            if wait_for_any(connections, deadline, slept, self._unopened):
                if self._unopened is not None and not all(each.is_open for each in connections):
                    self._unopened.accept(self._connections)
                continue
            waited += slept
            if time.monotonic() >= deadline:
                raise CollectiveTimeoutError(
                    f"{self.me} got no answer from {late()} in {step} within {timeout:.3g} s"
                )
            for connection in connections:
                if self._has_not_come(connection):
                    raise PeerGone(connection.peer, connection.name)
            if waited < nap:
                continue
            if stall is None:
                since = time.monotonic() - waited
                stall = Stall(self.name(self.rank), step, timeout, late, since)
            nap, waited = stall.check(), 0.0
        if stall is not None:
            stall.end()

    def _has_not_come(self, connection: Connection) -> bool:
        """Return whether the peer has ended before it connected to this rank."""
        # Without a socket its end can only be noticed because its listener refuses connections.
        if connection.is_open or not self._refuses(connection.peer):
            return False
        assert self._unopened is not None
        # It may have connected, sent its messages and ended since the last look.
        self._unopened.accept(self._connections)
        return not connection.is_open

    def _refuses(self, peer: int) -> bool:
        return self._unopened is not None and self._unopened.refuses(peer)

    def gone(self, peers: Collection[int] | None = None) -> int | None:
        """Return a peer that has closed its end, if any: `Transport.gone`.

        Ranks to which no connection is open yet are checked only if they are in `peers`.
        """
        if self._unusable:
            raise TransportError(f"the connections cannot be used: {self._unusable}")
        self.check_interrupt("a wait for all ranks")
        # A copy: the rank's own thread may add connections meanwhile.
        connections = dict(self._connections)
        asked = connections.keys() if peers is None else {*peers} & self.connected_peers
        hang_ups = select.poll()
        found = {}
        for peer in asked:
            connection = connections.get(peer)
            if connection is not None and connection.is_open:
                found[connection.fileno()] = peer
                hang_ups.register(connection, ENDED)
            elif peers is not None and self._refuses(peer):
                return peer
        closed = {fd for fd, _ in hang_ups.poll(0)}
        return next((peer for fd, peer in found.items() if fd in closed), None)

    def why_gone(self, peer: int) -> str:
        connection = self._connections.get(peer)
        if connection is None or not connection.is_open:
            return str(PeerGone(peer, self.name(peer)))
        return str(connection.gone())

    def split(self, ranks: Sequence[int], timeout: float) -> ConnectionTransport:
        """Split `other`, and open new connections between these ranks."""
        near = [new for new, old in enumerate(ranks) if old in self.memory_peers]
        with ExitStack() as failed:
            # By our own connections if all ranks have them, so that gloo need not connect.
            members = Members(self, ranks) if self._complete else None
            if members is not None:
                self._check_room(members, len(near), timeout)
            other = self._other.split(ranks, timeout)
            failed.callback(other.close)
            part = ConnectionTransport(
                other,
                timeout,
                kinds=self._kinds,
                store_host=self._store_host,
                near=near,
                through=members,
            )
            failed.pop_all()
        return part

    def _check_room(self, members: Members, near: int, timeout: float) -> None:
        """Raise TransportError if a rank cannot open the connections that a part needs at start."""
        far = members.size - 1 - near
        # Raise the limit for all connections, as far as the system allows. Only those at start are
        # required: the others are opened by the algorithms that use them.
        shortage(descriptors_of(near, far))
        at_start = min(len(neighbours(members.rank, members.size)), far)
        short = shortage(descriptors_of(near, at_start))
        for rank, missing in enumerate(gather_objects(short, members, timeout)):
            if missing:
                raise TransportError(f"rank {members.name(rank)} cannot split its group: {missing}")

    def interrupt(self, reason: str) -> None:
        super().interrupt(reason)
        self._other.interrupt(reason)

    def abort(self, reason: str) -> None:
        """Give the peers the reason and close every connection."""
        if self.symmetric_memory is not None:
            self.symmetric_memory.withdraw()
        with ExitStack() as stack:
            stack.callback(self._other.abort, reason)
            stack.callback(self._close_connections, reason)
            # Ranks that have connected meanwhile are to get the reason, too.
            if self._unopened is not None and not self._unusable:
                with suppress(TransportError):
                    self._unopened.accept(self._connections)
            connections = list(self._connections.values())
            deadline = time.monotonic() + _REASON_SECONDS
            while connections := [each for each in connections if not each.send_reason(reason)]:
                if not wait_for_any(connections, deadline):
                    break

    def close(self) -> None:
        """Close `other` and every connection. What was sent before still arrives."""
        with ExitStack() as stack:
            stack.callback(self._other.close)
            self._close_connections(f"{self.me} has closed it")

    def _close_connections(self, reason: str) -> None:
        self._unusable = self._unusable or reason
        self.symmetric_memory = None
        for connection in self._connections.values():
            connection.close()
        if self._unopened is not None:
            self._unopened.close()

    def detach(self) -> None:
        """In a forked child: close its copies of the sockets, which would outlive the parent."""
        self._unusable = "this process was forked from a rank; only the rank itself can use it"
        self.symmetric_memory = None
        for connection in self._connections.values():
            connection.detach()
        if self._unopened is not None:
            self._unopened.close()


def _cores() -> set[int]:
    """Return the numbers of the processors on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


# All transports of this process, for the hook that runs after a fork.
_transports: weakref.WeakSet[ConnectionTransport] = weakref.WeakSet()


def _detach_all() -> None:
    for transport in list(_transports):
        transport.detach()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_detach_all)
