"""How ranks connect: every rank listens, and tells all ranks its address and a secret.

This file has what both kinds of connections share, shm_listener.py and tcp_listener.py the rest. A
rank that connects sends a hello: the secret and its number. Without the right hello a connection is
closed, so that no other program can take part; one without any hello delays nobody else.
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
# As long as a cache line, to which TcpConnection aligns the frames that follow it.
_HELLO = struct.Struct(f"<{_SECRET_BYTES}sI{LINE_BYTES - _SECRET_BYTES - 4}x")
# A rank on another host answers sooner; a firewall may drop packets, and then no answer comes.
_CONNECT_SECONDS = 10.0
# The longest wait in `accept`. All ranks wait for each other afterwards, and errors are to come
# within 5 s of the timeout.
_ACCEPT_SECONDS = 4.0
# How many accepted sockets may be waiting for their hello, in addition to those of ranks. Of more,
# as in a port scan, the oldest are closed, so that descriptors do not run out.
_MAX_SILENT = 64


class Listener(ABC):
    """Accepts the connections of other ranks, and connects to theirs.

    Args:
        rank: This rank.
        listening: The socket that others connect to.
        address: Its address, in a form for JSON.
        stack: Closes the listener, and what else it holds except for connections.

    Attributes:
        FORMAT: The version of what is sent: ranks with different ones do not connect.
        offer: What other ranks need in order to connect, in a form for JSON.
        most_silent: How many sockets may be waiting for their hello.
        symmetric_memory: The memory that the ranks share, once all have accepted, if they do.
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
        """Connect to a rank by its offer; OSError if that fails."""
        if offer[0] != self.FORMAT:
            raise OSError(f"rank {peer} speaks {offer[0]}, this one {self.FORMAT}")
        # For all ranks together less than the timeout, for which the others wait for this rank.
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
        """Return connections to those ranks of `expected` that come in time.

        All of them have connected by now, and maybe others, too.
        """
        connections: dict[int, Connection] = {}
        missing = set(expected)
        deadline = time.monotonic() + min(timeout, _ACCEPT_SECONDS)
        while missing and (left := deadline - time.monotonic()) > 0:
            poller = select.poll()
            for sock in self.sockets():
                poller.register(sock, select.POLLIN)
            poller.poll(left * 1e3)
            # A rank for which there is no descriptor left gets no connection.
            with contextlib.suppress(OSError):
                for connection in self.come(missing):
                    connections[connection.peer] = connection
                    missing.remove(connection.peer)
        return connections

    def sockets(self) -> list[socket.socket]:
        """Return the sockets to poll for a rank that connects."""
        return [self._listening, *self._silent]

    def come(self, expected: Collection[int]) -> Iterator[Connection]:
        """Yield connections to those ranks of `expected` that have connected, without waiting.

        OSError where the system has no descriptors left.
        """
        drained = refused = False
        while not drained:
            try:
                drained = self._accept_some()
            except OSError:
                # Raised at the end: those that were accepted before still get their connections.
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
            # Only now, when all hellos that have arrived are read: ranks send theirs at once.
            most = _MAX_SILENT if refused else self.most_silent
            while len(self._silent) > most:
                self._silent.pop(0).close()
        if refused:
            # Raises again, unless the sockets closed above have made room.
            self._accept_some()

    def _accept_some(self) -> bool:
        """Accept a bounded number of connections; return whether there are no more."""
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
        """Read the hello; return a connection to the rank of `expected` that sent it.

        Raises:
            BlockingIOError: No hello has arrived yet.
            OSError: The hello is wrong, or from a rank that is not expected.
        """
        hello, descriptors, _, _ = socket.recv_fds(sock, _HELLO.size, 2)
        try:
            secret, peer = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (b"", -1)
            if peer not in expected or not hmac.compare_digest(secret, self._secret):
                raise OSError("no rank that is expected")
            return self._connection(peer, sock, descriptors)
        finally:
            # A connection maps the memory, which then has a descriptor of its own.
            for descriptor in descriptors:
                os.close(descriptor)

    def close(self) -> None:
        """Stop listening; also called in a forked child."""
        for sock in self.sockets():
            sock.close()
        self._silent.clear()

    @abstractmethod
    def _reach(self, address: Any, timeout: float) -> socket.socket:
        """Return a socket that is connected to another rank's address."""

    @abstractmethod
    def _introduce(self, peer: int, sock: socket.socket, hello: bytes) -> Connection:
        """Send the hello, with any memory of the connection, and return this rank's end of it."""

    @abstractmethod
    def _connection(self, peer: int, sock: socket.socket, descriptors: Sequence[int]) -> Connection:
        """Return this rank's end for a peer that sent a hello; leave its descriptors open."""
