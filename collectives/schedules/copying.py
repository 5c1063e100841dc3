"""Schedules that only copy: all-gathers, all-reduces by one, and a broadcast.

`bruck`: every rank gets every vector and reduces all of them by itself. It wins on tiny messages,
when only latency counts: ceil(log2 n) steps for any number of ranks, the fewest possible (recursive
doubling needs two more unless n is a power of two), and one n-way reduction instead of one per
step. In each step all ranks send all vectors that they have, and these double from step to step:
n - 1 vectors each way in all, with n as extra memory. Every rank holds all operands whole and at
once, so an operator that needs whole-vector sums computes them without a message; the tree is the
line ((0 · 1) · 2) · ... Source: Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for
all-to-all communications in multiport message-passing systems", IEEE TPDS 1997.

`oneshot`: the same result in one step: every rank sends its vector to all others. It wins if steps
cost more than their messages: with few ranks and small buffers, as on the GPUs of one node. Each
rank sends n - 1 messages, so `bruck` and `rd` are faster with many ranks. Source: the one-shot
all-reduce of NVIDIA's TensorRT-LLM and of PyTorch's symmetric memory.

`all_gather` is Bruck's exchange without a reduction: as many bytes as a ring's, in ceil(log2 n)
steps instead of n - 1, but to distant ranks, so that more bytes cross between nodes.

`broadcast` is a binomial tree: ceil(log2 n) steps; the root sends the whole buffer in each. Source:
Thakur, Rabenseifner and Gropp, IJHPCA 2005.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial

from collectives.schedules.algorithm import ALL, Algorithm, Order, by_size
from collectives.schedules.schedule import IDLE, Collective, Schedule, Step, Transfer


def _bruck(size: int, rank: int) -> Iterator[Step]:
    """Yield one rank's steps; before the step of distance d it holds d vectors, its own first."""
    distance = 1
    while distance < size:
        count = min(distance, size - distance)
        below, above = (rank - distance) % size, (rank + distance) % size
        yield Step(
            sends=_vectors(size, below, rank, count), recvs=_vectors(size, above, above, count)
        )
        distance *= 2


def _vectors(size: int, peer: int, first: int, count: int) -> tuple[Transfer, ...]:
    """Return the vectors of `count` ranks from `first` on; rank 0 follows the last."""
    wrapped = max(first + count - size, 0)
    whole = (Transfer(peer, first, first + count - wrapped),)
    return (*whole, Transfer(peer, 0, wrapped)) if wrapped else whole


def _one_shot(size: int, rank: int) -> Iterator[Step]:
    # The next rank first, so that not all begin with rank 0.
    others = [other % size for other in range(rank + 1, rank + size)]
    if others:
        yield Step(
            sends=tuple(Transfer(peer, rank, rank + 1) for peer in others),
            recvs=tuple(Transfer(peer, peer, peer + 1) for peer in others),
        )


_Steps = Callable[[int, int], Iterable[Step]]


def _gathered(name: str, steps: _Steps, size: int) -> Schedule:
    """Return an all-reduce that copies all vectors to every rank by `steps`."""
    of_rank = partial(steps, size)
    return Schedule(name, size, size, Collective.ALL_REDUCE, of_rank, gathered=True)


@lru_cache(maxsize=256)
def bruck(size: int) -> Schedule:
    """Return `bruck`: ceil(log2 n) steps, n - 1 buffers each way."""
    return _gathered("bruck", _bruck, size)


@lru_cache(maxsize=256)
def one_shot(size: int) -> Schedule:
    """Return `oneshot`: one step, n - 1 buffers each way."""
    return _gathered("oneshot", _one_shot, size)


@lru_cache(maxsize=64)
def all_gather(size: int) -> Schedule:
    """Return an all-gather in ceil(log2 n) steps."""
    steps = partial(_bruck, size)
    return Schedule("bruck all_gather", size, size, Collective.ALL_GATHER, steps)


def _binomial(size: int, root: int, rank: int) -> Iterator[Step]:
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
    steps = partial(_binomial, size, root)
    return Schedule("tree broadcast", size, 1, Collective.BROADCAST, steps, root=root)


BRUCK, ONE_SHOT = (
    Algorithm(name, summary, Order.LINE, ALL, schedule=by_size(make), outer=False)
    for name, summary, make in (
        ("bruck", "every rank gets all vectors, for tiny messages", bruck),
        ("oneshot", "every rank sends its vector to all others, in one step", one_shot),
    )
)
