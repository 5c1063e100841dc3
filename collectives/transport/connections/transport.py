"""Messages between CPU tensors over connections: through memory to ranks of this host, else TCP.

connect.py opens the connections, shm.py and tcp.py are one kind each. Messages to ranks to which
there is no connection, and those of other devices, go through another transport.
"""

from __future__ import annotations

import ctypes
import os
import select
import time
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from collectives.errors import CollectiveTimeoutError, TransportError, describe
from collectives.stall import Stall
from collectives.transport.base import Message, Messages, Transport
from collectives.transport.byte_gathering import gather_objects
from collectives.transport.connections.connect import KINDS, descriptors_of, open_connections
from collectives.transport.connections.connection import Bytes, Connection, PeerGone
from collectives.transport.connections.part import Shared, channel_numbers
from collectives.transport.connections.tcp import TcpConnection
from collectives.transport.connections.waker import Waker, wait_for_any
from collectives.transport.descriptors import shortage
from collectives.transport.members import Members
from collectives.transport.shared_memory.symmetric_memory import SymmetricMemory

# How often a wait looks whether it was interrupted.
_INTERRUPT_SECONDS = 0.1
# After such a wait it may be a stall.
_FIRST_SECONDS = 0.5
# What telling the peers the cause may take, all of them together.
_FAREWELL_SECONDS = 0.5


class ConnectionTransport(Transport):
    """Point-to-point messages over connections, where there are any; all others through `other`.

    Making one is a collective of all ranks of `other`.

    One exchange may use both: first `other`, then connections. That cannot deadlock, because every
    rank does it in this order and neither waits for the other.

    After a failed exchange it is unusable, and the peers are told the cause, so that they fail with
    it at once instead of waiting. In a forked child it is unusable; the parent's is not touched.

    Args:
        other: A transport between all ranks.
        timeout: Seconds that a peer's answer may take.
        kinds: As `open_connections` takes them.
        toward: Likewise.
        near: Likewise.
        shared: What this transport shares with the one that it is split from; nothing unless given.

    Attributes:
        connected_peers: The ranks to which there is a connection.
        memory_peers: Those to which there is one through memory.
    """

    symmetric_memory: SymmetricMemory | None = None

    def __init__(
        self,
        other: Transport,
        timeout: float,
        *,
        kinds: Collection[str] = KINDS,
        toward: str = "localhost",
        near: Collection[int] | None = None,
        shared: Shared | None = None,
    ) -> None:
        self.rank = other.rank
        self.size = other.size
        self.names = other.names
        self.process_group = other.process_group
        self.device = other.device
        self._other = other
        self._kinds = tuple(kinds)
        self._toward = toward
        self._unusable = ""
        # Wakes the thread that uses this transport, once sockets are shared with another one.
        self._waker = shared.waker if shared is not None else None
        self._numbers = shared.numbers if shared is not None else channel_numbers(self.rank)
        self._connections, memory, self._complete = open_connections(
            other if shared is None else shared.members,
            timeout,
            kinds=kinds if self.size > 1 else (),
            toward=toward,
            near=near,
            shared={} if shared is None else shared.connections,
        )
        for peer, connection in self._connections.items():
            connection.name = self.name(peer)
        self.connected_peers = frozenset(self._connections)
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
        """Raise ValueError where `other` does not carry the device's tensors."""
        self._other.check_device(device)

    def exchange(self, sends: Messages, recvs: Messages, step: str, timeout: float) -> None:
        """Exchange a step's messages: `Transport.exchange`."""
        active: dict[int, Connection] = {}
        far_sends: list[Message] = []
        far_recvs: list[Message] = []
        with self._aborting(step):
            for sending, messages, far in ((True, sends, far_sends), (False, recvs, far_recvs)):
                for message in messages:
                    peer, tensor = message
                    if peer not in self._connections or not tensor.is_cpu:
                        far.append(message)
                    elif tensor.numel():
                        active[peer] = connection = self._connections[peer]
                        post = connection.send if sending else connection.receive
                        post(_memory_of(tensor))
            if far_sends or far_recvs:
                start = time.monotonic()
                self._other.exchange(far_sends, far_recvs, step, timeout)
                timeout = max(start + timeout - time.monotonic(), 0.0)
            self._run(list(active.values()), step, timeout)

    @contextmanager
    def _aborting(self, step: str) -> Iterator[None]:
        """Whatever is raised within is the end."""
        if self._unusable:
            raise TransportError(f"the connections cannot be used in {step}: {self._unusable}")
        try:
            yield
        except PeerGone as gone:
            self.abort(str(gone))
            raise CollectiveTimeoutError(
                f"{self.me} got no answer from {self.named([gone.peer])} in {step}: {gone}"
            ) from None
        except BaseException as error:
            self.abort(describe(error))
            raise

    def _run(self, connections: list[Connection], step: str, timeout: float) -> None:
        """Advance the connections until none is busy."""
        deadline = time.monotonic() + timeout
        nap, waited = _FIRST_SECONDS, 0.0
        stall: Stall | None = None

        def late() -> str:
            return self.named(connection.peer for connection in connections)

        while connections:
            moved = [connection.advance() for connection in connections]
            connections = [connection for connection in connections if connection.busy]
            self.check_interrupt(step)
            if stall is not None and any(moved):
                stall.restart()
            slept = min(nap, _INTERRUPT_SECONDS)
            if (
                any(moved)
                or not connections
                or wait_for_any(connections, deadline, slept, self._waker)
            ):
                continue
            waited += slept
            if time.monotonic() >= deadline:
                raise CollectiveTimeoutError(
                    f"{self.me} got no answer from {late()} in {step} within {timeout:.3g} s"
                )
            if waited < nap:
                continue
            if stall is None:
                stall = Stall(self.name(self.rank), step, timeout, late)
            nap, waited = stall.check(), 0.0

    def gone(self, peers: Collection[int] | None = None) -> int | None:
        """Return a peer whose end is closed, if any: `Transport.gone`."""
        if self._unusable:
            raise TransportError(f"the connections cannot be used: {self._unusable}")
        self.check_interrupt("a wait for all ranks")
        asked = self._connections.keys() if peers is None else self._connections.keys() & {*peers}
        hang_ups = select.poll()
        for peer in asked:
            hang_ups.register(self._connections[peer], 0)
        closed = {fd for fd, _ in hang_ups.poll(0)}
        for peer in asked:
            connection = self._connections[peer]
            if connection.fileno() in closed or connection.has_left():
                return peer
        return None

    def why_gone(self, peer: int) -> str:
        """Say why the end of a peer that is gone was closed."""
        return str(self._connections[peer].gone())

    def split(self, ranks: Sequence[int], timeout: float) -> ConnectionTransport:
        """Open new connections through memory, share the sockets over TCP, and split `other`.

        Where a rank has no connection to another one, all of them are new.
        """
        near = [new for new, old in enumerate(ranks) if old in self.memory_peers]
        with ExitStack() as failed:
            shared = self._share(ranks, timeout, failed) if self._complete else None
            other = self._other.split(ranks, timeout)
            failed.callback(other.close)
            part = ConnectionTransport(
                other, timeout, kinds=self._kinds, toward=self._toward, near=near, shared=shared
            )
            failed.pop_all()
        return part

    def _share(self, ranks: Sequence[int], timeout: float, failed: ExitStack) -> Shared:
        """Return what the part of these ranks shares; `failed` ends it."""
        members = Members(self, ranks)
        far = {
            new: connection
            for new, old in enumerate(ranks)
            if isinstance(connection := self._connections.get(old), TcpConnection)
        }
        short = shortage(descriptors_of(len(ranks) - 1 - len(far), 0))
        told = gather_objects([next(self._numbers), short], members, timeout)
        for rank, (_, missing) in zip(ranks, told, strict=True):
            if missing:
                raise TransportError(f"rank {self.name(rank)} cannot split its group: {missing}")
        # The first rank's number: no two channels of a socket have the same, whoever counts.
        number = told[0][0]
        if not far:
            return Shared(members, self._numbers, {}, None)
        waker = Waker()
        failed.callback(waker.close)
        self._waker = self._waker or Waker()
        connections = {}
        for new, connection in far.items():
            connection.waker = self._waker
            connections[new] = connection.channel(new, number, waker)
            failed.callback(connections[new].close)
        return Shared(members, self._numbers, connections, waker)

    def interrupt(self, reason: str) -> None:
        """Let this rank's waits raise: `Transport.interrupt`."""
        super().interrupt(reason)
        memory = self.symmetric_memory
        if memory is not None:
            memory.withdraw()
        self._other.interrupt(reason)

    def abort(self, reason: str) -> None:
        """Close every connection and tell the peers why."""
        if self.symmetric_memory is not None:
            self.symmetric_memory.withdraw()
        connections = list(self._connections.values())
        deadline = time.monotonic() + _FAREWELL_SECONDS
        with ExitStack() as stack:
            stack.callback(self._other.abort, reason)
            stack.callback(self._close_connections, reason)
            while connections := [each for each in connections if not each.send_farewell(reason)]:
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
        if self._waker is not None:
            self._waker.close()

    def detach(self) -> None:
        """In a forked child: let go of the parent's sockets, which would outlive the parent."""
        self._unusable = "this process was forked from a rank; only the rank itself can use it"
        self.symmetric_memory = None
        for connection in self._connections.values():
            connection.detach()
        if self._waker is not None:
            self._waker.close()


def _memory_of(tensor: torch.Tensor) -> Bytes:
    """Return the memory of a contiguous tensor on the host, which lives as long as the array.

    Not by Tensor.numpy(), after which torch lets nobody resize the tensor's storage any more.
    """
    memory: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.tensor = tensor
    return np.frombuffer(memory, np.uint8)


def _cores() -> set[int]:
    """Return the processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


_transports: weakref.WeakSet[ConnectionTransport] = weakref.WeakSet()


def _detach_all() -> None:
    for transport in list(_transports):
        transport.detach()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_detach_all)
