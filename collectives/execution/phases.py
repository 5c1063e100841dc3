"""From a range of the specification string to what is run: schedules and libraries, in order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from collectives.reducers import Reducer
from collectives.schedules.algorithms import LIBRARY, one_level, two_levels
from collectives.schedules.schedule import Schedule
from collectives.schedules.spec import AllReduceSpec
from collectives.schedules.topology import Topology


@dataclass(frozen=True)
class Phase:
    """A schedule over all ranks, or a library's all-reduce in `shards` pieces.

    local: whether the library reduces over the ranks of each node alone.
    """

    schedule: Schedule | None = None
    library: str | None = None
    shards: int = 1
    local: bool = False


@dataclass(frozen=True)
class AllReducePhases:
    """What one all-reduce runs, one after the other.

    two_levels: whether the schedule's phase 0 sums inside nodes and its phase 1 is the operator's.
    prescale: what every rank multiplies its contribution by first. host: whether all of it happens
    in host memory.
    """

    sequence: tuple[Phase, ...]
    two_levels: bool = False
    prescale: float = 1.0
    host: bool = False


def phases_of(spec: AllReduceSpec, op: Reducer, topology: Topology) -> AllReducePhases:
    """How to reduce with `op` by `spec` (not auto) on `topology`.

    An operator that needs one expression tree (Adasum) runs across nodes alone on two
    levels: inside a node its operands are averaged, by a factor before the sum, so that no float16
    overflows.

    Raises ValueError for shards that the algorithm does not take and operators it cannot carry.
    """
    return _phases_of(spec, op.needs_one_tree, str(op), topology)


# Not by the operator, which need not have a hash and would be kept alive.
@lru_cache(maxsize=1024)
def _phases_of(spec: AllReduceSpec, one_tree: bool, op: str, topology: Topology) -> AllReducePhases:
    host = "pscpu" in (spec.inner, spec.outer)
    if spec.inner is None:
        if spec.outer not in LIBRARY:
            schedule = one_level(spec.outer, spec.shards, topology, one_tree=one_tree)
            return AllReducePhases((Phase(schedule),), host=host)
        if one_tree:
            raise ValueError(
                f"algorithm {spec.outer!r} is a library's own sum, which cannot do {op}: "
                "use vhdd, rd or xring"
            )
        return AllReducePhases((Phase(library=spec.outer, shards=spec.shards),))
    schedule = two_levels(
        spec.inner, spec.inner_shards, spec.outer, spec.shards, topology, one_tree=one_tree
    )
    phases: tuple[Phase, ...] = (Phase(schedule),)
    if spec.inner in LIBRARY:
        phases = (Phase(library=spec.inner, shards=spec.inner_shards, local=True), *phases)
    prescale = 1.0 / topology.local_size if one_tree else 1.0
    return AllReducePhases(phases, two_levels=True, prescale=prescale, host=host)
