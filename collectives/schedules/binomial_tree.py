"""Binomial tree broadcast.

ceil(log2 n) steps; the root sends the whole buffer up to ceil(log2 n) times. Wins on small and
medium buffers. Source: Thakur, Rabenseifner and Gropp, IJHPCA 2005.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial

from collectives.schedules.schedule import IDLE, Collective, Schedule, Step, Transfer


def _steps(size: int, root: int, rank: int) -> Iterator[Step]:
    position = (rank - root) % size
    distance = 1
    while distance < size:
        if position < distance and position + distance < size:
            yield Step(sends=(Transfer((rank + distance) % size, 0, 1),))
        elif distance <= position < 2 * distance:
            yield Step(recvs=(Transfer((rank - distance) % size, 0, 1),))
        else:
            yield IDLE
        distance *= 2


@lru_cache(maxsize=256)
def broadcast(size: int, root: int) -> Schedule:
    """Return the schedule that sends `root`'s buffer to every rank."""
    steps = partial(_steps, size, root)
    return Schedule("tree broadcast", size, 1, Collective.BROADCAST, steps, root=root)
