"""What is measured is the same on every rank, and the choice that follows is the cheapest."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

import collectives
from adasum.reducer import Adasum
from collectives.bootstrap import calibration
from collectives.bootstrap.calibration import _ring, calibrate, fit
from collectives.cost import LinkRates, Rate, estimate
from collectives.cost.choice import candidates, choose
from collectives.reducers import Max
from collectives.schedules.topology import Topology


@pytest.fixture
def _small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    # Small sizes will do where the numbers themselves are not looked at.
    monkeypatch.setattr(calibration, "_SIZES", (64, 4096))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.usefixtures("_small_sizes")
def test_all_ranks_get_the_same_numbers(size: int) -> None:
    first, *others = collectives.run_threads(size, calibrate)
    assert set(others) <= {first}
    assert first.sum.alpha + first.sum.beta > 0 and first.adasum.alpha + first.adasum.beta > 0
    assert first.intra == first.inter
    assert (first.intra == Rate(0.0, 0.0)) == (size == 1)


@pytest.mark.usefixtures("_small_sizes")
def test_two_nodes_have_two_kinds_of_link() -> None:
    def work(group: collectives.Group) -> LinkRates:
        group.topology = Topology(4, 2)
        return calibrate(group)

    results = collectives.run_threads(4, work)
    assert len(set(results)) == 1
    assert results[0].intra != results[0].inter


@pytest.mark.usefixtures("_small_sizes")
def test_a_clock_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ticks may be longer than what is measured: then everything takes no time by it."""
    monkeypatch.setattr(time, "perf_counter", lambda: 1.0)
    (first, second) = collectives.run_threads(2, calibrate)
    assert first == second
    assert 0 < first.intra.alpha + first.intra.beta < 1e-2


def test_small_rings_cover_all_ranks() -> None:
    for size in range(2, 20):
        ranks = range(5, 5 + 3 * size, 3)
        rings = {_ring(ranks, rank) for rank in ranks}
        assert sorted(rank for ring in rings for rank in ring) == list(ranks)
        assert {len(ring) for ring in rings} <= {2, 3, 4}
        assert all(rank in _ring(ranks, rank) for rank in ranks)


def test_fit_goes_through_the_points_and_never_falls() -> None:
    small, middle, last = (64, 3e-6 + 64 * 2e-9), (4096, 3e-6 + 4096 * 2e-9), (8192, 4e-5)
    rate = fit([small, middle, last])
    assert rate == pytest.approx(Rate(3e-6, 2e-9, 4096, (4e-5 - middle[1]) / 4096))
    for nbytes, seconds in (small, middle, last):
        assert float(rate.seconds(1, nbytes)) == pytest.approx(seconds)
    # One size tells no slope; times that fall with the size, and an origin below zero, do not fit.
    assert fit([(64, 1e-6)]) == Rate(1e-6, 0.0)
    assert fit([small, middle]) == pytest.approx(Rate(3e-6, 2e-9))
    assert fit([(64, 2e-6), (4096, 1e-6), last])[:2] == (2e-6, 0.0)
    assert fit([(64, 1e-9), (4096, 1e-6), last]).alpha == 0
    assert fit([(64, 2e-6), (4096, 3e-6), (8192, 1e-6)]).far == 0


def test_candidates_have_one_mathematics() -> None:
    one, two = Topology(8, 8), Topology(8, 4)
    assert candidates(Adasum, one) == candidates(Adasum, two) == ("rd", "vhdd")
    assert candidates(collectives.Sum, one) == ("rd", "rechd", "xring")
    assert candidates(collectives.Average, Topology(8, 1)) == ("rd", "rechd", "xring")
    # The inner of two levels adds, which is not everybody's reduction.
    assert candidates(Max, two) == ("rd", "rechd", "xring")
    assert "xring#4" in candidates(collectives.Sum, two)
    assert "xring/rechd" in candidates(collectives.Sum, two)


def test_choice() -> None:
    rates = LinkRates(Rate(1e-4, 1e-9), Rate(1e-4, 1e-9), Rate(1e-5, 1e-10), Rate(1e-5, 3e-10))
    one = Topology(8, 8)
    assert choose(collectives.Sum, 8, rates, one) == "rd"
    assert choose(Adasum, 8, rates, one) == "rd"
    assert choose(Adasum, 1 << 28, rates, one) == "vhdd"
    assert choose(collectives.Sum, 1 << 22, rates, one) == "rechd"
    # On seven ranks folding moves two buffers more, which a ring does not.
    assert choose(collectives.Sum, 1 << 28, rates, Topology(7, 7)) == "xring"
    # A node's ranks behind one slow wire: on it, two levels move what one rank alone would.
    slow = replace(rates, inter=Rate(1e-4, 1e-8), nic=1e-8)
    chosen = choose(collectives.Average, 1 << 26, slow, Topology(12, 3))
    assert "/" in chosen
    costs = [
        estimate(spec, 1 << 26, slow, Topology(12, 3)).seconds
        for spec in candidates(collectives.Sum, Topology(12, 3))
    ]
    assert estimate(chosen, 1 << 26, slow, Topology(12, 3)).seconds == min(costs)
