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
from collectives.schedules.symbolic_step import ScheduleError
from collectives.schedules.topology import Topology
from collectives.schedules.verify import verify
from tests.collectives.schedules.simulation import (
    answers,
    ranks_in,
    two_levels,
    with_step,
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


TOPOLOGIES = [Topology(8, 2), Topology(8, 4), Topology(9, 3), Topology(12, 2), Topology(5, 1)]


@pytest.mark.parametrize("outer", [name for name in OUTER if name in ORDERED])
@pytest.mark.parametrize("inner", INNER)
def test_nodes_are_summed_in_any_order_and_join_in_the_one_promised(inner: str, outer: str) -> None:
    for topology in TOPOLOGIES:
        schedule = two_levels(inner, 1, outer, 1, topology, one_tree=True)
        order = ALGORITHMS[outer].order
        assert order is not None
        expected = order.tree(range(topology.num_nodes))
        for row in answers(schedule):
            assert [collapsed(tree, topology, schedule.replicas) for tree in row] == [
                expected
            ] * schedule.chunks


def collapsed(tree: object, topology: Topology, replicas: int) -> object:
    """The tree with the sum of a whole node replaced by the node's number."""
    if replicas > 1:
        return tree
    ranks = ranks_in(tree)
    node = topology.node_of(min(ranks))
    if ranks == frozenset(topology.ranks_of(node)):
        return node
    assert isinstance(tree, tuple), f"{tree} is part of a node"
    return tuple(collapsed(part, topology, replicas) for part in tree)


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("inner", sorted({*INNER} - {*LIBRARIES}))
def test_bytes_between_nodes_are_those_of_one_rank_a_node(inner: str, outer: str) -> None:
    two = estimate(f"{inner}/{outer}", 4096, ASSUMED, Topology(12, 3))
    assert two.inter == pytest.approx(estimate(outer, 4096, ASSUMED, Topology(4, 1)).inter)


def test_library_inside_one_node_leaves_nothing_to_do() -> None:
    schedule = two_levels("collective", 2, "vhdd", 1, Topology(4, 4), one_tree=True)
    proof = verify(schedule)
    assert (proof.steps, proof.phases, proof.carries_adasum) == (0, 0, True)


@pytest.mark.parametrize("pair", [Pair("xring", 2, "vhdd", 1), Pair("nccl", 1, "pscpu", 2)])
def test_faults_are_found(pair: Pair) -> None:
    """A lost message; and a wrong group or phase, of which one rank alone knows, bars Adasum."""
    schedule = pair.on(Topology(6, 2), one_tree=True)
    for rank in range(6):
        for number, step in enumerate(schedule.steps(rank)):
            if step.sends:
                with pytest.raises(ScheduleError):
                    verify(with_step(schedule, rank, number, step._replace(sends=step.sends[1:])))
            if step.group:
                for other in (step._replace(phase=0), step._replace(group=step.group[:-1])):
                    assert not _carries_adasum(with_step(schedule, rank, number, other))


def _carries_adasum(schedule: Schedule) -> bool:
    try:
        return verify(schedule).carries_adasum
    except ScheduleError:
        return False


def test_faults_of_the_replicas_are_found() -> None:
    schedule = two_levels("nccl", 1, "rechd", 1, Topology(6, 2))
    with pytest.raises(ScheduleError):
        verify(dataclasses.replace(schedule, replicas=1))
    with pytest.raises(ScheduleError):
        verify(dataclasses.replace(schedule, replicas=3))
