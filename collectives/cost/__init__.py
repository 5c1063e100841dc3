"""The α-β-γ cost model of all-reduces, for machines of up to 65,536 ranks.

    python -m collectives.cost --nodes 128 --local 8 --bytes 256M

No call asks it: what it says of machines in general is the table of `auto`
(collectives/schedules/auto.py), which it makes.

`walk` goes through a schedule's own steps, rank by rank; `estimate` does so for each level of an
algorithm's by itself, and takes a ring, which has too many of them, from its closed form.

The model: a schedule runs in lockstep, and a step ends when its messages have arrived and are
reduced. What a rank sends in a step to one class of peers, in its node or on other nodes, takes
alpha for every peer and beta for every byte; so does what it receives, at the same time. Source:
Thakur, Rabenseifner and Gropp, IJHPCA 2005, for one peer a step; several are taken one by one.
Before every step, those of Adasum's dot products too, the host spends `host` seconds: the model
does not count on its being ahead of the device.
"""

from __future__ import annotations

from functools import lru_cache

from collectives.cost.link_rates import ASSUMED, LinkRates, Rate
from collectives.cost.profiles import Cost, Profile
from collectives.cost.walker import walk, walk_levels
from collectives.schedules.auto import range_for
from collectives.schedules.registry import algorithm
from collectives.schedules.schedule import Schedule
from collectives.schedules.spec import parse_all_reduce_spec
from collectives.schedules.topology import Topology

OPS = ("sum", "adasum")


def check_op(op: str) -> None:
    """Raise ValueError for an operator that the model does not price."""
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}")


def estimate(
    spec: str | Schedule,
    nbytes: float,
    rates: LinkRates,
    topology: Topology,
    op: str = "sum",
    segments: int = 1,
    device: str | None = None,
) -> Cost:
    """Return the cost of an all-reduce by a specification, or by a schedule.

    Args:
        spec: The specification ("rechd/xring#2", "rd:16k:rechd", whose limits count elements of 4
            bytes, or "auto"), or a schedule of your own.
        nbytes: Length of each rank's buffer.
        rates: The machine.
        topology: Where the ranks are.
        op: "sum" or "adasum"; Average costs what Sum does.
        segments: How many tensors lie in the buffer, which Adasum projects on their own, and whose
            shards a parameter-server shuffle places on the ranks.
        device: Of `auto`: "cpu" or "cuda".

    Raises:
        ValueError: The specification is unknown, is `auto` without a device, or is a library's
            algorithm, whose steps are not known; or the schedule is for other ranks.
    """
    check_op(op)
    if isinstance(spec, Schedule):
        return walk(spec, topology, (op,)).cost(nbytes, rates, segments)
    chosen = range_for(spec, topology, nbytes, device, one_tree=op == "adasum")
    # Only a shuffle asks how many tensors there are.
    in_turn = chosen.is_round_robin and segments > 1
    tensors = (min(segments, topology.size),) if in_turn else ()
    return profile(str(chosen), topology, op, *tensors).cost(nbytes, rates, segments)


@lru_cache(maxsize=512)
def profile(spec: str, topology: Topology, op: str = "sum", tensors: int = 1) -> Profile:
    """Return what `estimate` multiplies with rates and bytes; cached, as it is the slow part."""
    ranges = parse_all_reduce_spec(spec)
    if len(ranges) != 1:
        raise ValueError(f"spec {spec!r} has {len(ranges)} ranges: ask for one at a time")
    check_op(op)
    for name in (ranges[0].inner, ranges[0].outer):
        if name == "auto" or (name is not None and algorithm(name).is_library):
            raise ValueError(f"{name!r} is no schedule, so its steps are not known")
    return walk_levels(ranges[0], topology, op, tensors)


__all__ = ["ASSUMED", "OPS", "Cost", "LinkRates", "Profile", "Rate", "estimate", "profile", "walk"]
