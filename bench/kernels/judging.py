"""A goal, and what becomes of it on measured rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bench.kernels.measure import Row, geometric_mean

MET, NOT_MET, PARTLY, NOT_MEASURED, STATED = (
    "met",
    "NOT MET",
    "met where measured",
    "not measured",
    "for information",
)


class Goal(NamedTuple):
    """Every chosen row's figure must be at least the threshold, or at most that.

    Attributes:
        name: Its line in the table of goals.
        chosen: Whether a row counts.
        figure: A row's figure, None where the row does not have it.
        threshold: None states the worst figure without judging it.
        at_most: Whether figures must be at most the threshold.
        mean: Whether it is the geometric mean of the figures that must reach the threshold.
    """

    name: str
    chosen: Callable[[Row], bool]
    figure: Callable[[Row], float | None]
    threshold: float | None
    at_most: bool = False
    mean: bool = False


@dataclass(frozen=True)
class Verdict:
    """What became of a goal.

    Attributes:
        goal: The goal.
        status: MET, NOT_MET and so on.
        value: The mean or the worst figure.
        row: The row with the worst figure.
        rows: How many rows were chosen.
        measured: How many of them have a figure.
        missed: How many figures miss the threshold.
    """

    goal: Goal
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
        return Verdict(goal, NOT_MEASURED, None, "", len(chosen), 0, 0)
    worst, where = (max if goal.at_most else min)(figures)
    value = geometric_mean(figure for figure, _ in figures) if goal.mean else worst
    missed = sum(_misses(goal, figure) for figure, _ in figures)
    if goal.threshold is None:
        status = STATED
    elif _misses(goal, value):
        status = NOT_MET
    else:
        status = MET if len(figures) == len(chosen) else PARTLY
    return Verdict(goal, status, value, where, len(chosen), len(figures), missed)


def _misses(goal: Goal, value: float) -> bool:
    if goal.threshold is None:
        return False
    return value > goal.threshold if goal.at_most else value < goal.threshold
