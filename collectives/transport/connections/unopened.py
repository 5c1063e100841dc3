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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from collectives.errors import TransportError
from collectives.transport.connections.connection import Connection
from collectives.transport.connections.tcp import TcpConnection
from collectives.transport.connections.tcp_listener import TcpListener, reach
from collectives.transport.descriptors import shortage


class Unopened:
    """What this rank needs to open them.

    Args:
        rank: This rank.
        name: Returns what errors call a rank.
        listener: Where others connect to it.
        offers: What the ranks offer to which there is no connection yet.
    """

    def __init__(
        self,
        rank: int,
        name: Callable[[int], int],
        listener: TcpListener,
        offers: Mapping[int, Sequence[Any]],
    ) -> None:
        self._rank = rank
        self._name = name
        self._listener = listener
        # Of each of these ranks a knock, or a connection whose hello is on its way.
        listener.most_silent += len(offers)
        self._offers = dict(offers)
        self._knocks: dict[int, socket.socket] = {}
        # Any thread may knock.
        self._lock = threading.Lock()
        # Those that are to connect to this rank and have not.
        self._missing = {peer for peer in offers if peer > rank}

    def open(self, peer: int, connections: dict[int, Connection]) -> Connection:
        """Add the connection to a rank, which is not open yet where that rank is to connect.

        TransportError where the system refuses it; so does `accept`.
        """
        self.accept(connections)
        if peer not in connections:
            connection = TcpConnection(peer)
            if peer < self._rank:
                try:
                    connection = self._listener.begin(peer, self._offers[peer])
                except OSError as error:
                    raise self._cannot(f"connect to rank {self._name(peer)}", error) from None
            connection.name = self._name(peer)
            connections[peer] = connection
        return connections[peer]

    def sockets(self) -> list[socket.socket]:
        """Return what is to be polled for a rank that connects."""
        return self._listener.sockets()

    def accept(self, connections: dict[int, Connection]) -> None:
        """Add, or open, the connections of ranks that have connected by now."""
        try:
            come = list(self._listener.come(self._missing))
        except OSError as error:
            raise self._cannot("accept another rank's connection", error) from None
        for new in come:
            new.name = self._name(new.peer)
            known = connections.setdefault(new.peer, new)
            if known is not new:
                assert isinstance(known, TcpConnection) and isinstance(new, TcpConnection)
                # Messages wait there already.
                known.attach(new.detached())
            self._missing.discard(new.peer)
            with self._lock:
                knock = self._knocks.pop(new.peer, None)
            if knock is not None:
                knock.close()

    def _cannot(self, what: str, error: OSError) -> TransportError:
        why = shortage(1) if error.errno in (errno.EMFILE, errno.ENFILE) else ""
        return TransportError(f"rank {self._name(self._rank)} cannot {what}: {why or error}")

    def refuses(self, peer: int) -> bool:
        """Return whether a rank listens no longer; for any thread, again and again."""
        with self._lock:
            knock = self._knocks.get(peer)
            if knock is None:
                # Knocks, of which there may be one for each rank, take none of the descriptors that
                # are spared for the program.
                if shortage(1):
                    return False
                try:
                    knock = self._knocks[peer] = reach(self._offers[peer])
                except OSError:
                    # No descriptor, or no way there now: that does not say that it has ended.
                    return False
            poller = select.poll()
            poller.register(knock, select.POLLIN | select.POLLOUT)
            if not (found := poller.poll(0)):
                return False
            error = knock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error or found[0][1] & ~select.POLLOUT:
                # Where it has ended, the next knock is refused.
                knock.close()
                # Another thread may close them all.
                self._knocks.pop(peer, None)
            return error == errno.ECONNREFUSED

    def close(self) -> None:
        """Listen no longer; also in a forked child, where another thread may have had the lock."""
        self._listener.close()
        for knock in list(self._knocks.values()):
            knock.close()
        self._knocks.clear()
