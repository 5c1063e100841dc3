"""All all-reduce algorithms by the names of the specification string, and the schedules of a name.

An algorithm is added by one line here; its names, shards and tree are in the record beside its
steps.
"""

from __future__ import annotations

from functools import lru_cache

from collectives.schedules import (
    bruck,
    parameter_server,
    recursive_doubling,
    recursive_halving,
    ring,
    two_level,
)
from collectives.schedules.algorithm import Algorithm, Level
from collectives.schedules.schedule import Schedule
from collectives.schedules.topology import Topology

_RECORDS = (
    ring.XRING,
    recursive_halving.RECHD,
    recursive_halving.VHDD,
    recursive_doubling.RD,
    bruck.BRUCK,
    parameter_server.PSGPU,
    parameter_server.PSCPU,
    Algorithm(
        "collective", "torch.distributed's own all_reduce, k pieces in flight", None, outer=False
    ),
    Algorithm("nccl", "NCCL's own all-reduce", None, outer=False),
)

ALGORITHMS: dict[str, Algorithm] = {record.name: record for record in _RECORDS}
"""The records by name; `auto`, which chooses among them, is none."""

SCHEDULES = tuple(name for name, record in ALGORITHMS.items() if not record.is_library)
"""The names that stand for a schedule, not for a library's own all-reduce."""

LIBRARIES = frozenset(ALGORITHMS) - frozenset(SCHEDULES)
"""The names that stand for a library's own all-reduce."""


def algorithm(name: str) -> Algorithm:
    """Return the record of a name.

    Raises:
        ValueError: There is none.
    """
    if name not in ALGORITHMS:
        raise ValueError(f"{name!r} is no algorithm: use {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]


def whole_level(name: str, shards: int, topology: Topology, *, one_tree: bool = False) -> Level:
    """Return the level of all ranks.

    Raises:
        ValueError: The name is unknown, or takes fewer shards there.
    """
    algorithm(name).check_shards(shards, topology.size, topology.local_size)
    return Level(topology.size, shards, topology, one_tree)


def inner_level(name: str, shards: int, topology: Topology) -> Level:
    """Return the level of one node's ranks; a node of one rank takes any number of shards.

    Raises:
        ValueError: As for whole_level, or the algorithm may not stand there.
    """
    record = algorithm(name)
    if not record.inner:
        names = ", ".join(name for name, record in ALGORITHMS.items() if record.inner)
        raise ValueError(f"{name!r} is no algorithm inside a node: use {names}")
    node = topology.node()
    shards = shards if node.size > 1 else 1
    record.check_shards(shards, node.size, node.size)
    return Level(node.size, shards, node)


def outer_level(name: str, shards: int, topology: Topology, *, one_tree: bool = False) -> Level:
    """Return the level of one rank a node; a single node takes any number of shards.

    Raises:
        ValueError: As for whole_level, or the algorithm may not stand there.
    """
    record = algorithm(name)
    if not record.outer:
        names = ", ".join(name for name, record in ALGORITHMS.items() if record.outer)
        raise ValueError(f"{name!r} is no algorithm across nodes: use {names}")
    nodes = topology.num_nodes
    shards = shards if nodes > 1 else 1
    record.check_shards(shards, nodes, topology.local_size)
    return Level(nodes, shards, None, one_tree)


@lru_cache(maxsize=256)
def one_level(name: str, shards: int, topology: Topology, *, one_tree: bool = False) -> Schedule:
    """Return the all-reduce of all ranks by an algorithm of the specification string.

    Args:
        name: The algorithm.
        shards: As in `name#shards`.
        topology: Where the ranks are.
        one_tree: Whether the operator needs one expression tree; the record's `order` says which.

    Raises:
        ValueError: The name is unknown or a library's, or it takes fewer shards.
    """
    return _schedule(name, whole_level(name, shards, topology, one_tree=one_tree))


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
    """Return the all-reduce by `inner` inside every node and `outer` across nodes.

    Inner reductions are phase 0, outer ones phase 1. An `inner` that is a library's runs before the
    schedule, which starts from its result.

    Args:
        inner: The algorithm inside a node.
        inner_shards: Its shards.
        outer: The algorithm across nodes.
        outer_shards: Its shards.
        topology: Where the ranks are.
        one_tree: As for one_level, of the outer level; the leaves of the tree are then the nodes in
            their order.

    Raises:
        ValueError: As for inner_level and outer_level.
    """
    near = inner_level(inner, inner_shards, topology)
    far = outer_level(outer, outer_shards, topology, one_tree=one_tree)
    scatter_gather = algorithm(inner).scatter_gather
    node = None if scatter_gather is None else scatter_gather(near)
    return two_level.all_reduce(topology, node, _schedule(outer, far))


def _schedule(name: str, level: Level) -> Schedule:
    make = algorithm(name).schedule
    if make is None:
        raise ValueError(f"{name!r} is no schedule: use {', '.join(SCHEDULES)}")
    return make(level)
