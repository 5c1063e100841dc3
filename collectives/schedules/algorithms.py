"""The all-reduce algorithms by the names of the specification string."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from collectives.schedules import (
    parameter_server,
    recursive_doubling,
    recursive_halving,
    ring,
    two_level,
)
from collectives.schedules.building_blocks import Halves, sharded
from collectives.schedules.schedule import Schedule
from collectives.schedules.topology import Topology, require_ring_shards

ALL_REDUCE: dict[str, Callable[[int], Schedule]] = {
    "xring": ring.all_reduce,
    "rechd": recursive_halving.all_reduce,
    "rd": recursive_doubling.all_reduce,
    "vhdd": recursive_halving.adasum_all_reduce,
}

ONE_TREE = frozenset({"rechd", "rd", "vhdd"})
"""Algorithms with one expression tree for the whole buffer and a group for every reduction."""

LIBRARY = frozenset({"collective", "nccl"})
"""Algorithms that are no schedule but a library's own all-reduce."""

_SHUFFLES = frozenset({"pscpu", "psgpu"})


@lru_cache(maxsize=256)
def one_level(name: str, shards: int, topology: Topology, *, one_tree: bool = False) -> Schedule:
    """The all-reduce of all ranks by an algorithm of the specification string.

    one_tree: for an operator that needs one expression tree. It is then the order of the ranks for
    xring, pscpu and psgpu, whose chunks are whole segments; rechd, rd and vhdd are the same.

    Raises ValueError for more shards than the algorithm takes and for a name that is no schedule's.
    """
    if name == "xring" and not one_tree:
        return ring.all_reduce(topology.size, topology.ring_orders(shards))
    return _across(name, shards, topology.size, topology, one_tree)


@lru_cache(maxsize=256)
def two_levels(
    inner: str,
    inner_shards: int,
    outer: str,
    outer_shards: int,
    topology: Topology,
    *,
    one_tree: bool = False,
) -> Schedule:
    """The all-reduce by `inner` inside every node (phase 0) and `outer` across nodes (phase 1).

    An `inner` of LIBRARY is run before the schedule, which starts from its answer. one_tree: as for
    one_level, of the outer level; the leaves of the tree are then the nodes in their order.

    Raises ValueError as one_level; a level of one rank takes any number of shards.
    """
    node, nodes = topology.node(), topology.num_nodes
    inside = _inside(inner, inner_shards if node.size > 1 else 1, node)
    across = _across(outer, outer_shards if nodes > 1 else 1, nodes, topology, one_tree)
    return two_level.all_reduce(topology, inside, across)


def _inside(name: str, shards: int, node: Topology) -> Halves | None:
    if name in LIBRARY:
        return None
    if name == "xring":
        return ring.halves(node.size, node.ring_orders(shards))
    if name in _SHUFFLES:
        return parameter_server.halves(node.size, shards, name)
    if name != "rechd":
        raise ValueError(f"{name!r} is no algorithm inside a node: use xring, rechd, pscpu, psgpu")
    return recursive_halving.halves(node.size).sharded(shards)


def _across(name: str, shards: int, size: int, topology: Topology, one_tree: bool) -> Schedule:
    """An all-reduce of `size` ranks: all those of `topology`, or one a node."""
    if name in _SHUFFLES:
        return parameter_server.all_reduce(size, shards, name, whole_segments=one_tree)
    if name not in ALL_REDUCE:
        raise ValueError(f"{name!r} is no schedule: use {', '.join([*ALL_REDUCE, *_SHUFFLES])}")
    if name == "xring":
        require_ring_shards(shards, topology.num_nodes, topology.local_size)
        if one_tree:
            return sharded(ring.linear_all_reduce(size), shards)
    return sharded(ALL_REDUCE[name](size), shards)


__all__ = ["ALL_REDUCE", "LIBRARY", "ONE_TREE", "one_level", "two_levels"]
