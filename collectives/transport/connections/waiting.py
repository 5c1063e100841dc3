"""Sleep until one of several connections can go on."""

from __future__ import annotations

import math
import select
import time
from collections.abc import Sequence

from collectives.transport.connections.connection import Connection
from collectives.transport.connections.unopened import Unopened

# The event by which poll reports that the peer has closed its end, even if data before that has not
# been read. Systems without it report only connections that are closed in both directions.
ENDED = getattr(select, "POLLRDHUP", 0)
# A day: poll takes milliseconds in 32 bits, which would overflow after 24 days.
_LONGEST_SECONDS = 86400.0


def wait_for_any(
    connections: Sequence[Connection],
    deadline: float,
    nap: float = math.inf,
    unopened: Unopened | None = None,
) -> bool:
    """Sleep until a connection can go on (True), or the deadline or `nap` seconds are over (False).

    unopened: Polled, too, if one of the connections has no socket yet because its peer is to
        connect.
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
    """Return the first reason that a peer gives for its end within `seconds`; "" if none does.

    Messages that arrive meanwhile on connections that have ended are lost.
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
