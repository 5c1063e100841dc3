"""The locality that all ranks find at start-up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adasum import Adasum
from collectives import Group, Topology
from collectives.bootstrap.locality import Locality, find_locality
from collectives.transport import ThreadTransport, ThreadWorld
from tests.collectives.transport.thread_ranks import TIMEOUT, together

Given = tuple[int | None, int | None]


class Counting(ThreadTransport):
    """Counts its exchanges."""

    exchanges = 0

    def exchange(self, *arguments: Any, **options: Any) -> None:
        self.exchanges += 1
        super().exchange(*arguments, **options)


def find(given: list[Given], topology: Topology | None = None) -> list[Locality]:
    """Every rank's locality where it knows its local rank and size, or neither."""
    world = ThreadWorld(len(given))

    def start(rank: int) -> Locality:
        transport = Counting(world, rank)
        found = find_locality(transport, TIMEOUT, *given[rank], topology)
        # Lengths and contents, in as many rounds as ranks are doubled in.
        gathered = 2 * (len(given) - 1).bit_length()
        assert transport.exchanges == (0 if topology and None not in given[rank] else gathered)
        return found

    return together(*(lambda rank=rank: start(rank) for rank in range(len(given))))


def test_local_ranks_that_all_give_make_nodes_of_one_host() -> None:
    found = find([(0, 2), (1, 2), (0, 2), (1, 2)])
    assert found == [Locality(rank % 2, 2, (0, 0, 1, 1), Topology(4, 2)) for rank in range(4)]


@pytest.mark.parametrize("given", [[(None, None)] * 4, [(0, 2), (None, None), (0, 2), (1, 2)]])
def test_host_names_tell_where_a_rank_gives_no_local_rank(given: list[Given]) -> None:
    assert find(given) == [Locality(r, 4, (0,) * 4, Topology(4, 4)) for r in range(4)]


@pytest.mark.parametrize(
    ("given", "hosts"),
    [
        ([(0, 3), (1, 3), (2, 3), (0, 1)], (0, 0, 0, 1)),
        ([(0, 1), (0, 3), (1, 3), (2, 3)], (0, 1, 1, 1)),
        # Numbered round robin, and one node around the other.
        ([(0, 2), (0, 2), (1, 2), (1, 2)], (0, 1, 0, 1)),
        ([(0, 3), (0, 2), (1, 2), (1, 3), (2, 3)], (0, 1, 1, 0, 0)),
    ],
)
def test_nodes_that_are_no_equal_runs_are_the_same_on_every_rank(
    given: list[tuple[int, int]], hosts: tuple[int, ...]
) -> None:
    found = find([*given])
    assert [(each.local_rank, each.local_size) for each in found] == given
    assert {each.hosts for each in found} == {hosts}
    (topology,) = {each.topology for each in found}
    assert (topology.size, topology.local_size) == (len(given), 1)
    nodes = {host: tuple(r for r, h in enumerate(hosts) if h == host) for host in hosts}
    assert topology.uneven == tuple(nodes.values())


def test_local_ranks_in_another_order_than_the_ranks_stand() -> None:
    found = find([(1, 2), (0, 2), (0, 2), (1, 2)])
    assert [each.local_rank for each in found] == [1, 0, 0, 1]
    assert {each.topology for each in found} == {Topology(4, 2)}


def test_local_ranks_that_fill_no_nodes_count_for_nothing() -> None:
    """As where a script was started with variables that another launcher left behind."""
    found = find([(0, 3), (1, 3), (0, 3), (1, 3)])
    assert found == [Locality(r, 4, (0,) * 4, Topology(4, 4)) for r in range(4)]


@pytest.mark.parametrize(
    ("given", "nodes"),
    [
        ([(0, 3), (1, 3), (2, 3), (0, 1)], "node 0 has ranks 0-2, node 1 has rank 3"),
        ([(0, 2), (0, 2), (1, 2), (1, 2)], "node 0 has ranks 0, 2, node 1 has ranks 1, 3"),
    ],
)
def test_two_levels_on_nodes_that_are_no_equal_runs_are_an_error_on_every_rank(
    given: list[tuple[int, int]], nodes: str
) -> None:
    """Before anything is sent; one level and auto go on, and so does a part with equal nodes."""
    world = ThreadWorld(4)

    def start(rank: int) -> tuple[int, str]:
        of = dict(zip(("local_rank", "local_size"), given[rank], strict=True))
        group = Group(world.transport(rank), timeout=TIMEOUT, **of)
        with pytest.raises(ValueError, match="two levels") as caught:
            group.all_reduce(torch.ones(3), algorithm="rd:8:xring/rd")
        with pytest.raises(ValueError, match="two levels"):
            group.check_algorithm("rechd/vhdd", Adasum)
        for algorithm in ("auto", "rd"):
            assert group.all_reduce(torch.ones(3), algorithm=algorithm).tolist() == [4.0] * 3
        part = group.split([0, 1] if given[1] == (1, 3) else [0, 2, 1, 3])
        if part is not None:
            two = part.all_reduce(torch.ones(3), algorithm="xring/rd")
            assert two.tolist() == [float(part.size)] * 3
        return group.num_nodes, str(caught.value)

    found = together(*(lambda rank=rank: start(rank) for rank in range(4)))
    assert {number for number, _ in found} == {2}
    assert all(nodes in text and "xring/rd" in text for _, text in found)


def test_a_topology_that_is_given_stands() -> None:
    given = Topology(4, 4, (3, 2, 1, 0))
    for local in ((None, None), (0, 1)):
        assert {each.topology for each in find([local] * 4, given)} == {given}


def test_part_of_a_group_has_the_hosts_of_its_ranks() -> None:
    """Ranks 0 and 1 are on one host, 2 and 3 on another, as they say."""
    world = ThreadWorld(4)

    def start(rank: int) -> tuple[Any, ...] | None:
        group = Group(world.transport(rank), timeout=TIMEOUT, local_rank=rank % 2, local_size=2)
        part = group.split([2, 1, 3])
        return part and (part.hosts, part.local_rank, part.local_size, part.topology)

    hosts, alone = (1, 0, 1), Topology(3, 1, uneven=((0, 2), (1,)))
    assert together(*(lambda rank=rank: start(rank) for rank in range(4))) == [
        None,
        (hosts, 0, 1, alone),
        (hosts, 0, 2, alone),
        (hosts, 1, 2, alone),
    ]
