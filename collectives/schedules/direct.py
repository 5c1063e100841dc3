"""Direct exchange: every rank gets its slice of all vectors, reduces them at once, and sends it on.

Wins for Adasum on more than two ranks where a step costs more than a message, as on GPUs of one
node: 2 steps whatever the size, 2 (n - 1) / n of the buffer each way, and (n - 1) / n of it as
extra memory, the slices of the n - 1 other ranks. Each rank sends n - 1 messages a step, so that
where latency is all that counts `rd` is faster.

An operator that reads trees is handed all n operands with the tree of `rd` and `vhdd`, for which it
needs tables of all slices: between the two steps every rank sends every other one its table. Adasum
takes Gram matrices, since every vector of its tree is a linear combination of the ranks' vectors.
Tables grow with the square of the ranks, so that `vhdd` is better for more than 16. Other operators
take all operands in rank order. Sources: the direct algorithms of Thakur, Rabenseifner and Gropp,
IJHPCA 2005; the Gram matrix is this library's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from collectives.schedules.algorithm import ALL, Algorithm, Order, by_size
from collectives.schedules.folding import balanced_tree
from collectives.schedules.schedule import (
    Action,
    Collective,
    ScatterGather,
    Schedule,
    Step,
    Transfer,
    back,
)


def _scatter(size: int, rank: int) -> Iterator[Step]:
    if size == 1:
        return
    # The next rank first, so that not all begin with rank 0.
    next_ones = (peer % size for peer in range(rank + 1, rank + size))
    sends = tuple(Transfer(peer, peer, peer + 1) for peer in next_ones)
    recvs = tuple(
        Transfer(peer, rank, rank + 1, action, leaves=(1, 1))
        for peer in range(size)
        if peer != rank
        for action in [Action.REDUCE_LEFT if peer < rank else Action.REDUCE_RIGHT]
    )
    yield Step(sends, recvs, group=_all(size), tree=balanced_tree(size))


@lru_cache(maxsize=64)
def _all(size: int) -> tuple[int, ...]:
    return tuple(range(size))


@lru_cache(maxsize=64)
def scatter_gather(size: int) -> ScatterGather:
    """Return the exchange of slices and the gather of the results; rank r owns slice r."""
    return ScatterGather(
        "direct",
        size,
        owners=_all(size),
        width=1,
        scatter=lambda rank: _scatter(size, rank),
        gather=lambda rank: back(_scatter(size, rank)),
    )


@lru_cache(maxsize=64)
def all_reduce(size: int) -> Schedule:
    """Return `direct`: 2 steps, 2 (n - 1) / n of the buffer each way."""
    return scatter_gather(size).all_reduce()


@lru_cache(maxsize=64)
def reduce_scatter(size: int) -> Schedule:
    """Return its first step alone, which leaves rank r with slice r reduced."""
    steps = scatter_gather(size).scatter
    return Schedule("direct reduce_scatter", size, size, Collective.REDUCE_SCATTER, steps)


@lru_cache(maxsize=256)
def reduce(size: int, root: int) -> Schedule:
    """Return its first step, and one in which all send the root their slices."""
    parts = scatter_gather(size)

    def steps(rank: int) -> Iterator[Step]:
        yield from parts.scatter(rank)
        others = [peer for peer in range(size) if peer != root]
        if rank == root:
            yield Step(recvs=tuple(Transfer(peer, peer, peer + 1) for peer in others))
        else:
            yield Step(sends=(Transfer(root, rank, rank + 1),))

    return Schedule("direct reduce", size, size, Collective.REDUCE, steps, root=root)


DIRECT = Algorithm(
    "direct",
    "each rank reduces its slice of all vectors at once, for Adasum by one Gram matrix",
    Order.BALANCED,
    ALL,
    by_tree=True,
    pairwise="vhdd",
    schedule=by_size(all_reduce),
    scatter_gather=lambda level: scatter_gather(level.size).sharded(level.shards),
)
