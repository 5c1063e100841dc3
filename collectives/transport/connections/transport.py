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

import numpy as np
import torch

from collectives.errors import CollectiveTimeoutError, TransportError, describe
from collectives.transport.base import Message, Transport
from collectives.transport.connections.connection import Bytes, Connection, PeerGone
from collectives.transport.shared_memory.symmetric_memory import RanksDiffer, SymmetricMemory

__all__ = ["ConnectionTransport"]

# Looks at the sockets before sleeping, some 20 us in all: a peer that works in step answers within
# that, and its answer then costs neither side a wake-up.
_SPINS = 10
# After such a wait in a call with a code all peers are told which call it is. The wait doubles each
# time, up to a part of the timeout: probes that a peer has no reason to read remain in its socket.
_PROBE_SECONDS = 0.05
_PROBE_PART = 0.25
# A day; poll counts milliseconds in 32 bits.
_LONGEST_SECONDS = 86400.0
# What telling the peers the cause may take, all of them together.
_FAREWELL_SECONDS = 0.5
# Of those that numpy has, too: its view costs a third of torch's.
_NUMPYS = frozenset((torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8))


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
        # With more ranks than cores a rank that looks again keeps its peer from working.
        cores = _cores()
        near = sum(connection.near for connection in connections.values())
        self._spins = _SPINS if near < len(cores) else 0
        self._patience = _PROBE_SECONDS
        if memory is not None:
            self.symmetric_memory = SymmetricMemory(memory, rank, size, self, cores=cores)
        self._hang_ups = select.poll()
        for connection in self._connections.values():
            self._hang_ups.register(connection, 0)
        _transports.add(self)

    def check_device(self, device: torch.device) -> None:
        """Raise ValueError for devices other than the CPU."""
        if device.type != "cpu":
            raise ValueError(f"tensor is on {device}; connections carry cpu, move it there")

    def exchange(
        self,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        step: str,
        timeout: float,
        code: int = 0,
    ) -> None:
        """Exchange a step's messages: `Transport.exchange`."""
        if self._unusable:
            raise TransportError(f"the connections cannot be used in {step}: {self._unusable}")
        active: dict[int, Connection] = {}
        with self._aborting(step):
            for peer, tensor in sends:
                if tensor.numel():
                    active[peer] = connection = self._connection(peer, step)
                    connection.send(_bytes(tensor), code)
            for peer, tensor in recvs:
                if tensor.numel():
                    active[peer] = connection = self._connection(peer, step)
                    connection.receive(_bytes(tensor), code)
            self._run(list(active.values()), step, timeout, code)

    def flush(self, step: str, timeout: float) -> None:
        """Drop all messages under way: `Transport.flush`."""
        if self._unusable:
            raise TransportError(f"the connections cannot be used in {step}: {self._unusable}")
        connections = list(self._connections.values())
        with self._aborting(step):
            for connection in connections:
                connection.begin_flush()
            self._run(connections, step, timeout)
            for connection in connections:
                connection.end_flush()
            self._patience = _PROBE_SECONDS

    @contextmanager
    def _aborting(self, step: str) -> Iterator[None]:
        """Whatever is raised within is the end, except that the ranks differ."""
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
        spins, probing = self._spins, code != 0
        while connections:
            moved = False
            for connection in connections:
                moved = connection.advance() or moved
            connections = [connection for connection in connections if connection.busy]
            if moved or not connections:
                spins = self._spins
                continue
            if spins:
                spins -= 1
                continue
            nap = min(self._patience, _PROBE_PART * timeout) if probing else math.inf
            if _wait(connections, deadline, nap):
                continue
            if time.monotonic() >= deadline:
                late = ", ".join(f"rank {connection.peer}" for connection in connections)
                raise CollectiveTimeoutError(
                    f"rank {self.rank} got no answer from {late} in {step} within {timeout:.3g} s"
                )
            if probing:
                probing = False
                self._patience = min(2 * self._patience, _PROBE_PART * timeout)
                for connection in self._connections.values():
                    connection.probe(code)

    def gone(self) -> int | None:
        """Return a peer whose end is closed, if any."""
        if self._unusable:
            raise TransportError(f"the connections cannot be used: {self._unusable}")
        closed = {fd for fd, _ in self._hang_ups.poll(0)}
        return next(
            (p for p, connection in self._connections.items() if connection.fileno() in closed),
            None,
        )

    def why_gone(self, peer: int) -> str:
        """Say why the end of a peer that is gone was closed."""
        return self._connections[peer].why_gone()

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


def _bytes(tensor: torch.Tensor) -> Bytes:
    """Return the tensor's memory as bytes, so that every dtype travels."""
    flat = tensor if tensor.dim() == 1 else tensor.reshape(-1)
    if flat.requires_grad:
        flat = flat.detach()
    if flat.dtype not in _NUMPYS:
        if flat.numel() == 1:
            # Contiguous with any stride, but bytes are asked for by one of 1.
            flat = flat.as_strided((1,), (1,))
        flat = flat.view(torch.uint8)
    return flat.numpy().view(np.uint8)


_transports: weakref.WeakSet[ConnectionTransport] = weakref.WeakSet()


def _detach_all() -> None:
    for transport in list(_transports):
        transport.detach()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_detach_all)
