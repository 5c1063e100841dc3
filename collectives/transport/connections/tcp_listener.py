"""How ranks open connections over TCP: each listens at one address and tells all ranks where."""

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
    """Where other ranks connect to this one, and from where it connects to them.

    Args:
        rank: This rank.
        host: The address to listen at.
        stack: With it ends what is held beside the connections.

    Raises:
        OSError: The system refuses it.
    """

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
        """Begin to connect to a rank, whose answer is not waited for."""
        return TcpConnection(peer, reach(offer), self._hello(offer))

    def _connection(
        self, peer: int, sock: socket.socket, descriptors: Sequence[int]
    ) -> TcpConnection:
        return TcpConnection(peer, sock)


def reach(offer: Sequence[Any]) -> socket.socket:
    """Return a socket on its way to where a rank listens."""
    host, port = offer[1]
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    error = sock.connect_ex((host, port))
    # Any other answer of the network comes by the first use.
    if error and error not in (errno.EINPROGRESS, errno.ECONNREFUSED):
        sock.close()
        raise OSError(error, os.strerror(error))
    return sock


def find_address(store_host: str | None, gather: Callable[[Any], list[Any]]) -> str | None:
    """Return the address at which the other ranks reach this one; None where there is none.

    A collective.

    Args:
        store_host: A host that all ranks know, such as the one of the store through which they
            found each other; None for a rank that is not to be reached. Where this host takes the
            name for its own, the route to another rank gives the address.
        gather: Returns what every rank gives, by rank.
    """
    mine: str | None = None
    chosen = address.interface()
    if store_host is not None:
        with contextlib.suppress(OSError, UnicodeError):
            mine = address.of_interface(chosen) if chosen else address.source_of(store_host)
    theirs: list[str | None] = gather(mine)
    if mine is None or chosen or address.reaches_others(mine):
        return mine
    for other in theirs:
        if other is not None and address.reaches_others(other):
            with contextlib.suppress(OSError):
                return address.source_of(other)
    return mine
