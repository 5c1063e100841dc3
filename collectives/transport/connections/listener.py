"""How ranks connect: every rank listens, and says to all ranks where and by which secret.

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
import select
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from typing import Any, ClassVar

from collectives.transport.connections.connection import Connection
from collectives.transport.connections.tcp import LINE_BYTES

_SECRET_BYTES = 16
# As long as a line of TcpConnection's, which is behind it.
_HELLO = struct.Struct(f"<{_SECRET_BYTES}sI{LINE_BYTES - _SECRET_BYTES - 4}x")
# A rank that is further away, or a network that swallows what it does not let through.
_CONNECT_SECONDS = 10.0
# What accepting may take: all ranks wait for each other afterwards, and an error comes within 5 s
# of the timeout.
_ACCEPT_SECONDS = 4.0
# Accepted sockets whose hello has not come, beside those that ranks may have; of more the oldest is
# closed.
_MAX_SILENT = 64


class Listener(ABC):
    """Where other ranks connect to this one, and from where it connects to them.

    Args:
        rank: This rank.
        listening: The socket that others connect to.
        address: Where they do so, for JSON.
        stack: With it ends what is held beside the connections.

    Attributes:
        FORMAT: Ranks of another one would not understand this one, and open no connection.
        offer: What other ranks need to connect, for JSON.
        most_silent: How many sockets are held that have said nothing.
        symmetric_memory: What the ranks connected by this kind share, once all have accepted; None
            where they share none, or the system refused it.
    """

    FORMAT: ClassVar[Any]
    symmetric_memory: mmap.mmap | None = None

    def __init__(
        self, rank: int, listening: socket.socket, address: Any, stack: contextlib.ExitStack
    ) -> None:
        listening.setblocking(False)
        self._rank = rank
        self._listening = listening
        self._silent: list[socket.socket] = []
        self.most_silent = _MAX_SILENT
        stack.callback(self.close)
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._spent = 0.0
        self.offer = [self.FORMAT, address, self._secret.hex()]

    def connect(self, peer: int, offer: Sequence[Any], timeout: float) -> Connection:
        """Connect to a rank by what it offers; OSError where that cannot be."""
        if offer[0] != self.FORMAT:
            raise OSError(f"rank {peer} speaks {offer[0]}, this one {self.FORMAT}")
        # The others, who wait for this rank, wait longer than it does.
        left = min(_CONNECT_SECONDS, timeout / 2) - self._spent
        if left <= 0:
            raise TimeoutError("too many ranks did not answer")
        start = time.monotonic()
        with contextlib.ExitStack() as failed:
            try:
                sock = failed.enter_context(self._reach(offer[1], left))
            finally:
                self._spent += time.monotonic() - start
            connection = self._introduce(peer, sock, self._hello(offer))
            failed.pop_all()
        return connection

    def _hello(self, offer: Sequence[Any]) -> bytes:
        return _HELLO.pack(bytes.fromhex(offer[2]), self._rank)

    def accept(self, expected: Collection[int], timeout: float) -> dict[int, Connection]:
        """Return connections to those of `expected` that come in time.

        All of them have connected by now; others may have, too.
        """
        connections: dict[int, Connection] = {}
        missing = set(expected)
        deadline = time.monotonic() + min(timeout, _ACCEPT_SECONDS)
        while missing and (left := deadline - time.monotonic()) > 0:
            poller = select.poll()
            for sock in self.sockets():
                poller.register(sock, select.POLLIN)
            poller.poll(left * 1e3)
            # Who finds no descriptor here has no connection.
            with contextlib.suppress(OSError):
                for connection in self.come(missing):
                    connections[connection.peer] = connection
                    missing.remove(connection.peer)
        return connections

    def sockets(self) -> list[socket.socket]:
        """Return what is to be polled for a rank that connects."""
        return [self._listening, *self._silent]

    def come(self, expected: Collection[int]) -> Iterator[Connection]:
        """Return connections to those of `expected` that have connected by now, without a wait.

        OSError where the system gives no more descriptors.
        """
        drained = refused = False
        while not drained:
            try:
                drained = self._accept_some()
            except OSError:
                # Those that were accepted before have their connections all the same.
                drained = refused = True
            for sock in list(self._silent):
                connection = None
                try:
                    connection = self._welcome(sock, expected)
                except BlockingIOError:
                    continue
                except OSError:
                    sock.close()
                self._silent.remove(sock)
                if connection is not None:
                    yield connection
            # Only now: ranks that connected at once have been heard.
            most = _MAX_SILENT if refused else self.most_silent
            while len(self._silent) > most:
                self._silent.pop(0).close()
        if refused:
            # Raises again, unless what was closed here has made room.
            self._accept_some()

    def _accept_some(self) -> bool:
        """Accept who has connected, a bounded number; return whether that is all."""
        while len(self._silent) <= self.most_silent:
            try:
                sock, _ = self._listening.accept()
            except BlockingIOError:
                return True
            except ConnectionAbortedError:
                continue
            sock.setblocking(False)
            self._silent.append(sock)
        return False

    def _welcome(self, sock: socket.socket, expected: Collection[int]) -> Connection:
        """Return a connection to the rank of `expected` that the other end says and proves to be.

        BlockingIOError where it has said nothing yet, OSError for anyone else.
        """
        hello, descriptors, _, _ = socket.recv_fds(sock, _HELLO.size, 2)
        try:
            secret, peer = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (b"", -1)
            if peer not in expected or not hmac.compare_digest(secret, self._secret):
                raise OSError("no rank that is expected")
            return self._connection(peer, sock, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def close(self) -> None:
        """Listen no longer; also in a forked child."""
        for sock in self.sockets():
            sock.close()
        self._silent.clear()

    @abstractmethod
    def _reach(self, address: Any, timeout: float) -> socket.socket:
        """Return a socket that is connected to another rank's."""

    @abstractmethod
    def _introduce(self, peer: int, sock: socket.socket, hello: bytes) -> Connection:
        """Say hello, with what belongs to the connection, and return this rank's end of it."""

    @abstractmethod
    def _connection(self, peer: int, sock: socket.socket, descriptors: Sequence[int]) -> Connection:
        """Return this rank's end for a peer that said hello; close none of its descriptors."""
