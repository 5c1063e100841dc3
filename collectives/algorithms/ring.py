"""Ring: n - 1 steps of n chunks each way round.

Wins on large buffers: every rank sends 2 (n - 1) / n of the buffer, the least any all-reduce can,
at the price of 2 (n - 1) latencies. Chunk c is summed in the order c + 1, c + 2, ..., c (ranks
modulo n), another order for every chunk, so it cannot carry an operator that is not associative.
Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
JPDC 2009.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from ..schedule import Action, Collective, Schedule, Step, Transfer


def _scatter_steps(size: int, rank: int) -> Iterator[Step]:
    for hop in range(size - 1):
        out = (rank - hop - 1) % size
        into = (rank - hop - 2) % size
        yield Step(
            sends=(Transfer((rank + 1) % size, out, out + 1),),
            recvs=(Transfer((rank - 1) % size, into, into + 1, Action.REDUCE_LEFT),),
        )


def _gather_steps(size: int, rank: int) -> Iterator[Step]:
    for hop in range(size - 1):
        out = (rank - hop) % size
        into = (rank - hop - 1) % size
        yield Step(
            sends=(Transfer((rank + 1) % size, out, out + 1),),
            recvs=(Transfer((rank - 1) % size, into, into + 1),),
        )


@lru_cache(maxsize=64)
def reduce_scatter(size: int) -> Schedule:
    """n - 1 steps; every rank sends and receives (n - 1) / n of the buffer and owns chunk rank."""
    return Schedule(
        "ring reduce_scatter",
        size,
        size,
        Collective.REDUCE_SCATTER,
        lambda rank: _scatter_steps(size, rank),
    )


@lru_cache(maxsize=64)
def all_gather(size: int) -> Schedule:
    """n - 1 steps; every rank sends and receives (n - 1) / n of the buffer."""
    return Schedule(
        "ring all_gather", size, size, Collective.ALL_GATHER, lambda rank: _gather_steps(size, rank)
    )


@lru_cache(maxsize=64)
def all_reduce(size: int) -> Schedule:
    """Reduce-scatter then all-gather: 2 (n - 1) steps, 2 (n - 1) / n of the buffer each way."""

    def steps(rank: int) -> Iterator[Step]:
        yield from _scatter_steps(size, rank)
        yield from _gather_steps(size, rank)

    return Schedule("xring", size, size, Collective.ALL_REDUCE, steps)
