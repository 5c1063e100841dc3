"""The levels and the schedule that a range of the specification string stands for."""

from __future__ import annotations

from functools import lru_cache

from collectives.schedules import two_level
from collectives.schedules.algorithm import ONE_TENSOR, Level, RoundRobin
from collectives.schedules.registry import ALGORITHMS, ORDERED, SCHEDULES, algorithm
from collectives.schedules.schedule import Schedule
from collectives.schedules.spec import AllReduceSpec
from collectives.schedules.topology import Topology


def levels_of(
    spec: AllReduceSpec,
    topology: Topology,
    *,
    one_tree: bool = False,
    at_once: bool = False,
    round_robin: RoundRobin = ONE_TENSOR,
) -> tuple[Level | None, Level]:
    """Return the level inside a node, None where there is one level, and the other one.

    A node of one rank, and a single node, take any number of shards.

    Args:
        spec: The algorithms.
        topology: Where the ranks are.
        one_tree: Whether the operator needs one expression tree, of the level across nodes where
            there are two; the record's `order` says which.
        at_once: Whether it needs all ranks' operands in one reduction.
        round_robin: The call's, for both levels.

    Raises:
        ValueError: A name may not stand on its level, takes fewer shards, or has not the one tree
            that is needed; or there are two levels and the nodes are no equal runs of ranks.
    """
    outer, size = algorithm(spec.outer), topology.size
    if one_tree and not (outer.is_library or outer.order):
        raise ValueError(
            f"{outer.name!r} reduces in no one order, which operators such as Adasum need: "
            f"use {', '.join(ORDERED)}"
        )
    if spec.inner is None:
        outer.check_shards(spec.shards, size, topology.local_size)
        return None, Level(size, spec.shards, topology, one_tree, round_robin, at_once)
    topology.require_even(str(spec))
    inner, node, nodes = algorithm(spec.inner), topology.node(), topology.num_nodes
    if not inner.inner:
        names = ", ".join(name for name, record in ALGORITHMS.items() if record.inner)
        raise ValueError(f"{inner.name!r} is no algorithm inside a node: use {names}")
    if not outer.outer:
        names = ", ".join(name for name, record in ALGORITHMS.items() if record.outer)
        raise ValueError(f"{outer.name!r} is no algorithm across nodes: use {names}")
    near = Level(
        node.size, spec.inner_shards if node.size > 1 else 1, node, round_robin=round_robin
    )
    far = Level(nodes, spec.shards if nodes > 1 else 1, None, one_tree, round_robin)
    inner.check_shards(near.shards, node.size, node.size)
    outer.check_shards(far.shards, nodes, node.size)
    return near, far


@lru_cache(maxsize=256)
def schedule_of(
    spec: AllReduceSpec,
    topology: Topology,
    *,
    one_tree: bool = False,
    at_once: bool = False,
    round_robin: RoundRobin = ONE_TENSOR,
) -> Schedule:
    """Return the all-reduce of all ranks by a range of the specification string.

    Of two levels the inner reductions are phase 0 and the outer ones phase 1; the leaves of an
    outer tree are the nodes in their order. An inner algorithm that is a library's runs before the
    schedule, which starts from its result. Arguments and errors are those of `levels_of`; it is a
    ValueError, too, where the only level or the outer one is a library's.
    """
    near, far = levels_of(
        spec, topology, one_tree=one_tree, at_once=at_once, round_robin=round_robin
    )
    make = algorithm(spec.outer).schedule
    if make is None:
        raise ValueError(f"{spec.outer!r} is no schedule: use {', '.join(SCHEDULES)}")
    if near is None or spec.inner is None:
        return make(far)
    scatter_gather = algorithm(spec.inner).scatter_gather
    return two_level.all_reduce(topology, scatter_gather and scatter_gather(near), make(far))
