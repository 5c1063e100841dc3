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


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((1, 3, [0, 1]), ValueError, "3 ring shards .* which has 2"),
        ((2, 2, [0]), ValueError, "2 ring shards .* which has 1"),
        ((1, -1, [0]), ValueError, "shards must not be negative, got -1"),
        ((0, 1, [0]), ValueError, "num_nodes must be at least 1, got 0"),
        ((1, 1, [1, 2]), ValueError, "permutation of 0 to 1"),
        ((1, 1, [0, 0]), ValueError, "permutation of 0 to 1"),
        ((1, 1, [-1]), ValueError, "members must not be negative, got -1"),
        ((1, 1, ["a"]), TypeError, "local_order's members must be an int, got str"),
        ((1.0, 1, [0]), TypeError, "num_nodes must be an int, got float"),
        ((1, True, [0]), TypeError, "shards must be an int, got bool"),
    ],
)
def test_ring_permutations_of_bad_arguments_are_refused(
    arguments: tuple[int, int, list[int]], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ring_permutations(*arguments)


def test_nodes_hold_consecutive_ranks() -> None:
    topology = Topology(6, 3)
    assert topology.num_nodes == 2
    assert topology.local_order == (0, 1, 2)
    assert [topology.node_of(r) for r in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [topology.local_rank_of(r) for r in range(6)] == [0, 1, 2] * 2
    assert topology.ranks_of(1) == range(3, 6)
    assert topology == Topology(6, 3, (0, 1, 2)) != Topology(6, 3, (0, 2, 1))
    assert topology.ring_orders() == ((0, 1, 2, 3, 4, 5),)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 1), ValueError, "size must be at least 1"),
        ((4, 0), ValueError, "local_size must be at least 1"),
        ((6, 4), ValueError, "local_size 4 does not divide size 6"),
        ((4, 2.0), TypeError, "local_size must be an int"),
        ((4, 2, (0, 2)), ValueError, "permutation of 0 to 1"),
        ((4, 2, (0,)), ValueError, "permutation of 0 to 1"),
    ],
)
def test_topology_of_bad_sizes_is_refused(
    arguments: tuple[int, int], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Topology(*arguments)


def test_ranks_and_nodes_out_of_range_are_refused() -> None:
    topology = Topology(4, 2)
    for call in (topology.node_of, topology.local_rank_of):
        for rank in (-1, 4):
            with pytest.raises(ValueError, match=f"rank must be a rank from 0 to 3, got {rank}"):
                call(rank)
    with pytest.raises(ValueError, match="node must be from 0 to 1, got 2"):
        topology.ranks_of(2)
