"""CPU messages over connections, where there are any; all others through another transport."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, ExitStack

import torch

from collectives.errors import describe
from collectives.transport.base import Message, Messages, Transport
from collectives.transport.byte_gathering import gather_bytes
from collectives.transport.connections.connect import KINDS, Opened, open_connections
from collectives.transport.connections.transport import ConnectionTransport
from collectives.transport.shared_memory.symmetric_memory import SymmetricMemory


class HybridTransport(Transport):
    """CPU messages to the peers of `local` go through it, all others through `other`.

    One exchange may use both: first `other`, then `local`. That cannot deadlock, because every rank
    does it in this order and neither transport waits for the other.

    Args:
        local: Connections to some of the ranks.
        other: A transport between all of them.
        kinds: As `open_connections` takes them, where this transport is split.
        toward: Likewise.

    Attributes:
        connected_peers: The ranks to which there is a connection.
        memory_peers: Those of them that share memory with this one.
    """

    def __init__(
        self,
        local: ConnectionTransport,
        other: Transport,
        *,
        kinds: Collection[str] = KINDS,
        toward: str = "localhost",
    ) -> None:
        self.rank = other.rank
        self.size = other.size
        self.process_group = other.process_group
        self.device = other.device
        self.carries_codes = local.carries_codes
        self.connected_peers = local.peers
        self.memory_peers = local.memory_peers
        self._local = local
        self._other = other
        self._kinds = tuple(kinds)
        self._toward = toward

    def __repr__(self) -> str:
        shared, linked = len(self.memory_peers), len(self.connected_peers)
        kinds = {"shared memory": shared, "TCP": linked - shared}
        peers = [f"{kind} to {count}" for kind, count in kinds.items() if count]
        if linked < self.size - 1:
            peers.append(f"{self._other!r} to {self.size - 1 - linked}")
        return f"HybridTransport({', '.join(peers)})"

    @property
    def symmetric_memory(self) -> SymmetricMemory | None:
        """What all ranks share, where they share memory."""
        return self._local.symmetric_memory

    def check_device(self, device: torch.device) -> None:
        """Raise ValueError where `other` does not carry the device's tensors."""
        self._other.check_device(device)

    def exchange(
        self, sends: Messages, recvs: Messages, step: str, timeout: float, code: int = 0
    ) -> None:
        """Exchange a step's messages: `Transport.exchange`."""
        deadline = time.monotonic() + timeout
        near_sends, far_sends = self._divide(sends)
        near_recvs, far_recvs = self._divide(recvs)
        if far_sends or far_recvs:
            try:
                self._other.exchange(far_sends, far_recvs, step, timeout)
            except BaseException as error:
                self._local.abort(describe(error))
                raise
            timeout = max(deadline - time.monotonic(), 0.0)
        if near_sends or near_recvs:
            self._local.exchange(near_sends, near_recvs, step, timeout, code)

    def deferred(self) -> AbstractContextManager[None]:
        """Put off what `other` may; messages over connections are waited for at once."""
        return self._other.deferred()

    def flush(self, step: str, timeout: float) -> None:
        """Flush the connections, which alone carry codes."""
        self._local.flush(step, timeout)

    def split(self, ranks: Sequence[int], timeout: float) -> HybridTransport:
        """Open new connections, of the same kinds as here, and split `other`."""
        other = self._other.split(ranks, timeout)

        def gather(data: bytes) -> list[bytes]:
            return gather_bytes(data, other, "start-up", timeout)

        met = Opened({}, None)
        if other.size > 1:
            met = open_connections(
                other.rank,
                other.size,
                gather,
                timeout,
                kinds=self._kinds,
                toward=self._toward,
                near=[new for new, old in enumerate(ranks) if old in self.memory_peers],
            )
        connections = ConnectionTransport(other.rank, other.size, *met)
        return HybridTransport(connections, other, kinds=self._kinds, toward=self._toward)

    def abort(self, reason: str) -> None:
        """Close the connections and tell the peers why."""
        with ExitStack() as stack:
            stack.callback(self._other.abort, reason)
            self._local.abort(reason)

    def _divide(self, messages: Messages) -> tuple[list[Message], list[Message]]:
        """Return the messages that go over connections, and the others."""
        near: list[Message] = []
        far: list[Message] = []
        for message in messages:
            connected = message.peer in self.connected_peers and message.tensor.is_cpu
            (near if connected else far).append(message)
        return near, far

    def close(self) -> None:
        """Close both transports."""
        with ExitStack() as stack:
            stack.callback(self._other.close)
            self._local.close()
