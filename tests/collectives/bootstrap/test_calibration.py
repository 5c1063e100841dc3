"""What is measured is the same on every rank, and the choice that follows is the cheapest."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

import collectives
from adasum.reducer import Adasum
from collectives.bootstrap import calibration
from collectives.bootstrap.calibration import _ring, calibrate, fit
from collectives.cost import ASSUMED, LinkRates, Rate, estimate, with_rates
from collectives.cost.choice import candidates, choose
from collectives.schedules.topology import Topology


@pytest.fixture
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_known", {})
    # Small sizes will do where the numbers themselves are not looked at.
    monkeypatch.setattr(calibration, "_SIZES", (64, 4096))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.usefixtures("_nothing_known")
def test_all_ranks_get_the_same_numbers_once(size: int) -> None:
    def work(group: collectives.Group) -> tuple[LinkRates, LinkRates, LinkRates]:
        return calibrate(group), calibrate(group), calibrate(group, renew=True)

    results = collectives.run_threads(size, work)
    first, again, renewed = results[0]
    assert set(results) == {(first, again, renewed)}
    assert again == first and renewed != first
    assert first.sum.alpha + first.sum.beta > 0 and first.adasum.alpha + first.adasum.beta > 0
    assert first.intra == first.inter
    assert (first.intra == Rate(0.0, 0.0)) == (size == 1)


@pytest.mark.usefixtures("_nothing_known")
def test_two_nodes_have_two_kinds_of_link() -> None:
    def work(group: collectives.Group) -> LinkRates:
        group.topology = Topology(4, 2)
        return calibrate(group)

    results = collectives.run_threads(4, work)
    assert len(set(results)) == 1
    assert results[0].intra != results[0].inter


@pytest.mark.usefixtures("_nothing_known")
def test_a_rank_that_knows_more_than_others_measures_with_them() -> None:
    def work(group: collectives.Group) -> LinkRates:
        return calibrate(group)

    collectives.run_threads(2, work)
    (key,) = calibration._known
    name, device, _, hosts = key
    calibration._known = {(name, device, 3, hosts[:1] * 3): ASSUMED}
    # Threads share what is known; it is known to all three, and so is not measured.
    assert collectives.run_threads(3, work) == [ASSUMED] * 3


class _KnownByRank(dict[Any, LinkRates]):
    """What is known, apart for every thread, as processes have it."""

    def __contains__(self, key: object) -> bool:
        return super().__contains__((threading.current_thread(), key))

    def __getitem__(self, key: object) -> LinkRates:
        return super().__getitem__((threading.current_thread(), key))

    def __setitem__(self, key: object, rates: LinkRates) -> None:
        super().__setitem__((threading.current_thread(), key), rates)

    def get(self, key: object, default: Any = None) -> Any:
        return super().get((threading.current_thread(), key), default)


@pytest.mark.usefixtures("_nothing_known")
def test_ranks_that_know_different_answers_agree_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_known", _KnownByRank())

    def work(group: collectives.Group) -> list[LinkRates]:
        parts = [group.split(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
        return [calibrate(part) for part in parts if part is not None]

    (a, across), (b, over), (c, across_too), (d, over_too) = collectives.run_threads(4, work)
    # All four parts are two ranks of one host, so for the last two nothing is measured.
    assert a == b and c == d and a != c
    assert across == across_too == a
    assert over == over_too == b


@pytest.mark.usefixtures("_nothing_known")
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


def test_fit() -> None:
    near = [(n, 3e-6 + 2e-9 * n) for n in (64, 4096, 1 << 20)]
    last = (1 << 22, near[-1][1] + 5e-9 * 3 * (1 << 20))
    assert fit([*near, last]) == pytest.approx(Rate(3e-6, 2e-9, 1 << 20, 5e-9))
    # One size tells no slope; times that fall with the size, and an origin below zero, do not fit.
    assert fit([(64, 1e-6)]) == Rate(pytest.approx(1e-6), 0.0)
    assert fit([(64, 1e-6), (128, 3e-6)]) == pytest.approx(Rate(1e-6, 0.0, 64, 2e-6 / 64))
    assert fit([(64, 2e-6), (4096, 1e-6), last]).beta == 0
    assert fit([(64, 1e-9), (4096, 1e-6), last]).alpha == 0
    assert fit([(64, 2e-6), (4096, 3e-6), (8192, 1e-6)]).far == 0


def test_candidates_have_one_mathematics() -> None:
    one, two = Topology(8, 8), Topology(8, 4)
    assert candidates(Adasum, one) == candidates(Adasum, two) == ("rd", "vhdd")
    assert candidates(collectives.Sum, one) == ("rd", "rechd", "xring")
    assert candidates(collectives.Average, Topology(8, 1)) == ("rd", "rechd", "xring")
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
    slow = with_rates(rates, {"inter": Rate(1e-4, 1e-8), "nic": 1e-8})
    chosen = choose(collectives.Average, 1 << 26, slow, Topology(12, 3))
    assert "/" in chosen
    costs = [
        estimate(spec, 1 << 26, slow, Topology(12, 3)).seconds
        for spec in candidates(collectives.Sum, Topology(12, 3))
    ]
    assert estimate(chosen, 1 << 26, slow, Topology(12, 3)).seconds == min(costs)
