"""The levels and the schedule that a range of the specification string stands for."""

from __future__ import annotations

from functools import lru_cache

from collectives.reducers import Needs
from collectives.schedules import two_level
from collectives.schedules.algorithm import ONE_TENSOR, Level, RoundRobin, refusal
from collectives.schedules.registry import ALGORITHMS, ORDERED, SCHEDULES, algorithm
from collectives.schedules.schedule import Schedule
from collectives.schedules.spec import AllReduceSpec
from collectives.schedules.topology import Topology


def levels_of(
    spec: AllReduceSpec,
    topology: Topology,
    *,
    one_tree: bool = False,
    round_robin: RoundRobin = ONE_TENSOR,
) -> tuple[Level | None, Level]:
    """Return the level inside a node, None if there is only one level, and the other level.

    A node of one rank, and a single node, take any number of shards.

    Args:
        spec: The algorithms.
        topology: Where the ranks are.
        one_tree: Whether the operator needs one expression tree; on two levels, across the nodes.
        round_robin: The call's, for both levels.

    Raises:
        ValueError: A name may not stand on its level, takes fewer shards, or cannot carry the
            operator; or there are two levels and the nodes are not equal runs of ranks.
    """
    outer, size = algorithm(spec.outer), topology.size
    needs = Needs.ONE_TREE if one_tree else Needs.ANY_ORDER
    if not outer.is_library and (reason := refusal(outer, needs, reads_tree=True, op="Adasum")):
        raise ValueError(f"{outer.name!r} {reason}: use {', '.join(ORDERED)}")
    if spec.inner is None:
        outer.check_shards(spec.shards, size, topology.local_size)
        return None, Level(size, spec.shards, topology, one_tree, round_robin)
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
    round_robin: RoundRobin = ONE_TENSOR,
) -> Schedule:
    """Return the all-reduce of all ranks by a range of the specification string.

    On two levels the inner reductions are phase 0 and the outer ones phase 1; the leaves of an
    outer tree are the nodes in order. An inner algorithm that is a library's runs before the
    schedule, which starts from its result. Arguments and errors are those of `levels_of`; a library
    as the only level or the outer one is a ValueError, too.
    """
    near, far = levels_of(spec, topology, one_tree=one_tree, round_robin=round_robin)
    make = algorithm(spec.outer).schedule
    if make is None:
        raise ValueError(f"{spec.outer!r} is no schedule: use {', '.join(SCHEDULES)}")
    if near is None or spec.inner is None:
        return make(far)
    scatter_gather = algorithm(spec.inner).scatter_gather
    return two_level.all_reduce(topology, scatter_gather and scatter_gather(near), make(far))
