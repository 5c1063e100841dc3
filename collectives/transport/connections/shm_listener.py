"""How ranks find out that they share a host, and open connections through its memory.

Every rank listens on a Unix socket in Linux's abstract namespace and tells all ranks its name and a
secret. Who can connect to it and knows the secret is in the same network namespace, so under the
same kernel; host names, which containers invent, play no part. The rings are memfds that travel
through the sockets: they have no name that could be guessed or left behind, they vanish with the
last process that maps them however it ends, and the size of /dev/shm, 64 MiB in many containers,
does not limit them.

Rank 0's answers carry one more memfd, the same for all: where all ranks have such connections to
all, it is their symmetric memory.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import mmap
import os
import secrets
import socket
import time
from collections.abc import Collection, Sequence
from typing import Any

from collectives.transport.connections.connection import ACCEPT_SECONDS, Connection
from collectives.transport.connections.shm import (
    INLINE_BYTES,
    RING_BYTES,
    SLOT_BYTES,
    SOCKET_BYTES,
    ShmConnection,
)
from collectives.transport.shared_memory import futex
from collectives.transport.shared_memory.symmetric_memory import (
    BUFFER_BYTES,
    symmetric_memory_bytes,
)

# Ranks that would not understand each other open no connection.
_FORMAT = [5, SLOT_BYTES, RING_BYTES, INLINE_BYTES, BUFFER_BYTES, futex.available]
_HELLO_BYTES = 256


class ShmListener:
    """Where the ranks of this rank's host connect to it, and from where it connects to them.

    Args:
        rank: This rank.
        size: How many ranks there are.
        stack: With it ends what is held beside the connections.

    Raises:
        OSError: The system refuses it.
    """

    def __init__(self, rank: int, size: int, stack: contextlib.ExitStack) -> None:
        self._rank = rank
        self._memory_bytes = symmetric_memory_bytes(size)
        self._secret = secrets.token_hex(16)
        self._listener = _listen(stack)
        self._own_memory = _new_memory(stack, self._memory_bytes) if rank == 0 else None
        self._pending: dict[int, tuple[socket.socket, mmap.mmap]] = {}
        stack.callback(self._close_pending)
        self.offer = [_FORMAT, _name(self._listener), self._secret]
        # Of those that share it, what all see; None unless the system gave the memory.
        self.symmetric_memory = None if self._own_memory is None else self._own_memory[1]

    def connect(self, peer: int, offer: Sequence[Any], timeout: float) -> None:
        """Connect to a rank by what it offers; OSError where it is not on this host."""
        if offer[0] != _FORMAT:
            raise OSError(f"rank {peer} speaks {offer[0]}, this one {_FORMAT}")
        _, name, secret = offer
        self._pending[peer] = _connect(self._rank, name, secret, timeout)

    def accept(self, expected: Collection[int], timeout: float) -> dict[int, Connection]:
        """Return connections to the ranks that this one connected to, and to `expected`.

        All of them have connected by now.
        """
        own = [] if self._own_memory is None else [self._own_memory[0]]
        connections = _accept(self._listener, self._secret, set(expected), own)
        deadline = time.monotonic() + min(timeout, ACCEPT_SECONDS)
        for peer, (sock, ring) in self._pending.items():
            try:
                # What is there already is taken in any case.
                sock.settimeout(max(deadline - time.monotonic(), 1e-3))
                _, incoming, other = _receive_ring(sock, self._memory_bytes)
                connections[peer] = ShmConnection(peer, sock, ring, incoming)
                self.symmetric_memory = other or self.symmetric_memory
            except OSError:
                sock.close()
        self._pending.clear()
        return connections

    def _close_pending(self) -> None:
        """Close the sockets of which no connections came."""
        for sock, _ in self._pending.values():
            sock.close()


def _listen(stack: contextlib.ExitStack) -> socket.socket:
    """Return a listening socket, open as long as the stack; OSError where there is none to have."""
    if not hasattr(os, "memfd_create"):
        raise OSError("shared memory between ranks needs Linux's memfd")
    listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    listener.bind(f"\0adasum-{secrets.token_hex(8)}")
    listener.listen(socket.SOMAXCONN)
    listener.setblocking(False)
    return listener


def _new_memory(stack: contextlib.ExitStack, nbytes: int) -> tuple[int, mmap.mmap] | None:
    """Return symmetric memory and its descriptor, open as long as the stack; None if refused."""
    try:
        fd = os.memfd_create("adasum-symmetric")
        stack.callback(os.close, fd)
        os.ftruncate(fd, nbytes)
        return fd, mmap.mmap(fd, nbytes)
    except OSError:
        return None


def _name(listener: socket.socket) -> str:
    name: bytes = listener.getsockname()
    return name[1:].decode()


def _connect(rank: int, name: str, secret: str, timeout: float) -> tuple[socket.socket, mmap.mmap]:
    """Connect to a rank and introduce this one; OSError where it is not on this host."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(timeout)
        sock.connect(f"\0{name}")
        return sock, _send_ring(sock, json.dumps([secret, rank]).encode())
    except OSError:
        sock.close()
        raise


def _accept(
    listener: socket.socket, secret: str, expected: set[int], more: Sequence[int]
) -> dict[int, Connection]:
    """Return connections to `expected`, who have connected; strangers may have, too.

    more: descriptors to send with the answers.
    """
    connections: dict[int, Connection] = {}
    while expected - connections.keys():
        try:
            sock, _ = listener.accept()
        except OSError:
            break
        # What a rank says is there already, so a silent stranger is not waited for.
        sock.setblocking(False)
        try:
            hello, incoming, _ = _receive_ring(sock)
            said, peer = json.loads(hello)
            if not hmac.compare_digest(said, secret) or peer not in expected:
                raise ValueError("a stranger")
            outgoing = _send_ring(sock, b"welcome", more)
            connections[peer] = ShmConnection(peer, sock, outgoing, incoming)
        except (OSError, ValueError, TypeError):
            sock.close()
    return connections


def _send_ring(sock: socket.socket, text: bytes, more: Sequence[int] = ()) -> mmap.mmap:
    """Send `text` with a new ring and the descriptors `more`, and return the ring.

    OSError where one cannot be had.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    if sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < SOCKET_BYTES:
        raise OSError("net.core.wmem_max is too small for a connection")
    fd = os.memfd_create("adasum-ring")
    try:
        os.ftruncate(fd, RING_BYTES)
        ring = mmap.mmap(fd, RING_BYTES)
        socket.send_fds(sock, [text], [fd, *more])
    finally:
        os.close(fd)
    return ring


def _receive_ring(
    sock: socket.socket, nbytes: int = 0
) -> tuple[bytes, mmap.mmap, mmap.mmap | None]:
    """Return the peer's text, its ring, and the memory of all, of `nbytes`, where it sent that."""
    text, fds, _, _ = socket.recv_fds(sock, _HELLO_BYTES, 2)
    try:
        if not fds or os.fstat(fds[0]).st_size != RING_BYTES:
            raise OSError("the peer sent no ring")
        ring = mmap.mmap(fds[0], RING_BYTES)
        shared = None
        if len(fds) > 1 and os.fstat(fds[1]).st_size == nbytes:
            # Without the room for it there are still messages.
            with contextlib.suppress(OSError):
                shared = mmap.mmap(fds[1], nbytes)
        return text, ring, shared
    finally:
        for fd in fds:
            os.close(fd)
