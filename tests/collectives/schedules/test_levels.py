"""Every pair of an inner and an outer algorithm is verified, and joins nodes in order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import pytest

from collectives.cost import ASSUMED, estimate
from collectives.schedules.algorithm import Shards
from collectives.schedules.registry import ALGORITHMS, LIBRARIES, ORDERED
from collectives.schedules.schedule import Schedule
from collectives.schedules.spec import INNER, OUTER
from collectives.schedules.topology import Topology
from collectives.schedules.verify import verify
from tests.collectives.schedules.simulation import (
    two_levels,
)


class Pair(NamedTuple):
    inner: str
    inner_shards: int
    outer: str
    outer_shards: int

    def on(self, topology: Topology, *, one_tree: bool) -> Schedule:
        return two_levels(*self, topology, one_tree=one_tree)


def pairs(topology: Topology) -> Iterator[Pair]:
    """Every pair with every shard count allowed."""
    for inner, outer in product(INNER, OUTER):
        local_size, nodes = topology.local_size, topology.num_nodes
        inner_most = 1 if inner in LIBRARIES else _most(inner, local_size, local_size)
        outer_most = _most(outer, nodes, local_size)
        for shards in product(range(1, inner_most + 1), range(1, outer_most + 1)):
            yield Pair(inner, shards[0], outer, shards[1])


def _most(name: str, size: int, local_size: int) -> int:
    most = {Shards.PER_RANK: size, Shards.PER_LOCAL_RANK: local_size if size > 1 else 3}
    return most.get(ALGORITHMS[name].shards, 3)


def topologies(sizes: range) -> list[Topology]:
    return [Topology(n, local) for n in sizes for local in range(1, n + 1) if n % local == 0]


def prove(pair: Pair, topology: Topology) -> None:
    """Adasum by the pair has one tree, and a group for every reduction across nodes."""
    if pair.outer not in ORDERED:
        with pytest.raises(ValueError, match=f"'{pair.outer}' cannot carry Adasum"):
            pair.on(topology, one_tree=True)
        return
    schedule = pair.on(topology, one_tree=True)
    proof = verify(schedule)
    if topology.num_nodes == 1:
        reduces = pair.inner not in LIBRARIES and topology.local_size > 1
        assert proof.phases == (1 if reduces else 0)
        return
    assert proof.phases == 2 and proof.carries_adasum


def test_every_pair_is_proved_on_small_topologies() -> None:
    """To 4 ranks everything: every topology, pair and shard count."""
    for topology in [*topologies(range(1, 5)), Topology(6, 2)]:
        for pair in pairs(topology):
            prove(pair, topology)
            verify(pair.on(topology, one_tree=False))


@pytest.mark.slow
def test_every_topology_is_proved() -> None:
    """From 5 to 64 ranks every topology, each with the next of the pairs and of its shards."""
    every = list(product(INNER, OUTER))
    tried: dict[bool, set[tuple[str, str]]] = {True: set(), False: set()}
    for i, topology in enumerate(topologies(range(5, 65))):
        local = dataclasses.replace(topology, local_order=tuple(reversed(topology.local_order)))
        most = 4 if topology.size < 25 else 2
        turn, at = divmod(i, len(every))
        few = [
            pair
            for pair in pairs(topology)
            if (pair.inner, pair.outer) == every[at]
            and max(pair.inner_shards, pair.outer_shards) <= most
        ]
        pair = few[i * 41 % len(few)]
        # One tree for every other pair, and the next turn for those between.
        one_tree = (turn + at) % 2 == 1
        tried[one_tree].add(every[at])
        if one_tree:
            prove(pair, local)
        else:
            assert verify(pair.on(local, one_tree=False)).phases <= 2
    assert tried[True] == tried[False] == set(every)


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("inner", sorted({*INNER} - {*LIBRARIES}))
def test_bytes_between_nodes_are_those_of_one_rank_a_node(inner: str, outer: str) -> None:
    two = estimate(f"{inner}/{outer}", 4096, ASSUMED, Topology(12, 3))
    assert two.inter == pytest.approx(estimate(outer, 4096, ASSUMED, Topology(4, 1)).inter)
