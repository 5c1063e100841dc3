"""Messages of CPU tensors over connections: through memory to ranks of this host, else over TCP.

connect.py opens the connections, shm.py and tcp.py are one kind each; hybrid.py adds another
transport for the ranks to which there is no connection, and for other devices.
"""

from __future__ import annotations

import math
import os
import select
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch

from collectives.errors import CollectiveTimeoutError, TransportError, describe
from collectives.transport.base import Messages, Transport, as_bytes
from collectives.transport.connections.connection import Connection, PeerGone
from collectives.transport.shared_memory.symmetric_memory import RanksDiffer, SymmetricMemory

# After such a wait in an exchange with a code all peers are told which call it is.
_PROBE_SECONDS = 0.05
# A day; poll counts milliseconds in 32 bits.
_LONGEST_SECONDS = 86400.0
# What telling the peers the cause may take, all of them together.
_FAREWELL_SECONDS = 0.5


class ConnectionTransport(Transport):
    """Point-to-point messages over connections.

    After a failed exchange it is unusable, and the peers are told the cause, so that they fail with
    it at once instead of waiting. In a forked child it is unusable; the parent's is not touched.

    Args:
        rank: This rank.
        size: How many ranks there are.
        connections: By peer.
        memory: What the symmetric memory of all ranks lies in, where there are connections to all.

    Attributes:
        peers: The ranks to which there is a connection.
        memory_peers: Those to which there is one through memory.
    """

    symmetric_memory: SymmetricMemory | None = None

    def __init__(
        self,
        rank: int,
        size: int,
        connections: Mapping[int, Connection],
        memory: memoryview | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.peers = frozenset(connections)
        self.memory_peers = frozenset(
            peer for peer, each in connections.items() if each.shares_memory
        )
        self.carries_codes = len(connections) == size - 1
        self._connections = dict(connections)
        self._unusable = ""
        if memory is not None:
            self.symmetric_memory = SymmetricMemory(memory, rank, size, self, cores=_cores())
        _transports.add(self)

    def check_device(self, device: torch.device) -> None:
        """Raise ValueError for devices other than the CPU."""
        if device.type != "cpu":
            raise ValueError(f"tensor is on {device}; connections carry cpu, move it there")

    def exchange(
        self, sends: Messages, recvs: Messages, step: str, timeout: float, code: int = 0
    ) -> None:
        """Exchange a step's messages: `Transport.exchange`."""
        active: dict[int, Connection] = {}
        with self._aborting(step):
            for messages, post in ((sends, Connection.send), (recvs, Connection.receive)):
                for peer, tensor in messages:
                    if tensor.numel():
                        active[peer] = connection = self._connection(peer, step)
                        post(connection, as_bytes(tensor).numpy(), code)
            self._run(list(active.values()), step, timeout, code)

    def flush(self, step: str, timeout: float) -> None:
        """Drop all messages under way: `Transport.flush`."""
        connections = list(self._connections.values())
        with self._aborting(step):
            for connection in connections:
                connection.begin_flush()
            self._run(connections, step, timeout)
            for connection in connections:
                connection.end_flush()

    @contextmanager
    def _aborting(self, step: str) -> Iterator[None]:
        """Whatever is raised within is the end, except that the ranks differ."""
        if self._unusable:
            raise TransportError(f"the connections cannot be used in {step}: {self._unusable}")
        try:
            yield
        except RanksDiffer:
            raise
        except PeerGone as gone:
            self.abort(str(gone))
            raise CollectiveTimeoutError(
                f"rank {self.rank} got no answer from rank {gone.peer} in {step}: {gone}"
            ) from None
        except BaseException as error:
            self.abort(describe(error))
            raise

    def _connection(self, peer: int, step: str) -> Connection:
        if peer not in self._connections:
            raise TransportError(f"rank {self.rank} has no connection to rank {peer} for {step}")
        return self._connections[peer]

    def _run(self, connections: list[Connection], step: str, timeout: float, code: int = 0) -> None:
        """Advance the connections until none is busy."""
        deadline = time.monotonic() + timeout
        nap = _PROBE_SECONDS if code else math.inf
        while connections:
            moved = [connection.advance() for connection in connections]
            connections = [connection for connection in connections if connection.busy]
            if any(moved) or not connections or _wait(connections, deadline, nap):
                continue
            if time.monotonic() >= deadline:
                late = ", ".join(f"rank {connection.peer}" for connection in connections)
                raise CollectiveTimeoutError(
                    f"rank {self.rank} got no answer from {late} in {step} within {timeout:.3g} s"
                )
            # Once: probes that a peer has no reason to read remain in its socket.
            nap = math.inf
            for connection in self._connections.values():
                connection.probe(code)

    def gone(self) -> int | None:
        """Return a peer whose end is closed, if any."""
        if self._unusable:
            raise TransportError(f"the connections cannot be used: {self._unusable}")
        hang_ups = select.poll()
        for connection in self._connections.values():
            hang_ups.register(connection, 0)
        closed = {fd for fd, _ in hang_ups.poll(0)}
        return next((p for p, each in self._connections.items() if each.fileno() in closed), None)

    def why_gone(self, peer: int) -> str:
        """Say why the end of a peer that is gone was closed."""
        return str(self._connections[peer].gone())

    def split(self, ranks: Sequence[int], timeout: float) -> NoReturn:
        """Raise TransportError: what opens connections stands beside them."""
        raise TransportError("connections alone cannot be split: HybridTransport opens new ones")

    def abort(self, reason: str) -> None:
        """Close every connection and tell the peers why."""
        self._unusable = self._unusable or reason
        if self.symmetric_memory is not None:
            self.symmetric_memory.withdraw()
        self.symmetric_memory = None
        connections = list(self._connections.values())
        deadline = time.monotonic() + _FAREWELL_SECONDS
        try:
            while connections := [
                connection for connection in connections if not connection.send_farewell(reason)
            ]:
                if not _wait(connections, deadline):
                    break
        finally:
            for connection in self._connections.values():
                connection.close()

    def close(self) -> None:
        """Close every connection. What was sent before still arrives."""
        self._unusable = self._unusable or f"rank {self.rank} has closed it"
        self.symmetric_memory = None
        for connection in self._connections.values():
            connection.close()

    def detach(self) -> None:
        """In a forked child: let go of the parent's sockets, which would outlive the parent."""
        self._unusable = "this process was forked from a rank; only the rank itself can use it"
        self.symmetric_memory = None
        for connection in self._connections.values():
            connection.detach()


def _cores() -> set[int]:
    """Return the processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _wait(connections: Sequence[Connection], deadline: float, nap: float = math.inf) -> bool:
    """Sleep to the deadline, or for `nap` seconds; True at once where a connection can go on."""
    left = min(deadline - time.monotonic(), nap, _LONGEST_SECONDS)
    if left <= 0:
        return False
    poller = select.poll()
    for connection in connections:
        poller.register(connection, connection.events)
    return bool(poller.poll(math.ceil(left * 1e3)))


_transports: weakref.WeakSet[ConnectionTransport] = weakref.WeakSet()


def _detach_all() -> None:
    for transport in list(_transports):
        transport.detach()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_detach_all)
