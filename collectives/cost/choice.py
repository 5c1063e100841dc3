"""The algorithm that is taken unless one is named, from what messages and reductions cost here."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from collectives.cost import ASSUMED, LinkRates, Profile, estimate, walk
from collectives.cost.library import least_seconds, library_cost
from collectives.cost.profiles import Profiler
from collectives.reducers import Reducer, is_plain_sum
from collectives.schedules import binomial_tree, bruck, ring
from collectives.schedules.algorithm import BulkStep
from collectives.schedules.schedule import Schedule
from collectives.schedules.topology import Topology

# A reduction by tree takes the whole buffer as extra memory: up to here nobody minds.
TREE_BYTES = 1024 * 1024
# Up to here latency is what counts, where nothing is known of the links.
_SMALL_BYTES = 64 * 1024


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


def all_gather_schedule(nbytes: float, rates: LinkRates | None, topology: Topology) -> Schedule:
    """Return Bruck's all-gather or the ring's, whichever costs less; both send as many bytes.

    Where all links are alike that is Bruck's, of fewer steps; else more of its bytes cross.

    Args:
        nbytes: Length of all ranks' pieces together.
        rates: The machine; None for assumptions.
        topology: Where the ranks are.
    """
    size, alike = topology.size, 1 in (topology.num_nodes, topology.local_size)
    if not alike:
        machine = rates or ASSUMED
        bruck_cost, ring_cost = (
            each.cost(nbytes, machine).seconds for each in _gather_profiles(topology)
        )
        if ring_cost < bruck_cost:
            return ring.all_gather(size)
    return bruck.all_gather(size)


def reduce_schedule(
    nbytes: int, root: int, rates: LinkRates | None, topology: Topology
) -> Schedule:
    """Return the reduction onto `root` by a tree, or along a line in pieces, as costs less.

    Args:
        nbytes: Length of each rank's buffer. Beyond TREE_BYTES it is the line, of which no rank
            needs more than one n-th of the buffer as extra memory.
        root: Who gets the result.
        rates: The machine; None for a choice by size alone.
        topology: Where the ranks are.
    """
    size, takes_tree = topology.size, nbytes <= _SMALL_BYTES
    if rates is not None and nbytes <= TREE_BYTES:
        tree_cost, line_cost = (
            each.cost(nbytes, rates).seconds for each in _reduce_profiles(topology)
        )
        takes_tree = tree_cost <= line_cost
    return binomial_tree.reduce(size, root) if takes_tree else ring.reduce(size, root)


@lru_cache(maxsize=16)
def _gather_profiles(topology: Topology) -> tuple[Profile, Profile]:
    """Return the profiles of Bruck's all-gather and of the ring's."""
    size = topology.size
    return walk(bruck.all_gather(size), topology), _ring(topology, size - 1, ways=0)


@lru_cache(maxsize=16)
def _reduce_profiles(topology: Topology) -> tuple[Profile, Profile]:
    """Return the profiles of the tree and of the line, with its pipeline as if always full."""
    size = topology.size
    return walk(binomial_tree.reduce(size, 0), topology), _ring(topology, 2 * size - 2, ways=1)


def _ring(topology: Topology, steps: int, ways: int) -> Profile:
    """Return the profile of steps in which every rank passes on one n-th of the buffer."""
    ranks, profiler = np.arange(topology.size), Profiler(topology)
    step = BulkStep(ranks, np.roll(ranks, -1), 1 / topology.size, ways, times=steps)
    if topology.size > 1:
        profiler.add(step, "sum")
    return profiler.profile()
