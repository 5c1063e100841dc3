"""Two levels: reduce inside every node, all-reduce across nodes, share the result inside again.

It wins if connections between nodes are slower than inside them. The inner algorithm reduces each
region of the buffer to one owner per node; the owners of a region, one per node, all-reduce it by
the outer schedule, all regions at once; the inner algorithm sends it from the owner to the rest of
the node. The steps of both levels add up; each rank sends the inner algorithm's bytes for the whole
buffer and the outer's for one region, and its extra memory is the larger of the two. A region is
1/L of the buffer for `xring`, L = local_size; 1/P for `rechd`, P the largest power of two <= L; 1/k
for `pscpu` and `psgpu` with k shards. Inner reductions are phase 0, outer ones phase 1, so that
Adasum across nodes can follow a sum inside them. Sources: Mikami et al., "Massively distributed
SGD", arXiv 1811.05233 (2D-torus all-reduce); Maleki et al., arXiv 2006.02924 (Adasum across nodes).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import torch

from collectives import validation
from collectives.reducers import Needs, Reducer, Sum
from collectives.schedules import direct, ring
from collectives.schedules.algorithm import ONE_TENSOR, Level, RoundRobin, refusal
from collectives.schedules.registry import ALGORITHMS, ORDERED, SCHEDULES, algorithm
from collectives.schedules.schedule import IDLE, Collective, ScatterGather, Schedule, Step, Transfer
from collectives.schedules.spec import AllReduceSpec, parse_all_reduce_spec
from collectives.schedules.symbolic_step import Joins
from collectives.schedules.topology import Topology, topology_of
from collectives.schedules.verify import verify
from collectives.tree_order import in_order


def levels_of(
    spec: AllReduceSpec,
    topology: Topology,
    *,
    one_tree: bool = False,
    round_robin: RoundRobin = ONE_TENSOR,
) -> tuple[Level | None, Level]:
    """Return the level inside nodes, None if there is only one level, and the other level.

    With one rank per node, or a single node, any number of shards is allowed on that level.

    Args:
        spec: The algorithms.
        topology: The nodes of the ranks.
        one_tree: Whether the operator needs one expression tree; on two levels, across the nodes.
        round_robin: For both levels.

    Raises:
        ValueError: An algorithm cannot run on its level, allows fewer shards, or cannot carry the
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
        raise ValueError(f"{inner.name!r} cannot run inside a node: use {names}")
    if not outer.outer:
        names = ", ".join(name for name, record in ALGORITHMS.items() if record.outer)
        raise ValueError(f"{outer.name!r} cannot run across nodes: use {names}")
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
    """Return the all-reduce of all ranks by one range of the specification string.

    On two levels the inner reductions are phase 0 and the outer ones phase 1; the leaves of an
    outer tree are the nodes in order. If the inner algorithm is a library's, it runs before the
    schedule, which starts from its result. Arguments and errors are the same as for `levels_of`; a
    library's algorithm on the only or outer level also raises ValueError.
    """
    near, far = levels_of(spec, topology, one_tree=one_tree, round_robin=round_robin)
    make = algorithm(spec.outer).schedule
    if make is None:
        raise ValueError(f"{spec.outer!r} has no schedule: use {', '.join(SCHEDULES)}")
    if near is None or spec.inner is None:
        return make(far)
    scatter_gather = algorithm(spec.inner).scatter_gather
    return two_level(topology, scatter_gather and scatter_gather(near), make(far))


def order_of(
    algorithm: str, size: int, op: Reducer = Sum, *, order: str | None = None, nodes: int = 1
) -> Any:
    """Return the expression tree of every element of an all-reduce.

    Ranks are numbers, and a reduction of two operands is a pair. `verify` finds the tree by running
    all ranks' schedules on symbols, which is practical for up to some hundred ranks.

    Args:
        algorithm: One range of a specification, such as "rd", "xring#2" or "rechd/rd".
        size: Number of ranks.
        op: The operator, which may join more than two operands at once.
        order: As in `Group.all_reduce`.
        nodes: The number of nodes; the ranks are spread evenly over them.

    Raises:
        TypeError: An argument has another type.
        ValueError: There is no such algorithm, or it reduces elements in different orders, like a
            ring.

    Examples:
        >>> collectives.order_of("rd", 4)
        ((0, 1), (2, 3))
    """
    op = in_order(validation.reducer("op", op), order)
    topology = topology_of(size, nodes)
    specs = parse_all_reduce_spec(algorithm)
    if len(specs) > 1 or specs[0].outer == "auto":
        raise ValueError(f"algorithm must be one algorithm, such as 'rd', got {algorithm!r}")
    return tree_of(specs[0], topology, joins_of(op), Needs.ONE_TREE in op.needs)


def joins_of(op: Reducer) -> Joins:
    """Return the way in which an operator joins more than two operands at once."""
    if Needs.BALANCED_TREE in op.needs:
        return "tree"
    return "said" if op.reads_tree else "list"


@lru_cache(maxsize=64)
def tree_of(spec: AllReduceSpec, topology: Topology, joins: Joins, one_tree: bool = False) -> Any:
    """Return the tree of an algorithm on a topology; ValueError if elements have several."""
    schedule = schedule_of(spec, topology, one_tree=one_tree)
    tree = verify(schedule, joins=joins).tree
    if tree is None:
        raise ValueError(
            f"algorithm {str(spec)!r} of {topology.size} ranks reduces its elements in different "
            "orders: use one with one order, such as 'rd'"
        )
    return tree


def two_level(topology: Topology, inner: ScatterGather | None, outer: Schedule) -> Schedule:
    """Return `inner` on every node's local ranks around `outer` on the nodes.

    inner: None if a library has already done the inner all-reduce, so that the local ranks start
    with their node's sum: the schedule then has no phase 0 and ends with a ring all-gather in each
    node.
    """
    local_size, nodes = topology.local_size, topology.num_nodes
    node = inner or ring.scatter_gather(local_size, topology.node().ring_orders())
    if node.size != local_size:
        raise ValueError(f"inner must have {local_size} ranks like a node, got {node.size}")
    if outer.size != nodes:
        raise ValueError(f"outer must have {nodes} ranks, one per node, got {outer.size}")
    if outer.gathered:
        raise ValueError(f"outer must reduce regions, and {outer.name} reduces whole buffers")

    # With `inner` each node's value counts for all of its ranks.
    behind = 1 if inner is None else local_size

    def steps(rank: int) -> Iterator[Step]:
        local = rank % local_size
        first = rank - local
        if inner is None and nodes == 1:
            return
        if inner is not None:
            yield from _inside(inner.scatter(local), first, outer.chunks)
        yield from _across(node, outer, rank, behind)
        yield from _inside(node.gather(local), first, outer.chunks)

    return Schedule(
        f"{inner.name if inner else 'library'}/{outer.name}",
        topology.size,
        node.chunks * outer.chunks,
        Collective.ALL_REDUCE,
        steps,
        whole_segments=outer.whole_segments,
        replicas=1 if inner else local_size,
    )


def runs_on_nodes(op: Reducer, dtype: torch.dtype, topology: Topology) -> bool:
    """Return whether launches on the nodes' GPUs reduce by `op`, with messages across the nodes.

    Each node's result must be a part of the whole result. For an operator that needs one tree, the
    node's ranks must be a branch of the balanced tree: 1, 2, 4, ... ranks are.
    """
    local = topology.local_size
    if local == 1 or not op.runs_on_node(dtype, local):
        return False
    branches = op.needs is Needs.ONE_TREE and not local & (local - 1)
    return topology.num_nodes == 1 or op.associative or branches


@lru_cache(maxsize=64)
def across_nodes(topology: Topology, outer: Schedule) -> Schedule:
    """Return `outer` on the nodes, whose local ranks each hold a slice of their node's result.

    It has as many slices as local ranks, each of `outer.chunks` chunks; rank i of each node ends
    with slice i of all. Nothing moves inside the nodes.
    """
    local_size = topology.local_size
    node = direct.scatter_gather(local_size)
    return Schedule(
        f"{outer.name} across nodes",
        topology.size,
        node.chunks * outer.chunks,
        Collective.ALL_REDUCE,
        lambda rank: _across(node, outer, rank, behind=local_size),
        replicas=local_size,
    )


def _inside(steps: Iterable[Step], first: int, width: int) -> Iterator[Step]:
    """Yield steps mapped to the node with first rank `first`, with `width` times the chunks."""
    for step in steps:
        yield Step(
            sends=_mapped(step.sends, first, 1, 0, width),
            recvs=_mapped(step.recvs, first, 1, 0, width),
        )


def _across(node: ScatterGather, outer: Schedule, rank: int, behind: int) -> Iterator[Step]:
    """Yield one rank's steps of `outer`: on the region that it owns, or idle without one.

    Each node's value counts for `behind` ranks.
    """
    at, local = divmod(rank, node.size)
    regions = {owner: region for region, owner in enumerate(node.owners)}
    region = regions.get(local)
    if region is None:
        yield from (IDLE for _ in outer.steps(at))
        return
    owners = sorted(regions)
    start = region * node.width * outer.chunks
    for step in outer.steps(at):
        group = tuple(w * node.size + owner for w in step.group for owner in owners)
        yield Step(
            sends=_mapped(step.sends, local, node.size, start, node.width),
            recvs=_mapped(step.recvs, local, node.size, start, node.width, behind),
            # Each owner in the node holds whole segments by itself.
            group=(rank,) if group and outer.whole_segments else group,
            phase=1,
            tree=tuple((left, right, p * behind, q * behind) for left, right, p, q in step.tree),
        )


def _mapped(
    transfers: tuple[Transfer, ...],
    first: int,
    stride: int,
    start: int,
    width: int,
    behind: int = 1,
) -> tuple[Transfer, ...]:
    """Return one level's transfers in the ranks and chunks of the whole schedule."""
    return tuple(
        one._replace(
            peer=first + one.peer * stride,
            start=start + one.start * width,
            stop=start + one.stop * width,
            leaves=one.leaves and (one.leaves[0] * behind, one.leaves[1] * behind),
        )
        for one in transfers
    )
