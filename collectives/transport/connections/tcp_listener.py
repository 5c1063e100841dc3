"""How ranks open connections over TCP: each listens at one address and tells all ranks where.

A rank that connects proves itself by a secret, which all ranks are told with the address.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from collectives.transport.connections import address
from collectives.transport.connections.connection import ACCEPT_SECONDS, Connection
from collectives.transport.connections.tcp import LINE_BYTES, TcpConnection

# Ranks that would not understand each other open no connection.
_FORMAT = 1
_SECRET_BYTES = 16
_HELLO = struct.Struct(f"<{_SECRET_BYTES}sI{LINE_BYTES - _SECRET_BYTES - 4}x")
# A rank that is further away, or a network that swallows what it does not let through.
_CONNECT_SECONDS = 10.0


class TcpListener:
    """Where other ranks connect to this one, and from where it connects to them.

    Args:
        rank: This rank.
        at: The address to listen at.
        stack: With it ends what is held beside the connections.

    Raises:
        OSError: The system refuses it.
    """

    symmetric_memory = None

    def __init__(self, rank: int, at: str, stack: contextlib.ExitStack) -> None:
        if not hasattr(socket.socket, "recvmsg_into"):
            raise OSError("this system's sockets cannot receive into several places")
        self._rank = rank
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        family = socket.AF_INET6 if ":" in at else socket.AF_INET
        listener = socket.create_server((at, 0), family=family, backlog=socket.SOMAXCONN)
        self._listener = stack.enter_context(listener)
        self._listener.setblocking(False)
        self._pending: dict[int, socket.socket] = {}
        stack.callback(self._close_pending)
        self._spent = 0.0
        port = self._listener.getsockname()[1]
        self.offer = [_FORMAT, at, port, self._secret.hex()]

    def connect(self, peer: int, offer: Sequence[Any], timeout: float) -> None:
        """Connect to a rank by what it offers; OSError where that cannot be."""
        if offer[0] != _FORMAT:
            raise OSError(f"rank {peer} speaks {offer[0]}, this one {_FORMAT}")
        _, at, port, secret = offer
        # The others, who wait for this rank, do not give up before it does.
        left = min(_CONNECT_SECONDS, timeout / 2) - self._spent
        if left <= 0:
            raise TimeoutError("too many ranks did not answer")
        start = time.monotonic()
        try:
            sock = socket.create_connection((at, port), timeout=left)
        finally:
            self._spent += time.monotonic() - start
        try:
            sock.sendall(_HELLO.pack(bytes.fromhex(secret), self._rank))
        except OSError:
            sock.close()
            raise
        self._pending[peer] = sock

    def accept(self, expected: Collection[int], timeout: float) -> dict[int, Connection]:
        """Return connections to the ranks that this one connected to, and to `expected`.

        All of them have connected by now.
        """
        connections: dict[int, Connection] = {}
        sockets = {**self._pending, **self._accept(set(expected), timeout)}
        self._pending.clear()
        for peer, sock in sockets.items():
            try:
                connections[peer] = TcpConnection(peer, sock)
            except OSError:
                sock.close()
        return connections

    def _close_pending(self) -> None:
        """Close the sockets of which no connections came."""
        for sock in self._pending.values():
            sock.close()

    def _accept(self, expected: set[int], timeout: float) -> dict[int, socket.socket]:
        """Return the sockets of those of `expected` that come in time; strangers may have, too."""
        found: dict[int, socket.socket] = {}
        waiting: dict[int, socket.socket] = {}
        deadline = time.monotonic() + min(timeout, ACCEPT_SECONDS)
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        while expected - found.keys():
            left = deadline - time.monotonic()
            ready = poller.poll(left * 1e3) if left > 0 else []
            if not ready:
                break
            for fd, _ in ready:
                with contextlib.suppress(OSError):
                    if fd == self._listener.fileno():
                        sock, _ = self._listener.accept()
                        sock.setblocking(False)
                        waiting[sock.fileno()] = sock
                        poller.register(sock, select.POLLIN)
                        continue
                    poller.unregister(fd)
                    sock = waiting.pop(fd)
                    peer = self._peer_of(sock)
                    if peer in expected - found.keys():
                        found[peer] = sock
                    else:
                        sock.close()
        for sock in waiting.values():
            sock.close()
        return found

    def _peer_of(self, sock: socket.socket) -> int:
        """Return the rank that the other end says and proves to be; -1 for a stranger."""
        try:
            hello = sock.recv(_HELLO.size)
        except OSError:
            return -1
        if len(hello) != _HELLO.size:
            return -1
        secret, peer = _HELLO.unpack(hello)
        return peer if hmac.compare_digest(secret, self._secret) else -1


def find_address(toward: str | None, gather: Callable[[bytes], list[bytes]]) -> str | None:
    """Return the address at which the other ranks reach this one; None where there is none.

    A collective.

    Args:
        toward: A host that all ranks know, such as the one of the store through which they found
            each other; None for a rank that is not to be reached. Where this host takes the name
            for its own, the route to another rank tells the address.
        gather: Returns every rank's bytes, by rank.
    """
    mine: str | None = None
    chosen = address.interface()
    if toward is not None:
        with contextlib.suppress(OSError, UnicodeError):
            mine = address.of_interface(chosen) if chosen else address.toward(toward)
    told: list[str | None] = [json.loads(data) for data in gather(json.dumps(mine).encode())]
    if mine is None or chosen or address.reaches_others(mine):
        return mine
    for other in told:
        if other is not None and address.reaches_others(other):
            with contextlib.suppress(OSError):
                return address.toward(other)
    return mine
