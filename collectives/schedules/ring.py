"""Rings: every rank exchanges messages with its two neighbours only.

`all_reduce` wins on large buffers: in 2 (n - 1) steps every rank sends and receives 2 (n - 1) / n
of the buffer, the minimum for any all-reduce, with 1/n of it as extra memory. Chunks are summed in
different orders, so it cannot carry an operator that is not associative. Source: Patarasuk and
Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009.

`linear_all_reduce` carries such an operator: whole segments travel along the line 0, 1, ..., n - 1,
and the results continue around the ring, chunk after chunk in a pipeline. With c chunks: c + 2n - 3
steps; ranks n - 2 and n - 1 send the buffer once, the others twice; 1/c of it as extra memory.
Source of the pipeline: Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth
broadcast, reduction and scan", Parallel Computing 2009.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from collectives import validation
from collectives.reducers import Needs
from collectives.schedules.algorithm import Algorithm, Level, Order, Shards
from collectives.schedules.schedule import (
    Action,
    Collective,
    ScatterGather,
    Schedule,
    Step,
    Transfer,
    sharded,
)

Orders = tuple[tuple[int, ...], ...]


def _rings(orders: Orders, rank: int, lag: int) -> Iterator[Step]:
    """Yield the steps once around every ring; each rank begins with the chunk `lag` positions back.

    Owner r has chunks [r k, (r + 1) k), one for each of the k rings.
    """
    size, rings = len(orders[0]), len(orders)
    positions = [order.index(rank) for order in orders]
    action = Action.REDUCE_LEFT if lag else Action.COPY
    for hop in range(lag, lag + size - 1):
        sends, recvs = [], []
        for ring, (order, at) in enumerate(zip(orders, positions, strict=True)):
            out = order[(at - hop) % size] * rings + ring
            into = order[(at - hop - 1) % size] * rings + ring
            sends.append(Transfer(order[(at + 1) % size], out, out + 1))
            leaves = (1, hop) if lag else None
            recvs.append(Transfer(order[at - 1], into, into + 1, action, leaves))
        yield Step(tuple(sends), tuple(recvs))


@lru_cache(maxsize=64)
def scatter_gather(size: int, orders: Orders | None = None) -> ScatterGather:
    """Return k rings at once, one for each of `orders`, each on 1/k of every rank's region.

    orders: the ranks by their position on each ring; by default one ring 0, 1, ..., size - 1.
    Raises ValueError unless each is a permutation of the ranks.
    """
    validation.integer("size", size, 1)
    rings = orders or (tuple(range(size)),)
    if any(sorted(order) != list(range(size)) for order in rings):
        raise ValueError(f"orders must each be a permutation of 0 to {size - 1}")
    return ScatterGather(
        "xring" if len(rings) == 1 else f"xring#{len(rings)}",
        size,
        owners=tuple(range(size)),
        width=len(rings),
        scatter=lambda rank: _rings(rings, rank, 1),
        gather=lambda rank: _rings(rings, rank, 0),
    )


@lru_cache(maxsize=64)
def all_reduce(size: int, orders: Orders | None = None) -> Schedule:
    """Return `xring`, or `xring#k` with k orders (`Topology.ring_orders`): all k rings at once."""
    return scatter_gather(size, orders).all_reduce()


@lru_cache(maxsize=64)
def reduce_scatter(size: int) -> Schedule:
    """Return n - 1 steps that reduce chunk r to rank r; each moves 1 / n of the buffer."""
    steps = scatter_gather(size).scatter
    return Schedule("ring reduce_scatter", size, size, Collective.REDUCE_SCATTER, steps)


@lru_cache(maxsize=64)
def all_gather(size: int) -> Schedule:
    """Return n - 1 steps that send every rank's chunk around the ring."""
    steps = scatter_gather(size).gather
    return Schedule("ring all_gather", size, size, Collective.ALL_GATHER, steps)


def _line(
    order: Sequence[int], rank: int, chunks: int, first: int, action: Action
) -> Iterator[tuple[tuple[Transfer, ...], tuple[Transfer, ...]]]:
    """Yield one rank's (sends, recvs) per step, for chunks that follow each other along a line.

    The first chunk leaves the line's first rank in step `first`. The steps do not end.
    """
    at = order.index(rank)

    def transfer(step: int, hop: int, peer: int, action: Action) -> tuple[Transfer, ...]:
        chunk = step - first - hop
        leaves = None if action is Action.COPY else (1, hop + 1)
        return (Transfer(peer, chunk, chunk + 1, action, leaves),) if 0 <= chunk < chunks else ()

    step = 0
    while True:
        last = at == len(order) - 1
        sends = () if last else transfer(step, at, order[at + 1], Action.COPY)
        recvs = transfer(step, at - 1, order[at - 1], action) if at else ()
        yield sends, recvs
        step += 1


@lru_cache(maxsize=64)
def linear_all_reduce(size: int, chunks: int | None = None) -> Schedule:
    """Return `xring` for Adasum: ((0 · 1) · 2) · ... for every segment; by default 4n chunks."""
    pieces = 4 * size if chunks is None else chunks

    def steps(rank: int) -> Iterator[Step]:
        ranks = range(size)
        there = _line(ranks, rank, pieces, 0, Action.REDUCE_LEFT)
        onward = _line([size - 1, *ranks[:-1]], rank, pieces, size - 1, Action.COPY)
        for _ in range(pieces + 2 * size - 3 if size > 1 else 0):
            (sends, recvs), (more_sends, more_recvs) = next(there), next(onward)
            yield Step(sends + more_sends, recvs + more_recvs, group=(rank,) if recvs else ())

    return Schedule("linear xring", size, pieces, Collective.ALL_REDUCE, steps, whole_segments=True)


def _orders(level: Level) -> Orders:
    if level.topology is None:
        return (tuple(range(level.size)),) * level.shards
    return level.topology.ring_orders(level.shards)


def _schedule(level: Level) -> Schedule:
    if level.one_tree:
        return sharded(linear_all_reduce(level.size), level.shards)
    return all_reduce(level.size, _orders(level))


XRING = Algorithm(
    "xring",
    "k rings, reduce-scatter then all-gather",
    Order.LINE,
    Needs.ONE_TREE,
    schedule=_schedule,
    scatter_gather=lambda level: scatter_gather(level.size, _orders(level)),
    shards=Shards.PER_LOCAL_RANK,
)
