"""The algorithm that `auto` takes, from what messages and reductions cost here."""

from __future__ import annotations

import math
from functools import lru_cache

from collectives.cost import LinkRates, estimate
from collectives.cost.library import least_seconds, library_cost
from collectives.reducers import Reducer, is_plain_sum
from collectives.schedules.topology import Topology


def candidates(op: Reducer, topology: Topology) -> tuple[str, ...]:
    """Return the specifications that compute the same as `op` over all ranks.

    Sums may be grouped in any way, on two levels too. Adasum's order is part of its answer: `rd`
    and `vhdd` are the same tree, two levels and the ring's line are others.
    """
    if op.needs_one_tree:
        return ("rd", "vhdd")
    flat = ("rd", "rechd", "xring")
    # On two levels the inner one adds.
    if topology.num_nodes == 1 or topology.local_size == 1 or not is_plain_sum(op):
        return flat
    pairs = tuple(f"{inner}/{outer}" for inner in ("rechd", "xring") for outer in flat)
    return (*flat, f"xring#{topology.local_size}", *pairs)


@lru_cache(maxsize=4096)
def choose(
    op: Reducer, nbytes: int, rates: LinkRates, topology: Topology, library: str | None = None
) -> str:
    """Return the candidate that costs least for a buffer of nbytes; of equal ones the first.

    Args:
        op: What it reduces with.
        nbytes: Length of each rank's buffer.
        rates: The machine.
        topology: Where the ranks are.
        library: A library's own all-reduce that computes the same, the first candidate.
    """
    limit = math.inf
    if library is not None:
        limit = library_cost(nbytes, rates, topology).seconds
        if limit <= least_seconds(nbytes, rates, topology):
            return library
    kind = "adasum" if op.needs_one_tree else "sum"
    specs = candidates(op, topology)
    seconds = {spec: estimate(spec, nbytes, rates, topology, kind).seconds for spec in specs}
    best = min(specs, key=seconds.__getitem__)
    return best if library is None or seconds[best] < limit else library
