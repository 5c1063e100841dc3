"""The connections over TCP that are opened when two ranks first use them.

Of two ranks the higher one connects, so that there is one connection even if both start at once.
The lower one accepts while it waits for the other. If it is computing instead, the other one need
not wait: the kernel accepts the connection, and takes what is sent.

While a rank waits for its peer to connect, it has no socket that would tell it that the peer's
process has ended. So it knocks: it connects to the peer's listener, which is refused once the peer
has ended.
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
    """Opens this rank's connections at their first use.

    name: Returns a rank's number in errors. offers: By rank, those of ranks to which there is no
    connection yet.
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
        # Each of these ranks may have one socket here: a knock, which sends no hello, or a
        # connection whose hello has not arrived yet.
        listener.most_silent += len(offers)
        self._offers = dict(offers)
        self._knocks: dict[int, socket.socket] = {}
        # For `_knocks`: any thread may knock.
        self._lock = threading.Lock()
        # The ranks that have yet to connect to this one.
        self._missing = {peer for peer in offers if peer > rank}

    def open(self, peer: int, connections: dict[int, Connection]) -> Connection:
        """Add the connection to a rank; if that rank is to connect, it has no socket yet.

        TransportError where the system refuses it.
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
        """Return the sockets to poll for a rank that connects."""
        return self._listener.sockets()

    def accept(self, connections: dict[int, Connection]) -> None:
        """Add, or give their sockets to, the connections of ranks that have connected by now.

        TransportError where the system refuses it.
        """
        try:
            come = list(self._listener.come(self._missing))
        except OSError as error:
            raise self._cannot("accept another rank's connection", error) from None
        for new in come:
            new.name = self._name(new.peer)
            known = connections.setdefault(new.peer, new)
            if known is not new:
                assert isinstance(known, TcpConnection) and isinstance(new, TcpConnection)
                # Keep the older object: messages are posted on it.
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
        """Return whether a rank has stopped listening; any thread may ask, repeatedly."""
        with self._lock:
            knock = self._knocks.get(peer)
            if knock is None:
                # There may be as many knocks as ranks: they must not use the descriptors that are
                # kept free for the program.
                if shortage(1):
                    return False
                try:
                    knock = self._knocks[peer] = reach(self._offers[peer])
                except OSError:
                    # No descriptor, or no route at the moment: the rank may still be there.
                    return False
            poller = select.poll()
            poller.register(knock, select.POLLIN | select.POLLOUT)
            if not (found := poller.poll(0)):
                return False
            error = knock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error or found[0][1] & ~select.POLLOUT:
                # Closed by the peer, or failed: if the peer has ended, the next knock is refused.
                knock.close()
                # With a default: `close` may have cleared them in another thread.
                self._knocks.pop(peer, None)
            return error == errno.ECONNREFUSED

    def close(self) -> None:
        """Stop listening; also called in a forked child."""
        # Without the lock: in a forked child it may be held by a thread that does not exist there.
        self._listener.close()
        for knock in list(self._knocks.values()):
            knock.close()
        self._knocks.clear()
