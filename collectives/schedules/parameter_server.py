"""Parameter-server shuffle: each shard goes to its gather rank, is reduced there, and comes back.

Wins where latency is all that counts and ranks are few: two steps, whatever the size. With g gather
ranks spread over the n ranks, a gather rank sends and receives (n + g - 2) / g of the buffer, any
other rank the whole of it; a gather rank needs (n - 1) / g of it as extra memory, which `pscpu`
takes on the host and `psgpu` on the device.

Every tensor of a call has k shards, which are placed on all ranks in turn. Shards in one buffer are
joined to one region per gather rank, g = min(n, k · tensors) regions of equal length, so that each
rank gets one message from each peer. Each call begins one rank after the call before.

Each shard is reduced in one n-way pass in rank order, so every shard has the tree ((0 · 1) · 2) ·
...; for an operator that needs one tree, regions are whole segments.
Sources: Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014; the
shuffle all-reduce of the TensorFlow benchmarks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial

from collectives.schedules.algorithm import ALL, Algorithm, Level, Order, Shards
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
    options = {"whole_segments": whole_segments, "tensors": tensors, "first": first}
    parts = scatter_gather(size, shards, name, **options)
    return replace(parts.all_reduce(), whole_segments=whole_segments)


def _record(name: str, where: str, *, on_host: bool) -> Algorithm:
    def options(level: Level) -> dict[str, int]:
        tensors, first = level.round_robin
        return {"tensors": tensors, "first": first % level.size}

    def schedule(level: Level) -> Schedule:
        one_tree = level.one_tree
        return all_reduce(level.size, level.shards, name, whole_segments=one_tree, **options(level))

    return Algorithm(
        name,
        f"k shards of each tensor, on all ranks in turn, which reduce them in {where} memory",
        Order.LINE,
        ALL,
        schedule=schedule,
        scatter_gather=lambda level: scatter_gather(
            level.size, level.shards, name, **options(level)
        ),
        shards=Shards.PER_RANK,
        on_host=on_host,
    )


PSCPU = _record("pscpu", "host", on_host=True)
PSGPU = _record("psgpu", "the device's", on_host=False)
