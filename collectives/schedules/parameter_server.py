"""Parameter-server shuffle: each shard goes to its gather rank, is reduced there, and comes back.

Wins where latency is all that counts and ranks are few: two steps, whatever the size. With k
shards on k gather ranks spread over the n ranks, a gather rank sends and receives (n + k - 2) / k
of the buffer, any other rank the whole of it; a gather rank needs (n - 1) / k of it as extra
memory, which `pscpu` takes on the host and `psgpu` on the device. Each shard is reduced in one
n-way pass in rank order, so every shard has the tree ((0 · 1) · 2) · ...; for an operator that
needs one tree, shards are whole segments. Sources: Li et al., "Scaling distributed machine learning
with the parameter server", OSDI 2014; the shuffle all-reduce of the TensorFlow benchmarks.
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


def _owners(size: int, shards: int) -> tuple[int, ...]:
    """Return the gather rank of every shard; `shards` is at most `size`."""
    return tuple(i * size // shards for i in range(shards))


@lru_cache(maxsize=256)
def scatter_gather(
    size: int, shards: int = 1, name: str = "pscpu", *, whole_segments: bool = False
) -> ScatterGather:
    """Return the shuffle of `shards` regions to as many gather ranks and back.

    Args:
        size: Number of ranks.
        shards: From 1 to `size`.
        name: What it is called.
        whole_segments: Whether regions hold whole segments, so that a gather rank reduces them by
            itself with any operator.
    """
    owners = _owners(size, shards)
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
    size: int, shards: int = 1, name: str = "pscpu", *, whole_segments: bool = False
) -> Schedule:
    """Return `pscpu` or `psgpu`; whole_segments is for operators that need one tree."""
    schedule = scatter_gather(size, shards, name, whole_segments=whole_segments).all_reduce()
    return replace(schedule, whole_segments=whole_segments)


def _record(name: str, where: str, *, on_host: bool) -> Algorithm:
    return Algorithm(
        name,
        f"k gather ranks reduce one k-th each, in {where} memory",
        Order.LINE,
        schedule=lambda level: all_reduce(
            level.size, level.shards, name, whole_segments=level.one_tree
        ),
        scatter_gather=lambda level: scatter_gather(level.size, level.shards, name),
        shards=Shards.PER_RANK,
        on_host=on_host,
    )


PSCPU = _record("pscpu", "host", on_host=True)
PSGPU = _record("psgpu", "the device's", on_host=False)
