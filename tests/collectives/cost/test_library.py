"""The price of a library's own sum."""

from __future__ import annotations

from dataclasses import replace

import pytest

from collectives.cost import ASSUMED, LinkRates, Rate, estimate
from collectives.cost.library import library_cost
from collectives.schedules.topology import Topology

RATES = LinkRates(
    Rate(3e-6, 2e-12), Rate(1.4e-5, 2e-11), Rate(2e-6, 1e-12), Rate(7e-6, 3e-12), host=1e-5
)
BUCKET = 25 << 20


def test_library_costs_the_better_of_ring_and_trees_and_one_launch() -> None:
    (alpha, beta), (far_alpha, far_beta), once = RATES.intra[:2], RATES.inter[:2], 1e-5 + 2e-6
    nbytes = float(1 << 26)
    # One node: a ring and a chain have as many hops, and the ring moves fewer bytes.
    assert library_cost(nbytes, RATES, Topology(8, 8)).seconds == pytest.approx(
        once + 14 * alpha + 14 / 8 * nbytes * beta
    )
    # One rank a node: 126 hops of a ring, or 12 of trees.
    assert library_cost(nbytes, RATES, Topology(64, 1)).seconds == pytest.approx(
        once + 12 * far_alpha + 126 / 64 * nbytes * far_beta
    )
    # Eight nodes of eight: few bytes go by trees, many at the pace of the network by its adapters.
    assert library_cost(8, RATES, Topology(64, 8)).seconds == pytest.approx(
        once + 14 * alpha + 6 * far_alpha + 14 / 8 * 8 * far_beta / 8
    )
    shared = replace(RATES, nic=far_beta)
    assert library_cost(1e9, shared, Topology(64, 8)).seconds == pytest.approx(
        once + 14 * alpha + 6 * far_alpha + 14 / 8 * 1e9 * far_beta
    )
    assert library_cost(1e9, RATES, Topology(1, 1)).seconds == 0


def test_library_moves_the_bytes_of_a_ring_or_of_trees() -> None:
    cost = library_cost(1e9, RATES, Topology(8, 8))
    assert (cost.steps, cost.memory, cost.inter) == (1, 0, 0)
    assert cost.intra == pytest.approx(2 * 7 * 1e9)
    cost = library_cost(8, RATES, Topology(16, 4))
    assert cost.intra == 2 * 3 * 4 * 8 and cost.inter == 2 * 3 * 8


def test_a_bucket_by_a_ring_is_many_times_as_slow() -> None:
    """Why `auto` takes the library's: at 64 ranks a ring takes 34 times as long, at 8,192 2,374."""
    for size, ratio in ((64, 34.0), (8192, 2374)):
        topology = Topology(size, 8)
        ring = estimate("xring", BUCKET, ASSUMED, topology).seconds
        library = library_cost(BUCKET, ASSUMED, topology).seconds
        assert ring / library == pytest.approx(ratio, rel=0.01)
