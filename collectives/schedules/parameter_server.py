"""Parameter-server shuffle: each shard goes to its gather rank, is reduced there, and comes back.

Wins where latency is all that counts and ranks are few: two steps, whatever the size. With k
shards on k gather ranks spread over the n ranks, a gather rank sends and receives (n + k - 2) / k
of the buffer, any other rank the whole of it; a gather rank needs (n - 1) / k of it as extra
memory, which `pscpu` takes on the host and `psgpu` on the device. Each shard is reduced in one
n-way pass in rank order, so every shard has the tree ((0 · 1) · 2) · ... Sources: Li et al.,
"Scaling distributed machine learning with the parameter server", OSDI 2014; the shuffle all-reduce
of the TensorFlow benchmarks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from collectives.schedules.building_blocks import Halves
from collectives.schedules.schedule import Action, Schedule, Step, Transfer


def _scatter(size: int, owners: tuple[int, ...], rank: int) -> Iterator[Step]:
    if size == 1:
        return
    sends = tuple(Transfer(owner, i, i + 1) for i, owner in enumerate(owners) if owner != rank)
    recvs = tuple(
        Transfer(peer, i, i + 1, Action.REDUCE_LEFT if peer < rank else Action.REDUCE_RIGHT)
        for i, owner in enumerate(owners)
        if owner == rank
        for peer in range(size)
        if peer != rank
    )
    yield Step(sends, recvs)


def _gather(size: int, owners: tuple[int, ...], rank: int) -> Iterator[Step]:
    if size == 1:
        return
    sends = tuple(
        Transfer(peer, i, i + 1)
        for i, owner in enumerate(owners)
        if owner == rank
        for peer in range(size)
        if peer != rank
    )
    recvs = tuple(Transfer(owner, i, i + 1) for i, owner in enumerate(owners) if owner != rank)
    yield Step(sends, recvs)


@lru_cache(maxsize=256)
def halves(size: int, shards: int = 1, name: str = "pscpu") -> Halves:
    """`shards` regions on as many gather ranks; ValueError for more shards than ranks."""
    if not 1 <= shards <= size:
        raise ValueError(
            f"{name} of {size} ranks takes 1 to {size} shards, one a gather rank, got {shards}"
        )
    owners = tuple(i * size // shards for i in range(shards))
    return Halves(
        name if shards == 1 else f"{name}#{shards}",
        size,
        owners,
        width=1,
        scatter=lambda rank: _scatter(size, owners, rank),
        gather=lambda rank: _gather(size, owners, rank),
    )


@lru_cache(maxsize=256)
def all_reduce(
    size: int, shards: int = 1, name: str = "pscpu", *, whole_segments: bool = False
) -> Schedule:
    """`pscpu` or `psgpu`; with whole_segments for operators that are not associative."""
    schedule = halves(size, shards, name).all_reduce()
    return replace(schedule, whole_segments=whole_segments)
