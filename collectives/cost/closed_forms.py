"""Profiles in closed form: the same steps as the schedules', for all ranks at once.

Walking 65,536 ranks step by step would take hours on a ring; here a ring is two kinds of step and
how often each occurs, and a level of recursive halving one array operation. The tests hold these
to `walk` at every size up to 64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from collectives.cost.profiles import Ints, Profile, Profiler, Transfers
from collectives.schedules.folding import Fold
from collectives.schedules.spec import AllReduceSpec
from collectives.schedules.topology import Topology

# Steps of a pipeline times ranks beyond which only some of its steps, evenly spread, are looked at:
# bytes are then right to 1 %.
_PIPELINE_CELLS, _FEWEST_SAMPLES = 1 << 22, 128


class Bulk(NamedTuple):
    """Steps of one level, for all its ranks. source, target, ways: as Transfers; share: of each.

    times: how many such steps. members: the groups of the step's reductions, one a row.
    """

    source: Ints
    target: Ints
    share: float
    ways: Ints | int = 0
    times: int = 1
    members: Ints | None = None


def closed(spec: AllReduceSpec, topology: Topology, op: str) -> Profile:
    """The profile of an all-reduce by one or two levels. op: "sum" or "adasum"."""
    profiler = Profiler(topology)
    name, shards = spec.outer, spec.shards
    samples = max(_FEWEST_SAMPLES, _PIPELINE_CELLS // topology.size)
    if spec.inner is None:
        orders = topology.ring_orders(shards) if name == "xring" and op == "sum" else None
        for bulk in _all_reduce(name, topology.size, shards, op, samples, orders):
            _emit(profiler, bulk, lambda ranks: ranks, 1.0, op)
        return profiler.profile()

    node, nodes, local = topology.node(), topology.num_nodes, topology.local_size
    inner_shards = spec.inner_shards if local > 1 else 1
    scatter, gather, owners = _halves(spec.inner, node, inner_shards)
    first = np.arange(nodes)[:, None] * local

    def inside(ranks: Ints) -> Ints:
        return (first + ranks).reshape(-1)

    def across(places: Ints) -> Ints:
        ranks = places[..., None] * local + owners
        return ranks.reshape(*places.shape[:-1], -1)

    for bulk in scatter:
        _emit(profiler, bulk, inside, 1.0, "sum")
    for bulk in _all_reduce(name, nodes, shards, op, samples):
        _emit(profiler, bulk, across, 1 / len(owners), op)
    for bulk in gather:
        _emit(profiler, bulk, inside, 1.0, "sum")
    return profiler.profile()


def _emit(
    profiler: Profiler, bulk: Bulk, place: Callable[[Ints], Ints], share: float, reduction: str
) -> None:
    """Add one level's steps. place: the level's ranks in the topology; share: of each region."""
    source, target = place(bulk.source), place(bulk.target)
    ways = bulk.ways
    if isinstance(ways, np.ndarray):
        ways = np.repeat(ways, len(source) // max(1, len(ways)))
    transfers = Transfers(source, target, share * bulk.share, ways)
    profiler.add(transfers, times=bulk.times, reduction=reduction)
    if reduction == "adasum" and bulk.members is not None:
        members = place(bulk.members)
        for dots in _doubling(members.shape[1], 1):
            profiler.add_dots(
                Transfers(
                    members[:, dots.source].reshape(-1),
                    members[:, dots.target].reshape(-1),
                    1.0,
                    dots.ways,
                )
            )


def _all_reduce(
    name: str,
    size: int,
    shards: int,
    op: str,
    samples: int,
    orders: Sequence[Sequence[int]] | None = None,
) -> Iterator[Bulk]:
    if name in ("pscpu", "psgpu"):
        scatter, gather, _ = _shuffle(size, shards)
        return iter([*scatter, *gather])
    if name == "xring" and op == "adasum":
        return _sharded(_linear(size, samples), shards)
    if name == "xring":
        scatter, gather = _rings(orders or [range(size)])
        # Rings of one's own orders are the shards already.
        return _sharded(iter([*scatter, *gather]), 1 if orders else shards)
    if name == "rd":
        return _sharded(_doubling(size, 1), shards)
    scatter, gather, _ = _halving(size)
    return _sharded(iter([*scatter, *gather]), shards)


_Halves = tuple[list[Bulk], list[Bulk], Ints]


def _halves(name: str, node: Topology, shards: int) -> _Halves:
    """An inner algorithm: its steps up to the owners, those from them, and the owners."""
    if name in ("pscpu", "psgpu"):
        return _shuffle(node.size, shards)
    if name == "xring":
        return (*_rings(node.ring_orders(shards)), np.arange(node.size))
    scatter, gather, owners = _halving(node.size)
    return [*_sharded(iter(scatter), shards)], [*_sharded(iter(gather), shards)], owners


def _sharded(bulks: Iterator[Bulk], shards: int) -> Iterator[Bulk]:
    """Every message in so many pieces."""
    for bulk in bulks:
        source, target = np.tile(bulk.source, shards), np.tile(bulk.target, shards)
        ways = np.tile(bulk.ways, shards) if isinstance(bulk.ways, np.ndarray) else bulk.ways
        share = bulk.share / shards
        yield bulk._replace(source=source, target=target, share=share, ways=ways)


def _rings(orders: Sequence[Sequence[int]]) -> tuple[list[Bulk], list[Bulk]]:
    size = len(orders[0])
    if size == 1:
        return [], []
    around = np.array([list(order) for order in orders])
    source, target = around.reshape(-1), np.roll(around, -1, axis=1).reshape(-1)
    share = 1 / (len(orders) * size)
    scatter = Bulk(source, target, share, ways=1, times=size - 1)
    return [scatter], [scatter._replace(ways=0)]


def _fold(size: int) -> tuple[Ints, list[Bulk], list[Bulk]]:
    """The rank of every leaf, and the steps that fold ranks in and out."""
    fold = Fold(size)
    ranks = np.array([fold.rank(leaf) for leaf in range(fold.leaves)], dtype=np.int64)
    if not fold.extra:
        return ranks, [], []
    kept = ranks[: fold.extra]
    into = Bulk(kept + 1, kept, 1.0, ways=1, members=kept[:, None])
    return ranks, [into], [Bulk(kept, kept + 1, 1.0)]


def _halving(size: int) -> _Halves:
    ranks, into, out = _fold(size)
    leaves = np.arange(len(ranks))
    scatter: list[Bulk] = []
    gather: list[Bulk] = []
    for level in range(len(ranks).bit_length() - 1):
        distance = 1 << level
        members = ranks.reshape(-1, 2 * distance)
        bulk = Bulk(ranks, ranks[leaves ^ distance], 0.5 / distance, ways=1, members=members)
        scatter.append(bulk)
        gather.insert(0, bulk._replace(ways=0, members=None))
    return into + scatter, gather + out, ranks


def _doubling(size: int, share: float) -> Iterator[Bulk]:
    ranks, into, out = _fold(size)
    leaves = np.arange(len(ranks))
    yield from into
    for level in range(len(ranks).bit_length() - 1):
        partners = ranks[leaves ^ (1 << level)]
        yield Bulk(ranks, partners, share, ways=1, members=ranks[:, None])
    yield from out


def _shuffle(size: int, shards: int) -> _Halves:
    owners = np.arange(shards) * size // shards
    if size == 1:
        return [], [], owners
    source, target = np.tile(np.arange(size), shards), np.repeat(owners, size)
    others = source != target
    scatter = Bulk(source[others], target[others], 1 / shards, ways=size - 1)
    return [scatter], [Bulk(scatter.target, scatter.source, 1 / shards)], owners


def _linear(size: int, samples: int) -> Iterator[Bulk]:
    """The pipeline there and onward; of a long one, steps evenly spread that stand for the rest."""
    if size == 1:
        return
    chunks = 4 * size
    steps = chunks + 2 * size - 3
    cuts = np.linspace(0, steps, min(steps, samples) + 1).astype(np.int64)
    there, onward = np.arange(size - 1), np.array([size - 1, *range(size - 2)], dtype=np.int64)
    for begin, end in pairwise(cuts.tolist()):
        step = (begin + end) // 2
        forth = there[(step - there >= 0) & (step - there < chunks)]
        places = step - (size - 1) - np.arange(size - 1)
        back = onward[(places >= 0) & (places < chunks)]
        source = np.concatenate([forth, back])
        ways = np.concatenate([np.ones_like(forth), np.zeros_like(back)])
        yield Bulk(source, (source + 1) % size, 1 / chunks, ways, end - begin)
