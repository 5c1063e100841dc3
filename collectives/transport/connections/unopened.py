"""The connections over TCP that are opened when two ranks first use them.

Of two ranks the higher one connects, so that both doing so at once make one connection. The lower
one accepts while it waits for the other; who computes meanwhile keeps nobody waiting, since the
kernel accepts for it and takes what is sent.

A rank that waits to be connected to has no socket that ends with its peer's process. So it knocks:
it connects to where the peer listens, which is refused once the peer has ended.
"""

from __future__ import annotations

import errno
import select
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from collectives.transport.connections.connection import Connection
from collectives.transport.connections.tcp import TcpConnection
from collectives.transport.connections.tcp_listener import TcpListener, reach


class Unopened:
    """What this rank needs to open them.

    Args:
        listener: This rank's.
        offers: What the ranks offer to which there is no connection yet.
    """

    def __init__(self, listener: TcpListener, offers: Mapping[int, Sequence[Any]]) -> None:
        self._listener = listener
        self._offers = dict(offers)
        self._knocks: dict[int, socket.socket] = {}
        # Any thread may knock.
        self._lock = threading.Lock()

    def __contains__(self, peer: int) -> bool:
        return peer in self._offers

    def open(self, rank: int, peer: int) -> TcpConnection:
        """Return the connection to a rank, as far as it is open."""
        if rank < peer:
            return TcpConnection(peer)
        return self._listener.begin(peer, self._offers[peer])

    def sockets(self) -> list[socket.socket]:
        """Return what is to be polled for a rank that connects."""
        return self._listener.sockets()

    def come(self, expected: set[int]) -> Iterator[Connection]:
        """Return connections to those of `expected` that have connected by now."""
        for connection in self._listener.come(expected):
            with self._lock:
                knock = self._knocks.pop(connection.peer, None)
            if knock is not None:
                knock.close()
            yield connection

    def refuses(self, peer: int) -> bool:
        """Return whether a rank listens no longer; for any thread, again and again."""
        with self._lock:
            knock = self._knocks.get(peer)
            if knock is None:
                knock = self._knocks[peer] = reach(self._offers[peer])
            poller = select.poll()
            poller.register(knock, select.POLLIN | select.POLLOUT)
            if not (found := poller.poll(0)):
                return False
            error = knock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error or found[0][1] & ~select.POLLOUT:
                # Where it has ended, the next knock is refused.
                self._knocks.pop(peer).close()
            return error == errno.ECONNREFUSED

    def close(self) -> None:
        """Listen no longer; also in a forked child, where another thread may have had the lock."""
        self._listener.close()
        for knock in list(self._knocks.values()):
            knock.close()
        self._knocks.clear()
