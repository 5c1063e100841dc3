"""Find out which ranks share a host, and open connections through its memory.

Every rank listens on a Unix socket in Linux's abstract namespace. A rank that can connect to it and
knows the secret is in the same network namespace, and so on the same kernel. Host names are not
used, because containers make them up. The rings are memfds that are sent through the sockets. They
have no name that could be guessed or left behind, they vanish with the last process that maps them,
however it ends, and the size of /dev/shm, 64 MiB in many containers, does not limit them.

The last rank connects to all others, and sends all of them the same additional memfd. If all ranks
have connections through memory to all others, it is their symmetric memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import socket
from collections.abc import Sequence
from typing import Any, ClassVar

from collectives.transport.connections.listener import Listener
from collectives.transport.connections.shm import (
    INLINE_BYTES,
    RING_BYTES,
    SLOT_BYTES,
    ShmConnection,
)
from collectives.transport.shared_memory import futex
from collectives.transport.shared_memory.symmetric_memory import (
    BUFFER_BYTES,
    symmetric_memory_bytes,
)


class ShmListener(Listener):
    """Accepts the connections of ranks on this rank's host, and connects to theirs: `Listener`.

    OSError where the system refuses the socket, or has no memfds.
    """

    # The number changes with the protocol. The rest has to be the same on both ends, too.
    FORMAT: ClassVar[Any] = [7, SLOT_BYTES, RING_BYTES, INLINE_BYTES, BUFFER_BYTES, futex.available]

    def __init__(self, rank: int, size: int, stack: contextlib.ExitStack) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("shared memory between ranks needs Linux's memfd")
        listening = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        name = f"\0adasum-{secrets.token_hex(8)}"
        listening.bind(name)
        listening.listen(socket.SOMAXCONN)
        super().__init__(rank, listening, name, stack)
        self._memory_bytes = symmetric_memory_bytes(size)
        # The symmetric memory's descriptor, on the rank that sends it to all others.
        self._descriptors: list[int] = []
        if rank == size - 1:
            # If there is no memory for it, ranks still exchange messages.
            with contextlib.suppress(OSError):
                descriptor, memory = _new_memory("adasum-symmetric", self._memory_bytes, stack)
                self._descriptors, self.symmetric_memory = [descriptor], memory

    def _reach(self, address: str, timeout: float) -> socket.socket:
        with contextlib.ExitStack() as failed:
            sock = failed.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            sock.settimeout(timeout)
            sock.connect(address)
            failed.pop_all()
        return sock

    def _introduce(self, peer: int, sock: socket.socket, hello: bytes) -> ShmConnection:
        with contextlib.ExitStack() as stack:
            descriptor, rings = _new_memory("adasum-ring", 2 * RING_BYTES, stack)
            connection = ShmConnection(peer, sock, rings, outgoing=0)
            socket.send_fds(sock, [hello], [descriptor, *self._descriptors])
        return connection

    def _connection(
        self, peer: int, sock: socket.socket, descriptors: Sequence[int]
    ) -> ShmConnection:
        if not descriptors:
            raise OSError("there was no descriptor left for the peer's memory")
        rings = _map(descriptors[0], 2 * RING_BYTES)
        connection = ShmConnection(peer, sock, rings, outgoing=1)
        for descriptor in descriptors[1:]:
            with contextlib.suppress(OSError):
                self.symmetric_memory = _map(descriptor, self._memory_bytes)
        return connection


def _new_memory(name: str, nbytes: int, stack: contextlib.ExitStack) -> tuple[int, mmap.mmap]:
    """Return the descriptor of new shared memory, which the stack closes, and the memory."""
    descriptor = os.memfd_create(name)
    stack.callback(os.close, descriptor)
    os.ftruncate(descriptor, nbytes)
    return descriptor, mmap.mmap(descriptor, nbytes)


def _map(descriptor: int, nbytes: int) -> mmap.mmap:
    """Map another rank's memory; OSError if it does not have this size."""
    # To touch pages beyond the end of a smaller one would end the process (SIGBUS).
    if os.fstat(descriptor).st_size != nbytes:
        raise OSError("the peer sent other memory")
    return mmap.mmap(descriptor, nbytes)
