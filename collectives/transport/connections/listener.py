"""How ranks connect: every rank listens, and tells all ranks where and by which secret.

What is the same for both kinds of connections; shm_listener.py and tcp_listener.py hold the rest.
A rank that connects says hello: the secret and its number. So whoever else connects is turned away,
and one that says nothing is not waited for longer than a rank.
"""

from __future__ import annotations

import contextlib
import hmac
import mmap
import os
import secrets
import selectors
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

from collectives.transport.connections.connection import Connection
from collectives.transport.connections.shared_socket import LINE_BYTES

_SECRET_BYTES = 16
# As long as a line of TcpConnection's, which is behind it.
_HELLO = struct.Struct(f"<{_SECRET_BYTES}sI{LINE_BYTES - _SECRET_BYTES - 4}x")
# A rank that is further away, or a network that swallows what it does not let through.
_CONNECT_SECONDS = 10.0
# What accepting may take: all ranks wait for each other afterwards, and an error comes within 5 s
# of the timeout.
_ACCEPT_SECONDS = 4.0


class Listener(ABC):
    """Where other ranks connect to this one, and from where it connects to them.

    Args:
        rank: This rank.
        listening: The socket that others connect to.
        address: Where they do so, for JSON.

    Attributes:
        FORMAT: Ranks of another one would not understand this one, and open no connection.
        offer: What other ranks need to connect, for JSON.
        symmetric_memory: What the ranks connected by this kind share, once all have accepted; None
            where they share none, or the system refused it.
    """

    FORMAT: ClassVar[Any]
    symmetric_memory: mmap.mmap | None = None

    def __init__(self, rank: int, listening: socket.socket, address: Any) -> None:
        listening.setblocking(False)
        self._rank = rank
        self._listening = listening
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._spent = 0.0
        self.offer = [self.FORMAT, address, self._secret.hex()]

    def connect(self, peer: int, offer: Sequence[Any], timeout: float) -> Connection:
        """Connect to a rank by what it offers; OSError where that cannot be."""
        if offer[0] != self.FORMAT:
            raise OSError(f"rank {peer} speaks {offer[0]}, this one {self.FORMAT}")
        _, address, secret = offer
        # The others, who wait for this rank, wait longer than it does.
        left = min(_CONNECT_SECONDS, timeout / 2) - self._spent
        if left <= 0:
            raise TimeoutError("too many ranks did not answer")
        start = time.monotonic()
        with contextlib.ExitStack() as failed:
            try:
                sock = failed.enter_context(self._reach(address, left))
            finally:
                self._spent += time.monotonic() - start
            connection = self._introduce(peer, sock, _HELLO.pack(bytes.fromhex(secret), self._rank))
            failed.pop_all()
        return connection

    def accept(self, expected: Collection[int], timeout: float) -> dict[int, Connection]:
        """Return connections to those of `expected` that come in time.

        All of them have connected by now; strangers may have, too.
        """
        connections: dict[int, Connection] = {}
        missing = set(expected)
        deadline = time.monotonic() + min(timeout, _ACCEPT_SECONDS)
        with selectors.PollSelector() as waiting:
            waiting.register(self._listening, selectors.EVENT_READ)
            while missing and (left := deadline - time.monotonic()) > 0:
                for key, _ in waiting.select(left):
                    sock: socket.socket | None = key.data
                    try:
                        if sock is None:
                            sock, _ = self._listening.accept()
                            sock.setblocking(False)
                            waiting.register(sock, selectors.EVENT_READ, sock)
                        else:
                            waiting.unregister(sock)
                            connection = self._welcome(sock, missing)
                            connections[connection.peer] = connection
                            missing.remove(connection.peer)
                    except OSError:
                        if sock is not None:
                            sock.close()
            for key in waiting.get_map().values():
                if key.data is not None:
                    key.data.close()
        return connections

    def _welcome(self, sock: socket.socket, missing: Collection[int]) -> Connection:
        """Return a connection to the rank of `missing` that the other end says and proves to be.

        OSError for a stranger.
        """
        hello, descriptors, _, _ = socket.recv_fds(sock, _HELLO.size, 2)
        try:
            secret, peer = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (b"", -1)
            if peer not in missing or not hmac.compare_digest(secret, self._secret):
                raise OSError("a stranger")
            return self._connection(peer, sock, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    @abstractmethod
    def _reach(self, address: Any, timeout: float) -> socket.socket:
        """Return a socket that is connected to another rank's."""

    @abstractmethod
    def _introduce(self, peer: int, sock: socket.socket, hello: bytes) -> Connection:
        """Say hello, with what belongs to the connection, and return this rank's end of it."""

    @abstractmethod
    def _connection(self, peer: int, sock: socket.socket, descriptors: Sequence[int]) -> Connection:
        """Return this rank's end for a peer that said hello; close none of its descriptors."""
