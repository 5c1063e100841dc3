"""The algorithm that `auto` takes, from what messages and reductions cost here."""

from __future__ import annotations

from functools import lru_cache

from collectives.cost import LinkRates, estimate
from collectives.reducers import Reducer
from collectives.schedules.topology import Topology


def candidates(op: Reducer, topology: Topology) -> tuple[str, ...]:
    """Return the specifications that compute the same as `op` over all ranks.

    Sums may be grouped in any way, on two levels too. Adasum's order is part of its answer: `rd`
    and `vhdd` are the same tree, two levels and the ring's line are others.
    """
    if op.needs_one_tree:
        return ("rd", "vhdd")
    flat = ("rd", "rechd", "xring")
    if topology.num_nodes == 1 or topology.local_size == 1:
        return flat
    pairs = tuple(f"{inner}/{outer}" for inner in ("rechd", "xring") for outer in flat)
    return (*flat, f"xring#{topology.local_size}", *pairs)


@lru_cache(maxsize=4096)
def choose(op: Reducer, nbytes: int, rates: LinkRates, topology: Topology) -> str:
    """Return the candidate that costs least for a buffer of nbytes; of equal ones the first."""
    kind = "adasum" if op.needs_one_tree else "sum"
    specs = candidates(op, topology)
    return min(specs, key=lambda spec: estimate(spec, nbytes, rates, topology, kind).seconds)
