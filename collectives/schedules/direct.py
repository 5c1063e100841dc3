"""Direct exchange: every region of the buffer is sent to one rank, reduced there, and sent back.

`direct`: rank r owns slice r of all vectors. It wins for Adasum on more than two ranks if steps
cost more than messages, as on the GPUs of one node: 2 steps for any size, 2 (n - 1) / n of the
buffer each way, and (n - 1) / n of it as extra memory, the slices of the n - 1 other ranks. Each
rank sends n - 1 messages per step, so `rd` is faster if only latency counts. An operator that reads
trees receives all n operands with the tree of `rd` and `vhdd`, and needs tables of all slices for
it: between the two steps every rank sends its table to every other. Adasum's tables are Gram
matrices, since every vector of its tree is a linear combination of the ranks' vectors. They grow
with the square of the ranks, so `vhdd` is better for more than 16. Other operators receive all
operands in rank order.

`pscpu` and `psgpu`, the parameter-server shuffle: each shard goes to its gather rank. They win if
only latency counts and there are few ranks. With g gather ranks spread over the n ranks, a gather
rank sends and receives (n + g - 2) / g of the buffer, the other ranks the whole of it; gather ranks
need (n - 1) / g of it as extra memory, on the host for `pscpu`, on the device for `psgpu`. Every
tensor has k shards, which are placed on all ranks in turn. Shards in one buffer are joined into one
region per gather rank, g = min(n, k · tensors) regions of equal length, so that each rank gets one
message from each peer. Each call begins one rank after the call before. Each shard is reduced in
one n-way pass in rank order, so every shard has the tree ((0 · 1) · 2) · ...; for an operator that
needs one tree, regions are whole segments.

Sources: the direct algorithms of Thakur, Rabenseifner and Gropp, IJHPCA 2005; the Gram matrix is
this library's own; Li et al., "Scaling distributed machine learning with the parameter server",
OSDI 2014; the shuffle all-reduce of the TensorFlow benchmarks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from collectives.schedules.algorithm import ALL, Algorithm, Level, Order, Shards, by_size
from collectives.schedules.halving import balanced_tree
from collectives.schedules.schedule import (
    Action,
    Collective,
    ScatterGather,
    Schedule,
    Step,
    Transfer,
    back,
)


def _scatter(size: int, owners: Sequence[int], rank: int) -> Iterator[Step]:
    """Yield one step: every owner receives its region from all other ranks."""
    if size == 1:
        return
    # The next rank first, so that not all begin with rank 0.
    regions = sorted(enumerate(owners), key=lambda each: (each[1] - rank) % size)
    sends = tuple(Transfer(owner, i, i + 1) for i, owner in regions if owner != rank)
    recvs = tuple(
        Transfer(peer, i, i + 1, action, leaves=(1, 1))
        for i, owner in enumerate(owners)
        if owner == rank
        for peer in range(size)
        if peer != rank
        for action in [Action.REDUCE_LEFT if peer < rank else Action.REDUCE_RIGHT]
    )
    yield Step(sends, recvs)


@lru_cache(maxsize=64)
def _all(size: int) -> tuple[int, ...]:
    return tuple(range(size))


@lru_cache(maxsize=64)
def scatter_gather(size: int) -> ScatterGather:
    """Return the exchange of slices and the gather of the results; rank r owns slice r."""

    def scatter(rank: int) -> Iterator[Step]:
        for step in _scatter(size, _all(size), rank):
            yield step._replace(group=_all(size), tree=balanced_tree(size))

    return ScatterGather(
        "direct",
        size,
        owners=_all(size),
        width=1,
        scatter=scatter,
        gather=lambda rank: back(scatter(rank)),
    )


@lru_cache(maxsize=64)
def all_reduce(size: int) -> Schedule:
    """Return `direct`: 2 steps, 2 (n - 1) / n of the buffer each way."""
    return scatter_gather(size).all_reduce()


@lru_cache(maxsize=64)
def reduce_scatter(size: int) -> Schedule:
    """Return only the first step of `direct`: rank r ends with slice r reduced."""
    steps = scatter_gather(size).scatter
    return Schedule("direct reduce_scatter", size, size, Collective.REDUCE_SCATTER, steps)


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


@lru_cache(maxsize=256)
def shuffle_parts(
    size: int,
    shards: int = 1,
    name: str = "pscpu",
    *,
    whole_segments: bool = False,
    tensors: int = 1,
    first: int = 0,
) -> ScatterGather:
    """Return the shuffle of `tensors`, each in `shards`, to gather ranks and back.

    whole_segments: whether regions hold whole segments, so that the gather rank can reduce them by
    itself with any operator; first: the first region's gather rank.
    """
    regions = min(size, shards * tensors)
    owners = tuple((first + i * size // regions) % size for i in range(regions))

    def scatter(rank: int) -> Iterator[Step]:
        for step in _scatter(size, owners, rank):
            yield step._replace(group=(rank,)) if step.recvs and whole_segments else step

    return ScatterGather(
        name if shards == 1 else f"{name}#{shards}",
        size,
        owners,
        width=1,
        scatter=scatter,
        gather=lambda rank: back(scatter(rank)),
    )


@lru_cache(maxsize=256)
def shuffle(
    size: int,
    shards: int = 1,
    name: str = "pscpu",
    *,
    whole_segments: bool = False,
    tensors: int = 1,
    first: int = 0,
) -> Schedule:
    """Return `pscpu` or `psgpu`; whole_segments is for operators that need one tree."""
    options = {"whole_segments": whole_segments, "tensors": tensors, "first": first}
    parts = shuffle_parts(size, shards, name, **options)
    return replace(parts.all_reduce(), whole_segments=whole_segments)


def _server(name: str, where: str, *, on_host: bool) -> Algorithm:
    def options(level: Level) -> dict[str, int]:
        tensors, first = level.round_robin
        return {"tensors": tensors, "first": first % level.size}

    def schedule(level: Level) -> Schedule:
        one_tree = level.one_tree
        return shuffle(level.size, level.shards, name, whole_segments=one_tree, **options(level))

    return Algorithm(
        name,
        f"k shards of each tensor, on all ranks in turn, which reduce them in {where} memory",
        Order.LINE,
        ALL,
        schedule=schedule,
        scatter_gather=lambda level: shuffle_parts(
            level.size, level.shards, name, **options(level)
        ),
        shards=Shards.PER_RANK,
        on_host=on_host,
    )


PSCPU = _server("pscpu", "host", on_host=True)
PSGPU = _server("psgpu", "the device's", on_host=False)
