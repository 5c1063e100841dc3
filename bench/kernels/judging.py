"""A goal, and what becomes of it on measured rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from bench.kernels.measure import Row, geometric_mean

MET, NOT_MET, PARTLY = "met", "NOT MET", "met where measured"
NOT_MEASURED, STATED = "not measured", "for information"


class Goal(NamedTuple):
    """Every chosen row's figure must be at least the threshold, or at most that.

    figure: None where the row does not have it; threshold: None states the worst figure without
    judging it; mean: whether it is the geometric mean of the figures that must reach the threshold;
    predicted: what was predicted of it, "" for nothing, with a threshold of its own where it is
    another one.
    """

    name: str
    chosen: Callable[[Row], bool]
    figure: Callable[[Row], float | None]
    threshold: float | None
    at_most: bool = False
    mean: bool = False
    predicted: str = ""
    predicted_threshold: float | None = None

    @property
    def limit(self) -> str:
        """The threshold as text, "" for none."""
        if self.threshold is None:
            return ""
        return f"{'<=' if self.at_most else '>='} {self.threshold:g}"

    def misses(self, value: float) -> bool:
        """Return whether a figure is on the wrong side of the threshold."""
        if self.threshold is None:
            return False
        return value > self.threshold if self.at_most else value < self.threshold


class Verdict(NamedTuple):
    """What became of a goal.

    value: the mean or the worst figure, which `row` has; rows: how many were chosen; measured: how
    many of them have a figure; missed: how many figures miss the threshold.
    """

    status: str
    value: float | None
    row: str
    rows: int
    measured: int
    missed: int


def judge(goal: Goal, rows: Sequence[Row]) -> Verdict:
    chosen = [row for row in rows if goal.chosen(row)]
    figures = [(figure, row.key) for row in chosen if (figure := goal.figure(row)) is not None]
    if not figures:
        return Verdict(NOT_MEASURED, None, "", len(chosen), 0, 0)
    worst, where = (max if goal.at_most else min)(figures)
    value = geometric_mean(figure for figure, _ in figures) if goal.mean else worst
    missed = sum(goal.misses(figure) for figure, _ in figures)
    status = MET if len(figures) == len(chosen) else PARTLY
    if goal.threshold is None:
        status = STATED
    elif goal.misses(value):
        status = NOT_MET
    return Verdict(status, value, where, len(chosen), len(figures), missed)
