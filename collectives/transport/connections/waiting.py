"""How a thread sleeps on connections."""

from __future__ import annotations

import math
import select
import time
from collections.abc import Sequence

from collectives.transport.connections.connection import Connection
from collectives.transport.connections.unopened import Unopened

# What poll is asked for an end that is closed, over TCP too and behind data that has come before;
# without it a system reports only connections that are closed both ways.
ENDED = getattr(select, "POLLRDHUP", 0)
# A day; poll counts milliseconds in 32 bits.
_LONGEST_SECONDS = 86400.0


def wait_for_any(
    connections: Sequence[Connection],
    deadline: float,
    nap: float = math.inf,
    unopened: Unopened | None = None,
) -> bool:
    """Sleep to the deadline, or for `nap` seconds; True at once where a connection can go on.

    unopened: Polled, too, where one of them has no socket yet: its peer is to connect.
    """
    left = min(deadline - time.monotonic(), nap, _LONGEST_SECONDS)
    if left <= 0:
        return False
    poller = select.poll()
    accepts = False
    for connection in connections:
        if connection.is_open:
            poller.register(connection, connection.events)
        else:
            accepts = True
    for sock in unopened.sockets() if accepts and unopened is not None else ():
        poller.register(sock, select.POLLIN)
    return bool(poller.poll(math.ceil(left * 1e3)))


def first_reason(connections: Sequence[Connection], seconds: float) -> str:
    """Return the first reason that a peer gives for its end in this time; "" where none does.

    What else has come is lost.
    """
    deadline = time.monotonic() + seconds
    left = [connection for connection in connections if connection.is_open]
    while left and (wait := deadline - time.monotonic()) > 0:
        poller = select.poll()
        for connection in left:
            poller.register(connection, ENDED)
        ended = {fd for fd, _ in poller.poll(math.ceil(wait * 1e3))}
        for connection in [each for each in left if each.fileno() in ended]:
            if reason := connection.gone().reason:
                return reason
            left.remove(connection)
    return ""
