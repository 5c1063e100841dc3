"""The cost model against measured times: the order of the algorithms, and the times themselves.

Link rates are measured before and after every size, and the model predicts from both. The order of
two algorithms is decided where their interquartile ranges do not overlap and where the predictions
agree on it: then it is right or wrong. Where ranges overlap the measurement says nothing, where
calibrations contradict each other the model says nothing, and neither does it where two algorithms
have the very same steps (xring and rechd on two ranks). A time is near where some prediction is
within a factor of two of some time between the quartiles.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import torch

import collectives
from bench.collectives.link_rates import calibrate
from bench.collectives.ranks import timed
from bench.kernels.timing import Times
from bench.tables import table
from collectives.cost import ASSUMED, LinkRates, estimate
from collectives.schedules.topology import Topology

_CALLS = 15


@dataclass(frozen=True)
class Comparison:
    """One operator at one size, in seconds.

    samples: measured, by algorithm. predicted: one for each calibration, by algorithm.
    """

    op: str
    size: int
    samples: dict[str, list[float]]
    predicted: dict[str, list[float]]

    @property
    def times(self) -> dict[str, Times]:
        """Median and quartiles of what was measured."""
        return {name: Times.of(samples) for name, samples in self.samples.items()}

    def pairs(self) -> list[tuple[str, str, str]]:
        """Return each two algorithms with "right", "wrong", "undecided" or "same steps"."""
        return [(a, b, self._verdict(a, b)) for a, b in combinations(self.samples, 2)]

    def ratio(self, name: str) -> float:
        """Return the mean prediction over the median time."""
        return statistics.fmean(self.predicted[name]) / self.times[name].median

    def near(self, name: str) -> bool:
        """Return whether the prediction is within a factor of two."""
        times, predicted = self.times[name], self.predicted[name]
        return min(predicted) <= 2 * times.high and 2 * max(predicted) >= times.low

    def record(self) -> dict[str, Any]:
        """Return what JSON holds, in microseconds."""
        quartiles = {name: [t.low, t.median, t.high] for name, t in self.times.items()}
        return {
            "op": self.op,
            "size": self.size,
            "predicted": _microseconds(self.predicted),
            "quartiles": _microseconds(quartiles),
            "pairs": self.pairs(),
            "near": {name: self.near(name) for name in self.samples},
        }

    def _verdict(self, a: str, b: str) -> str:
        one, other = self.times[a], self.times[b]
        both = [*zip(self.predicted[a], self.predicted[b], strict=True)]
        # Equal but for the order in which the steps were added up.
        if all(abs(first - second) <= 1e-9 * first for first, second in both):
            return "same steps"
        overlap = one.low <= other.high and other.low <= one.high
        if overlap or len({first < second for first, second in both}) > 1:
            return "undecided"
        return "right" if (one.high < other.low) == (both[0][0] < both[0][1]) else "wrong"


def _microseconds(seconds: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    return {name: [value * 1e6 for value in values] for name, values in seconds.items()}


def check(spec: str, op: str, topology: Topology) -> None:
    """Raise ValueError for a specification whose steps are not known."""
    estimate(spec, 1, ASSUMED, topology, _kind(op))


def measured_rates(group: collectives.Group, device: torch.device) -> LinkRates:
    """Measure the rates again, and what a call takes beside its steps. All ranks must call it.

    The latter is how much longer an all-reduce of one element by rd takes than the model says.
    """
    found = calibrate(group, device)
    tensor = torch.zeros(1, device=device)
    call = partial(group.all_reduce, tensor, algorithm="rd")
    samples = [timed(call, device) for _ in range(_CALLS)]
    steps = estimate("rd", tensor.nbytes, found, group.topology).seconds
    return dataclasses.replace(found, call=max(0.0, statistics.median(samples) - steps))


def compare(
    op: str,
    size: int,
    samples: Mapping[str, Sequence[float]],
    machines: Sequence[LinkRates],
    topology: Topology,
) -> Comparison:
    """samples: seconds by algorithm; machines: link rates of one calibration or more."""
    predicted = {
        name: [estimate(name, size, rates, topology, _kind(op)).seconds for rates in machines]
        for name in samples
    }
    return Comparison(op, size, {name: [*values] for name, values in samples.items()}, predicted)


def _kind(op: str) -> str:
    return "adasum" if op == "adasum" else "sum"


def report(comparisons: Sequence[Comparison]) -> list[str]:
    """Return a table and its summary."""
    rows = [(each, name, times) for each in comparisons for name, times in each.times.items()]
    cells = [
        [
            each.op,
            str(each.size),
            name,
            f"{times.median * 1e6:.0f}",
            f"{times.low * 1e6:.0f}-{times.high * 1e6:.0f}",
            f"{statistics.fmean(each.predicted[name]) * 1e6:.0f}",
            f"{each.ratio(name):.2f}",
        ]
        for each, name, times in rows
    ]
    header = [
        "op",
        "bytes",
        "algorithm",
        "measured us",
        "quartiles",
        "model us",
        "model / measured",
    ]
    verdicts = [(each, pair) for each in comparisons for pair in each.pairs()]
    found = [verdict for _, (_, _, verdict) in verdicts]
    counts = (
        f"{found.count(each)} {each}" for each in ("right", "wrong", "undecided", "same steps")
    )
    ratios = [each.ratio(name) for each, name, _ in rows]
    within = sum(0.5 <= ratio <= 2 for ratio in ratios)
    return [
        *table(header, cells),
        "",
        f"Order of pairs: {', '.join(counts)}.",
        f"Times: {within} of {len(rows)} within 2x, "
        f"{sum(each.near(name) for each, name, _ in rows)} with the spread allowed for; "
        f"model / measured from {min(ratios):.2f} to {max(ratios):.2f}.",
        *(
            f"Wrong: {each.op} at {each.size} bytes, {a} and {b}."
            for each, (a, b, verdict) in verdicts
            if verdict == "wrong"
        ),
    ]
