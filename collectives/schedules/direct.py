"""Direct exchange: every rank gets its slice of all vectors, reduces them at once, and sends it on.

Wins for Adasum on more than two ranks where a step costs more than a message, as on GPUs of one
node: 2 steps whatever the size, 2 (n - 1) / n of the buffer each way, and (n - 1) / n of it as
extra memory, the slices of the n - 1 other ranks. Each rank sends n - 1 messages a step, so that
where latency is all that counts `rd` is faster.

An operator that reads trees is handed all n operands with the tree of `rd` and `vhdd`, for which it
needs tables of all slices: one small exchange more, of every rank with every other, between the two
steps. Adasum's are Gram matrices, since every vector of its tree is a linear combination of the
ranks' vectors. Of more than 16 ranks, and where nodes and their ranks are powers of two, it climbs
the tree in levels (`digits.py`): inside the nodes first, at most 8 operands at a time. Other
operators take all operands in rank order. Sources: the direct algorithms of Thakur, Rabenseifner
and Gropp, IJHPCA 2005; the Gram matrix is this library's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise

from collectives.schedules import digits
from collectives.schedules.algorithm import Algorithm, Level, Order
from collectives.schedules.folding import Fold, balanced_tree
from collectives.schedules.partition import split_bounds
from collectives.schedules.schedule import (
    Action,
    Collective,
    ScatterGather,
    Schedule,
    Step,
    Transfer,
    back,
    sharded,
)

# Ranks whose operands meet at once wherever they are alike.
_MOST_AT_ONCE = 16
# Of a digit: 8 ranks, of whose slices kernels read each once.
_MOST_BITS = 3


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


def _radices(level: Level) -> tuple[int, ...]:
    """Return the digits by which a tree is climbed; none where all operands meet at once."""
    size = level.size
    local = 1 if level.topology is None else level.topology.local_size
    if not level.one_tree or level.at_once:
        return ()
    leaves = Fold(size).leaves
    # Of nodes of other sizes no level would be one node.
    near = local if local < size == leaves else 1
    if near == 1 and size <= _MOST_AT_ONCE:
        return ()
    return *radices_of(near), *radices_of(leaves // near)


def radices_of(leaves: int) -> tuple[int, ...]:
    """Return the digits of a power of two of leaves: as few and as equal as up to 8 can be."""
    bits = leaves.bit_length() - 1
    bounds = split_bounds(bits, -(-bits // _MOST_BITS)) if bits else [0]
    return tuple(1 << (stop - start) for start, stop in pairwise(bounds))


def _schedule(level: Level) -> Schedule:
    radices = _radices(level)
    return digits.all_reduce(level.size, radices) if radices else all_reduce(level.size)


DIRECT = Algorithm(
    "direct",
    "each rank reduces its slice of all vectors at once, for Adasum by one Gram matrix",
    Order.BALANCED,
    all_at_once=True,
    by_tree=True,
    pairwise="vhdd",
    schedule=lambda level: sharded(_schedule(level), level.shards),
    scatter_gather=lambda level: scatter_gather(level.size).sharded(level.shards),
)
