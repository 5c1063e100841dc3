"""Bruck's concatenation: every rank gets every vector, and reduces all of them by itself.

Wins on tiny messages, where latency is all that counts: ceil(log2 n) steps for any number of ranks,
the fewest there are, where recursive doubling takes two more unless that is a power of two; and one
n-way reduction in place of one a step. In each step a rank sends all vectors that it has, twice as
many from step to step: n - 1 of them each way in all, with n as extra memory. Every rank holds all
operands whole and at once, so an operator that needs whole-vector sums computes them without a
message; the tree is the line ((0 · 1) · 2) · ... Source: Bruck, Ho, Kipnis, Upfal and Weathersby,
"Efficient algorithms for all-to-all communications in multiport message-passing systems", IEEE TPDS
1997.

`all_gather` is the same exchange for its own sake: as many bytes as a ring's, in ceil(log2 n) steps
where that takes n - 1, but to ranks that are far, so that more of them cross between nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial

from collectives.schedules.algorithm import ALL, Algorithm, Order, by_size
from collectives.schedules.schedule import Collective, Schedule, Step, Transfer


def _steps(size: int, rank: int) -> Iterator[Step]:
    """Yield a rank's steps; before distance d it has the vectors of d ranks, from its own on."""
    distance = 1
    while distance < size:
        count = min(distance, size - distance)
        below, above = (rank - distance) % size, (rank + distance) % size
        yield Step(
            sends=_vectors(size, below, rank, count), recvs=_vectors(size, above, above, count)
        )
        distance *= 2


def _vectors(size: int, peer: int, first: int, count: int) -> tuple[Transfer, ...]:
    """Return the vectors of `count` ranks from `first` on, where rank 0 follows the last."""
    wrapped = max(first + count - size, 0)
    whole = (Transfer(peer, first, first + count - wrapped),)
    return (*whole, Transfer(peer, 0, wrapped)) if wrapped else whole


@lru_cache(maxsize=256)
def all_reduce(size: int) -> Schedule:
    """Return `bruck`: ceil(log2 n) steps, n - 1 buffers each way."""
    steps = partial(_steps, size)
    return Schedule("bruck", size, size, Collective.ALL_REDUCE, steps, gathered=True)


@lru_cache(maxsize=64)
def all_gather(size: int) -> Schedule:
    """Return ceil(log2 n) steps that send every rank's chunk to all others."""
    steps = partial(_steps, size)
    return Schedule("bruck all_gather", size, size, Collective.ALL_GATHER, steps)


BRUCK = Algorithm(
    "bruck",
    "every rank gets all vectors, for tiny messages",
    Order.LINE,
    ALL,
    schedule=by_size(all_reduce),
    outer=False,
)
