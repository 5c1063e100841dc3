"""Two levels: reduce inside every node, all-reduce across nodes, share the result inside again.

Wins where connections between nodes are slower than those inside them. The inner algorithm reduces
each region of the buffer onto one owner per node; a region's owners, one per node, all-reduce it by
the outer schedule, all regions at once; the inner algorithm sends it from the owner to the rest of
the node. Steps are the sum of both levels'; a rank's bytes are the inner algorithm's on the whole
buffer and the outer's on a region, and its extra memory is the larger of the two. A region is 1/L
of the buffer for `xring`, L = local_size; 1/P for `rechd`, P the largest power of two <= L; 1/k for
`pscpu` and `psgpu` with k shards. Inner reductions are phase 0, outer ones phase 1, so that Adasum
across nodes can follow a sum inside them. Sources: Mikami et al., "Massively distributed SGD",
arXiv 1811.05233 (2D-torus all-reduce); Maleki et al., arXiv 2006.02924 (Adasum across nodes).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from collectives.schedules import ring
from collectives.schedules.schedule import IDLE, Collective, ScatterGather, Schedule, Step, Transfer
from collectives.schedules.topology import Topology


def all_reduce(topology: Topology, inner: ScatterGather | None, outer: Schedule) -> Schedule:
    """Return `inner` on every node's local ranks around `outer` on the nodes.

    inner: None if a library has done the inner all-reduce, so that the local ranks start with
    their node's sum: the schedule then has no phase 0 and ends with a ring all-gather in the node.
    """
    local_size, nodes = topology.local_size, topology.num_nodes
    node = inner or ring.scatter_gather(local_size, topology.node().ring_orders())
    if node.size != local_size:
        raise ValueError(f"inner is of {node.size} ranks, a node of the topology has {local_size}")
    if outer.size != nodes:
        raise ValueError(f"outer is of {outer.size} ranks, the topology has {nodes} nodes")
    if outer.gathered:
        raise ValueError(f"outer is {outer.name}, which reduces whole buffers, not regions")

    # With `inner` a node's value stands for all of its ranks.
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


def _inside(steps: Iterable[Step], first: int, width: int) -> Iterator[Step]:
    """Yield the steps of a node whose first rank is `first`, in chunks `width` times smaller."""
    for step in steps:
        yield Step(
            sends=_mapped(step.sends, first, 1, 0, width),
            recvs=_mapped(step.recvs, first, 1, 0, width),
        )


def _across(node: ScatterGather, outer: Schedule, rank: int, behind: int) -> Iterator[Step]:
    """Yield a rank's steps of `outer`: on the region that it owns, or idle where it owns none.

    `behind` ranks stand behind a node's value.
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
            # Each owner of a node's regions holds whole segments by itself.
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
    """Return a level's transfers in the ranks and chunks of the whole schedule."""
    return tuple(
        one._replace(
            peer=first + one.peer * stride,
            start=start + one.start * width,
            stop=start + one.stop * width,
            leaves=one.leaves and (one.leaves[0] * behind, one.leaves[1] * behind),
        )
        for one in transfers
    )
