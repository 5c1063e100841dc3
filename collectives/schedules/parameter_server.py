"""Parameter-server shuffle: each shard goes to its gather rank, is reduced there, and comes back.

Wins where latency is all that counts and ranks are few: two steps, whatever the size. With g gather
ranks spread over the n ranks, a gather rank sends and receives (n + g - 2) / g of the buffer, any
other rank the whole of it; a gather rank needs (n - 1) / g of it as extra memory, which `pscpu`
takes on the host and `psgpu` on the device.

Every tensor of a call has k shards, which are placed on all ranks in turn. Shards that lie in one
buffer are joined to one region a gather rank, in g = min(n, k · tensors) regions of equal length:
no rank gets more bytes than shard by shard, and each gets one message from each peer,
not one a shard. Each call begins with the rank behind that of the call before.

Each shard is reduced in one n-way pass in rank order, so every shard has the tree ((0 · 1) · 2) ·
... whichever rank gathers it; for an operator that needs one tree, regions are whole segments.
Sources: Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014; the
shuffle all-reduce of the TensorFlow benchmarks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial

from collectives.schedules.algorithm import Algorithm, Order, Shards
from collectives.schedules.schedule import Action, ScatterGather, Schedule, Step, Transfer, back


def _scatter(size: int, owners: tuple[int, ...], whole_segments: bool, rank: int) -> Iterator[Step]:
    if size == 1:
        return
    sends = tuple(Transfer(owner, i, i + 1) for i, owner in enumerate(owners) if owner != rank)
    recvs = tuple(
        Transfer(peer, i, i + 1, action, leaves=(1, 1))
        for i, owner in enumerate(owners)
        if owner == rank
        for peer in range(size)
        if peer != rank
        for action in [Action.REDUCE_LEFT if peer < rank else Action.REDUCE_RIGHT]
    )
    yield Step(sends, recvs, group=(rank,) if recvs and whole_segments else ())


@lru_cache(maxsize=256)
def scatter_gather(
    size: int,
    shards: int = 1,
    name: str = "pscpu",
    *,
    whole_segments: bool = False,
    tensors: int = 1,
    first: int = 0,
) -> ScatterGather:
    """Return the shuffle of `tensors`, each in `shards`, to gather ranks and back.

    whole_segments: Whether regions hold whole segments, so that a gather rank reduces them by
    itself with any operator. first: The first region's gather rank.
    """
    regions = min(size, shards * tensors)
    owners = tuple((first + i * size // regions) % size for i in range(regions))
    scatter = partial(_scatter, size, owners, whole_segments)
    return ScatterGather(
        name if shards == 1 else f"{name}#{shards}",
        size,
        owners,
        width=1,
        scatter=scatter,
        gather=lambda rank: back(scatter(rank)),
    )


@lru_cache(maxsize=256)
def all_reduce(
    size: int,
    shards: int = 1,
    name: str = "pscpu",
    *,
    whole_segments: bool = False,
    tensors: int = 1,
    first: int = 0,
) -> Schedule:
    """Return `pscpu` or `psgpu`; whole_segments is for operators that need one tree."""
    parts = scatter_gather(
        size, shards, name, whole_segments=whole_segments, tensors=tensors, first=first
    )
    return replace(parts.all_reduce(), whole_segments=whole_segments)


def _record(name: str, where: str, *, on_host: bool) -> Algorithm:
    return Algorithm(
        name,
        f"k shards of each tensor, on all ranks in turn, which reduce them in {where} memory",
        Order.LINE,
        all_at_once=True,
        schedule=lambda level: all_reduce(
            level.size,
            level.shards,
            name,
            whole_segments=level.one_tree,
            tensors=level.round_robin.tensors,
            first=level.round_robin.first % level.size,
        ),
        scatter_gather=lambda level: scatter_gather(
            level.size,
            level.shards,
            name,
            tensors=level.round_robin.tensors,
            first=level.round_robin.first % level.size,
        ),
        shards=Shards.PER_RANK,
        on_host=on_host,
    )


PSCPU = _record("pscpu", "host", on_host=True)
PSGPU = _record("psgpu", "the device's", on_host=False)
