"""Open connections over TCP: each rank listens at one address, which it tells all ranks."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from collectives.transport.connections import address
from collectives.transport.connections.listener import Listener
from collectives.transport.connections.tcp import TcpConnection


class TcpListener(Listener):
    """Accepts connections of other ranks at a host's address, and connects to theirs: `Listener`.

    OSError where the system refuses the socket.
    """

    # Changes with the protocol.
    FORMAT: ClassVar[Any] = 5

    def __init__(self, rank: int, host: str, stack: contextlib.ExitStack) -> None:
        if not hasattr(socket.socket, "recvmsg_into"):
            raise OSError("this system's sockets cannot receive into several buffers")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = stack.enter_context(
            socket.create_server((host, 0), family=family, backlog=socket.SOMAXCONN)
        )
        super().__init__(rank, listening, [host, listening.getsockname()[1]], stack)

    def _reach(self, address: Sequence[Any], timeout: float) -> socket.socket:
        host, port = address
        return socket.create_connection((host, port), timeout=timeout)

    def _introduce(self, peer: int, sock: socket.socket, hello: bytes) -> TcpConnection:
        sock.sendall(hello)
        return TcpConnection(peer, sock)

    def begin(self, peer: int, offer: Sequence[Any]) -> TcpConnection:
        """Start to connect to a rank, without waiting for its answer."""
        return TcpConnection(peer, reach(offer), self._hello(offer))

    def _connection(
        self, peer: int, sock: socket.socket, descriptors: Sequence[int]
    ) -> TcpConnection:
        return TcpConnection(peer, sock)


def reach(offer: Sequence[Any]) -> socket.socket:
    """Return a non-blocking socket that is connecting to a rank's listener."""
    host, port = offer[1]
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    error = sock.connect_ex((host, port))
    # It goes on in the background: its outcome is an error of the socket's first use.
    if error and error not in (errno.EINPROGRESS, errno.ECONNREFUSED):
        sock.close()
        raise OSError(error, os.strerror(error))
    return sock


def find_address(store_host: str | None, gather: Callable[[Any], list[Any]]) -> str | None:
    """Return the address at which other ranks reach this one; None if there is none. A collective.

    It is the address from which this host sends to `store_host`. If that is loopback, because the
    store is on this host, it is the address from which this host sends to another rank.

    Args:
        store_host: A host that all ranks know, such as that of the store through which they found
            each other; None for a rank that is not to be reached.
        gather: Gathers a value of each rank; returns them by rank.
    """
    mine: str | None = None
    chosen = address.interface()
    if store_host is not None:
        with contextlib.suppress(OSError, UnicodeError):
            mine = address.of_interface(chosen) if chosen else address.source_of(store_host)
    theirs: list[str | None] = gather(mine)
    # The interface that the user has chosen counts, even if it is loopback.
    if mine is None or chosen or address.reaches_others(mine):
        return mine
    for other in theirs:
        if other is not None and address.reaches_others(other):
            with contextlib.suppress(OSError):
                return address.source_of(other)
    return mine
