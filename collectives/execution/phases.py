"""From a range of the specification string to what runs: schedules and libraries, in order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from collectives.reducers import Reducer, is_plain_sum
from collectives.schedules.algorithm import ONE_TENSOR, Needs, RoundRobin
from collectives.schedules.auto import sum_algorithm, tree_algorithm
from collectives.schedules.levels import schedule_of
from collectives.schedules.orders import tree_text
from collectives.schedules.registry import algorithm, carriers
from collectives.schedules.schedule import Schedule, steps_of
from collectives.schedules.spec import AllReduceSpec, parse_all_reduce_spec
from collectives.schedules.topology import Topology


def auto_of(op: Reducer, nbytes: int, size: int, device: str = "cpu") -> AllReduceSpec:
    """Return what `auto` stands for on any nodes, for an operator that is no plain sum."""
    if op.reads_tree and type(op).algorithm is Reducer.algorithm:
        return tree_algorithm(device, nbytes, size)
    return parse_all_reduce_spec(op.algorithm(nbytes, size))[0]


def auto_by_messages(op: Reducer, device: str, nbytes: int, topology: Topology) -> AllReduceSpec:
    """Return what `auto` stands for by messages; arguments as for `sum_algorithm`."""
    if op.ordered and op.operands == "pair":
        return sum_algorithm(device, nbytes, topology, ordered=True)
    return auto_of(op, nbytes, topology.size, device)


def for_dtype(spec: AllReduceSpec, op: Reducer, dtype: torch.dtype) -> AllReduceSpec:
    """Return what runs on a dtype, where `op` reads trees: in pairs where not of this dtype."""
    pairwise = algorithm(spec.outer).pairwise
    if pairwise is None or op.reads_tree_of(dtype):
        return spec
    return replace(spec, alg=f"{spec.inner}/{pairwise}" if spec.inner else pairwise)


def climbs_in_levels(
    spec: AllReduceSpec, op: Reducer, dtype: torch.dtype, topology: Topology
) -> bool:
    """Return whether `op` is handed parts of its tree, one after the other, not all of it at once.

    So in shared memory all ranks' operands would be joined with other bits.
    """
    if not op.reads_tree or not algorithm(spec.outer).by_tree:
        return False
    spec = for_dtype(spec, op, dtype)
    schedule = phases_of(spec, op, topology).schedule
    if schedule is None or not algorithm(spec.outer).by_tree:
        return False
    return all(len(step.tree) < schedule.size - 1 for step in steps_of(schedule, 0))


@dataclass(frozen=True)
class AllReducePhases:
    """What one all-reduce runs: a library's all-reduce or a schedule, or one after the other.

    Attributes:
        library: The library's name.
        shards: Pieces that the library reduces at once.
        schedule: The schedule. Where a library comes first, that reduces inside the nodes only.
        two_levels: Whether the schedule's phase 0 sums inside nodes and its phase 1 is the
            operator's.
        prescale: What every rank multiplies its contribution by first.
        host: Whether all of it happens in host memory.
    """

    library: str | None = None
    shards: int = 1
    schedule: Schedule | None = None
    two_levels: bool = False
    prescale: float = 1.0
    host: bool = False


def phases_of(
    spec: AllReduceSpec, op: Reducer, topology: Topology, round_robin: RoundRobin = ONE_TENSOR
) -> AllReducePhases:
    """Return how to reduce with `op` by `spec` (not auto) on `topology`.

    An operator that needs one expression tree (Adasum) runs across nodes alone on two
    levels: inside a node its operands are averaged, by a factor before the sum, so that no float16
    overflows.

    Raises:
        ValueError: The algorithm takes fewer shards, or cannot carry the operator: a library, and
            the ranks inside a node, sum; or it has no one tree, or one that the operator does not
            read, or not the balanced one, or does not reduce all at once.
    """
    if spec.is_round_robin:
        # As few as there are ways to place them, since each is kept.
        size = topology.size
        round_robin = RoundRobin(min(round_robin.tensors, size), round_robin.first % size)
    else:
        round_robin = ONE_TENSOR
    needs = Needs(op.needs_one_tree, op.operands == "all", op.reads_tree, op.ordered)
    return _phases_of(spec, needs, is_plain_sum(op), str(op), topology, round_robin)


# Not by the operator, which need not have a hash and would be kept alive.
@lru_cache(maxsize=1024)
def _phases_of(
    spec: AllReduceSpec,
    needs: Needs,
    is_sum: bool,
    op: str,
    topology: Topology,
    round_robin: RoundRobin,
) -> AllReducePhases:
    outer, one_tree = algorithm(spec.outer), needs.one_tree
    able = ", ".join(carriers(needs))
    if outer.is_library and spec.inner is None:
        if not is_sum:
            raise ValueError(
                f"algorithm {outer.name!r} is a library's own sum, which cannot do {op}: use {able}"
            )
        return AllReducePhases(outer.name, spec.shards)
    if needs.ordered:
        _require_tree(spec, topology, able)
    if needs.at_once and (spec.inner is not None or not outer.all_at_once):
        raise ValueError(
            f"algorithm {str(spec)!r} reduces the operands of some ranks at a time, and {op} needs "
            f"those of all at once: use {able}"
        )
    if spec.inner is not None and not (is_sum or one_tree or needs.ordered):
        raise ValueError(
            f"algorithm {str(spec)!r} sums inside the nodes, which cannot do {op}: "
            f"use {outer.name!r} for all ranks"
        )
    if one_tree and outer.by_tree and not needs.reads_tree:
        raise ValueError(
            f"algorithm {str(spec)!r} hands over all operands with their tree, which {op} does not "
            f"read: use {able}"
        )
    schedule = schedule_of(
        spec, topology, one_tree=one_tree, at_once=needs.at_once, round_robin=round_robin
    )
    if spec.inner is None:
        return AllReducePhases(schedule=schedule, host=outer.on_host)
    inner = algorithm(spec.inner)
    return AllReducePhases(
        inner.name if inner.is_library else None,
        spec.inner_shards,
        schedule,
        two_levels=True,
        prescale=1.0 / topology.local_size if one_tree else 1.0,
        host=outer.on_host or inner.on_host,
    )


def _require_tree(spec: AllReduceSpec, topology: Topology, able: str) -> None:
    """Raise ValueError unless every element is the balanced tree over all ranks."""
    names = [name for name in (spec.inner, spec.outer) if name is not None]
    node = topology.local_size
    if not all(algorithm(name).makes_tree for name in names):
        problem = "does not add every element by that tree"
    elif spec.inner is not None and topology.num_nodes > 1 and node & (node - 1):
        problem = f"adds nodes of {node} ranks first, which that tree does of 1, 2, 4, ... alone"
    else:
        return
    raise ValueError(
        f"order='tree' is {tree_text(topology.size)}, and algorithm {str(spec)!r} {problem}: "
        f"use {able}"
    )
