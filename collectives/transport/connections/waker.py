"""How a thread sleeps on connections, and is woken by another thread of its process."""

from __future__ import annotations

import contextlib
import math
import select
import socket
import time
from collections.abc import Sequence

from collectives.transport.connections.connection import Connection

# A day; poll counts milliseconds in 32 bits.
_LONGEST_SECONDS = 86400.0


class Waker:
    """One sleeper's: `wake` makes `fileno` readable until it drains. It has two descriptors."""

    def __init__(self) -> None:
        self._hears, self._rings = socket.socketpair()
        self._hears.setblocking(False)
        self._rings.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._hears.fileno()

    def wake(self) -> None:
        """Wake the sleeper, or keep it from falling asleep; without effect once closed."""
        # Where the queue is full it will wake.
        with contextlib.suppress(OSError):
            self._rings.send(b"\0")

    def drain(self) -> None:
        """Take back all wakes so far."""
        with contextlib.suppress(OSError):
            while self._hears.recv(4096):
                pass

    def close(self) -> None:
        """Close it; also in a forked child."""
        self._hears.close()
        self._rings.close()


def wait_for_any(
    connections: Sequence[Connection],
    deadline: float,
    nap: float = math.inf,
    waker: Waker | None = None,
) -> bool:
    """Sleep to the deadline, or for `nap` seconds; True at once where a connection can go on."""
    left = min(deadline - time.monotonic(), nap, _LONGEST_SECONDS)
    if left <= 0:
        return False
    poller = select.poll()
    for connection in connections:
        poller.register(connection, connection.events)
    if waker is None:
        return bool(poller.poll(math.ceil(left * 1e3)))
    poller.register(waker, select.POLLIN)
    ready = poller.poll(math.ceil(left * 1e3))
    # Before the connections are looked at again.
    waker.drain()
    return bool(ready)
