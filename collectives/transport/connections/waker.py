"""How a thread that sleeps on sockets is woken by another thread of its process."""

from __future__ import annotations

import contextlib
import socket


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
