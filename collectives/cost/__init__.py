"""The α-β-γ cost model of all-reduces, for machines of up to 65,536 ranks.

    python -m collectives.cost --nodes 128 --local 8 --bytes 256M

`walk` goes through a schedule's own steps, rank by rank; `closed` does the same from the closed
forms of the algorithms, for all ranks at once; `estimate` takes the one that fits the size.

The model: a schedule runs in lockstep, and a step ends when its messages have arrived and are
reduced. What a rank sends in a step to one class of peers, in its node or on other nodes, takes
alpha for every peer and beta for every byte; so does what it receives, at the same time. Source:
Thakur, Rabenseifner and Gropp, IJHPCA 2005, for one peer a step; several are taken one by one.
"""

from __future__ import annotations

from functools import lru_cache

from collectives.cost.closed_forms import closed
from collectives.cost.link_rates import ASSUMED, LinkRates, Rate
from collectives.cost.profiles import Cost, Profile
from collectives.cost.walker import walk
from collectives.schedules.registry import algorithm, one_level, two_levels
from collectives.schedules.schedule import Schedule
from collectives.schedules.spec import AllReduceSpec, parse_all_reduce_spec
from collectives.schedules.topology import Topology

OPS = ("sum", "adasum")
WALKED = 64
"""The most ranks for which `estimate` walks the schedule itself."""


def estimate(
    spec: str,
    nbytes: float,
    rates: LinkRates,
    topology: Topology,
    op: str = "sum",
    segments: int = 1,
) -> Cost:
    """Return the cost of an all-reduce by one range of a specification ("rechd/xring#2").

    Args:
        spec: The range.
        nbytes: Length of each rank's buffer.
        rates: The machine.
        topology: Where the ranks are.
        op: "sum" or "adasum"; Average costs what Sum does.
        segments: How many tensors Adasum projects on their own.

    Raises:
        ValueError: The specification has several ranges, is unknown, or is a library's algorithm,
            whose steps are not known.
    """
    return profile(spec, topology, op).cost(nbytes, rates, segments)


@lru_cache(maxsize=512)
def profile(spec: str, topology: Topology, op: str = "sum") -> Profile:
    """Return what `estimate` multiplies with rates and bytes; cached, as it is the slow part."""
    (only,) = _one_range(spec)
    _check(only, op)
    if topology.size <= WALKED:
        return walk(schedule(only, topology, op), topology, reductions(only, op))
    return closed(only, topology, op)


def schedule(spec: AllReduceSpec, topology: Topology, op: str) -> Schedule:
    """Return the schedule that a range of a specification stands for."""
    _check(spec, op)
    one_tree = op == "adasum"
    if spec.inner is None:
        return one_level(spec.outer, spec.shards, topology, one_tree=one_tree)
    return two_levels(
        spec.inner, spec.inner_shards, spec.outer, spec.shards, topology, one_tree=one_tree
    )


def reductions(spec: AllReduceSpec, op: str) -> tuple[str, ...]:
    """Return what each phase of the schedule reduces with: a sum inside nodes, `op` across."""
    return (op,) if spec.inner is None else ("sum", op)


def _one_range(spec: str) -> tuple[AllReduceSpec, ...]:
    ranges = parse_all_reduce_spec(spec)
    if len(ranges) != 1:
        raise ValueError(f"spec {spec!r} has {len(ranges)} ranges: ask for one at a time")
    return ranges


def _check(spec: AllReduceSpec, op: str) -> None:
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}")
    for name in (spec.inner, spec.outer):
        if name == "auto" or (name is not None and algorithm(name).is_library):
            raise ValueError(f"{name!r} is no schedule, so its steps are not known")


__all__ = [
    "ASSUMED",
    "OPS",
    "WALKED",
    "Cost",
    "LinkRates",
    "Profile",
    "Rate",
    "closed",
    "estimate",
    "profile",
    "reductions",
    "schedule",
    "walk",
]
