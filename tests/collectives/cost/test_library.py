"""The price of a library's own sum, and the choice between it and schedules."""

from __future__ import annotations

from dataclasses import replace

import pytest

from collectives import Average, Sum
from collectives.cost import ASSUMED, LinkRates, Rate, estimate, profile
from collectives.cost.choice import candidates, choose
from collectives.cost.library import least_seconds, library_cost
from collectives.schedules.topology import Topology

RATES = LinkRates(
    Rate(3e-6, 2e-12), Rate(1.4e-5, 2e-11), Rate(2e-6, 1e-12), Rate(7e-6, 3e-12), host=1e-5
)
TOPOLOGIES = [
    Topology(size, local)
    for size in (2, 3, 4, 7, 8, 12, 64)
    for local in {1, 2, 4, 8, size}
    if size % local == 0
]
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


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_no_schedule_takes_less_than_the_least(topology: Topology) -> None:
    for rates in (RATES, ASSUMED, replace(RATES, nic=1e-10, host=0.0, call=1e-4)):
        for nbytes in (8, 1 << 16, 1 << 28):
            least = least_seconds(nbytes, rates, topology)
            for name in candidates(Sum, topology):
                seconds = estimate(name, nbytes, rates, topology).seconds
                # Rounding of the two sums.
                assert seconds >= least * (1 - 1e-9), name


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("rates", [RATES, ASSUMED, replace(ASSUMED, host=0.0)])
def test_choice_is_the_cheapest_with_a_library_too(rates: LinkRates, topology: Topology) -> None:
    for power in range(3, 31, 6):
        nbytes = 1 << power
        chosen = choose(Average, nbytes, rates, topology, "nccl")
        prices = {"nccl": library_cost(nbytes, rates, topology).seconds}
        for name in candidates(Average, topology):
            prices[name] = estimate(name, nbytes, rates, topology).seconds
        assert prices[chosen] <= min(prices.values()) * (1 + 1e-9)
        assert choose(Average, nbytes, rates, topology) != "nccl"
        # The name is the caller's.
        other = choose(Average, nbytes, rates, topology, "collective")
        assert other == ("collective" if chosen == "nccl" else chosen)


@pytest.mark.parametrize("size", [1 << power for power in range(1, 14)])
def test_a_bucket_goes_to_the_library_on_2_to_8192_ranks(size: int) -> None:
    """By assumed rates, without walking what thousands of ranks do."""
    for local in {1, min(size, 8)}:
        topology, before = Topology(size, local), profile.cache_info().misses
        assert choose(Sum, BUCKET, ASSUMED, topology, "nccl") == "nccl"
        if size >= 64:
            assert profile.cache_info().misses == before
            # As much from the smallest buffer on: a step of the host's costs more than all hops.
            assert choose(Sum, 8, ASSUMED, topology, "nccl") == "nccl"


def test_a_small_sum_of_two_ranks_is_one_exchange() -> None:
    topology = Topology(2, 2)
    # The ring's second hop, 3.4 µs, is what the kernel that adds takes for 3.8 MB.
    assert choose(Sum, 1 << 20, ASSUMED, topology, "nccl") == "rd"
    assert choose(Sum, 1 << 22, ASSUMED, topology, "nccl") == "nccl"


def test_a_bucket_by_a_ring_is_many_times_as_slow() -> None:
    """What `auto` on GPUs took before: at 64 ranks 34 times as long, at 8,192 2,374 times."""
    for size, ratio in ((64, 34.0), (8192, 2374)):
        topology = Topology(size, 8)
        ring = estimate("xring", BUCKET, ASSUMED, topology).seconds
        library = library_cost(BUCKET, ASSUMED, topology).seconds
        assert ring / library == pytest.approx(ratio, rel=0.01)
