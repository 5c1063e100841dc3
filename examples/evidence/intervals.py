"""Intervals of means, and of differences seed by seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Student's t at 97.5 % for 1 to 30 degrees of freedom: NIST/SEMATECH e-Handbook of Statistical
# Methods, 1.3.6.7.2, "Critical values of Student's t distribution".
T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
# Differences within these are no difference: a point of accuracy, and a fiftieth of a nat.
MARGIN = {"accuracy": 0.01, "loss": 0.02}


@dataclass(frozen=True)
class Interval:
    """A mean and half the width of its 95 % interval, infinite of a single value."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half


def interval(values: Sequence[float]) -> Interval:
    """Return Student's t interval of the mean, of at most 31 values.

    Raises:
        ValueError: There is no value, or there are more than the table has.
    """
    count = len(values)
    if not 1 <= count <= len(T) + 1:
        raise ValueError(f"values must be 1 to {len(T) + 1}, got {count}")
    if count == 1:
        return Interval(values[0], math.inf)
    half = T[count - 2] * statistics.stdev(values) / math.sqrt(count)
    return Interval(statistics.mean(values), half)


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Return the interval of ours - theirs, seed by seed."""
    return interval([a - b for a, b in zip(ours, theirs, strict=True)])


def verdict(difference: Interval, score: str) -> str:
    """Say what a paired difference shows: "better", "worse", "level" or "not separated".

    "level" needs the whole interval within MARGIN. An interval that has zero in it and is wider
    shows nothing. One that excludes zero within the margin is level, too: a difference, but none
    that matters here.
    """
    margin = MARGIN[score]
    if -margin <= difference.low and difference.high <= margin:
        return "level"
    if difference.low <= 0.0 <= difference.high:
        return "not separated"
    return "better" if (difference.mean > 0) == (score == "accuracy") else "worse"
