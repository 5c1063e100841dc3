"""Nodes, local ranks and ring orders."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.schedules.topology import Topology, ring_permutations


@pytest.mark.parametrize(
    ("arguments", "pred", "rank"),
    [
        ((2, 1, [0, 1, 2]), [[5, 0, 1, 2, 3, 4]], [[0, 1, 2, 3, 4, 5]]),
        ((1, 2, [0, 1, 2, 3]), [[3, 0, 1, 2]] * 2, [[0, 1, 2, 3], [2, 3, 0, 1]]),
        ((1, 0, []), [], []),
        ((2, 0, [0, 1]), [], []),
        ((1, 1, [0]), [[0]], [[0]]),
        ((1, 3, [0]), [[0]] * 3, [[0]] * 3),
        ((1, 1, [0, 2, 1]), [[1, 2, 0]], [[0, 2, 1]]),
        ((2, 2, [0, 1]), [[3, 0, 1, 2], [1, 2, 3, 0]], [[0, 1, 2, 3], [1, 0, 3, 2]]),
    ],
)
def test_ring_permutations_are_as_documented(
    arguments: tuple[int, int, list[int]], pred: list[list[int]], rank: list[list[int]]
) -> None:
    assert ring_permutations(*arguments) == (pred, rank)


@given(st.integers(1, 6), st.integers(1, 9), st.data())
def test_every_ring_visits_every_rank_once(nodes: int, local: int, data: st.DataObject) -> None:
    shards = data.draw(st.integers(1, local))
    local_order = data.draw(st.permutations(range(local)))
    pred, rank = ring_permutations(nodes, shards, local_order)
    topology = Topology(nodes * local, local, tuple(local_order))
    assert len(pred) == len(rank) == shards
    crossings = set()
    for shard, order in enumerate(topology.ring_orders(shards)):
        assert sorted(order) == list(range(nodes * local))
        for place, r in enumerate(order):
            assert rank[shard][r] == place
            assert pred[shard][r] == order[place - 1]
        for node in range(nodes):
            run = order[node * local : (node + 1) * local]
            assert {topology.node_of(r) for r in run} == {node}
        crossings.add(order[local - 1])
    assert len(crossings) == shards, "shards leave a node at different ranks"


def test_nodes_hold_consecutive_ranks() -> None:
    topology = Topology(6, 3)
    assert topology.num_nodes == 2
    assert topology.local_order == (0, 1, 2)
    assert [topology.node_of(r) for r in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [topology.local_rank_of(r) for r in range(6)] == [0, 1, 2] * 2
    assert topology.ranks_of(1) == range(3, 6)
    assert topology == Topology(6, 3, (0, 1, 2)) != Topology(6, 3, (0, 2, 1))
    assert topology.ring_orders() == ((0, 1, 2, 3, 4, 5),)
