"""The price of NCCL's own all-reduce, which has no schedule here.

It is one launch, whose steps cost the host nothing, and reduces what it receives as it arrives. The
hops are those of NCCL's own tuning (its src/graph/tuning.cc), which takes the better of:

- rings, one for each rank of a node: 2 (n - 1) hops, of which 2 a node cross the network. Each rank
  passes on 2 (n - 1) / n of the buffer; so does each node, by all of its ranks together.
- two trees of nodes, with a chain of ranks in each: 2 (local - 1) hops in a node and 2 log2(nodes)
  between nodes. A rank passes the buffer up and down; nodes exchange 2 (nodes - 1) / nodes of it.
  Source: Sanders, Speck and Traeff, Parallel Computing 2009.

The slower of the two links sets the pace. NCCL gives trees 92 % of a ring's bandwidth; here they
have all of it, as the rates of schedules are not derated either.
"""

from __future__ import annotations

import numpy as np

from collectives.cost.link_rates import LinkRates
from collectives.cost.profiles import Cost
from collectives.schedules.topology import Topology


def library_cost(nbytes: float, rates: LinkRates, topology: Topology) -> Cost:
    """Return the cost of a library's own sum over all ranks; `rates.sum.alpha` is the launch."""
    if topology.size == 1:
        return Cost(rates.call, 0, 0.0, 0.0, 0.0, 0.0, 0.0)
    costs = [way(nbytes, rates, topology) for way in (_ring, _trees)]
    return min(costs, key=lambda cost: cost.seconds)


def _ring(nbytes: float, rates: LinkRates, topology: Topology) -> Cost:
    size, local, nodes = topology.size, topology.local_size, topology.num_nodes
    hops = 2 * (size - 1)
    moved = hops / size * nbytes
    # With one rank a node all hops cross.
    crossing = hops if local == 1 else 2 * nodes if nodes > 1 else 0
    within = moved if local > 1 else 0.0
    between = moved if nodes > 1 else 0.0
    total = (size * moved - nodes * between, nodes * between)
    return _cost(hops - crossing, crossing, within, between, total, rates, local)


def _trees(nbytes: float, rates: LinkRates, topology: Topology) -> Cost:
    local, nodes = topology.local_size, topology.num_nodes
    # The ends of a chain pass the buffer on in one direction only.
    within = min(local - 1, 2) * nbytes
    between = 2 * (nodes - 1) / nodes * nbytes
    hops, crossing = 2 * (local - 1), 2 * (nodes - 1).bit_length()
    total = (hops * nodes * nbytes, nodes * between)
    return _cost(hops, crossing, within, between, total, rates, local)


def _cost(
    inside: int,
    crossing: int,
    within: float,
    between: float,
    total: tuple[float, float],
    rates: LinkRates,
    local: int,
) -> Cost:
    seconds = rates.call + rates.host + rates.sum.alpha
    seconds += inside * rates.intra.alpha + crossing * rates.inter.alpha
    # What a rank passes on inside its node, and its node to others.
    intra, inter = (
        rate.seconds(np.zeros(1), np.array([nbytes])).item()
        for rate, nbytes in ((rates.intra, within), (rates.inter, between / local))
    )
    seconds += max(intra, inter, (rates.nic or 0.0) * between)
    return Cost(seconds, 1, *total, within, between, 0.0)
