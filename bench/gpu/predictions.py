"""What was predicted of a GPU before any had run this, what measures it, and the bound.

bench/NOTES.md quotes each text; the page of a run says what became of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from bench.kernels import goals
from bench.kernels.judging import MET, NOT_MEASURED, PARTLY, judge
from bench.kernels.measure import Row

MISSED = "MISSED"
VHDD, NCCL = "vhdd", "nccl"


class Measured(NamedTuple):
    """What a run has found.

    Attributes:
        rows: Of the kernels' bench.
        ranks: What bench.collectives.one_gpu has written, by algorithm; empty where it did not run.
    """

    rows: Sequence[Row]
    ranks: Mapping[str, Mapping[str, Any]]


class Found(NamedTuple):
    """What became of a prediction: met, missed or not measured; the figure; where it was worst."""

    status: str
    figure: float | None
    where: str = ""


@dataclass(frozen=True)
class Prediction:
    """One prediction.

    Attributes:
        text: A sentence.
        measured_by: What measures it.
        bound: What the figure is held against; None where nothing here measures it.
        at_most: Whether the figure must be at most the bound, else at least.
        look: Finds it among what was measured.
    """

    text: str
    measured_by: str
    bound: float | None
    at_most: bool
    look: Callable[[Measured], Found]


def _of_goal(text: str, name: str, bound: float | None = None) -> Prediction:
    """Return a prediction that a goal of the kernels' bench measures, by another bound or its."""
    (goal,) = (each for each in goals.GPU if each.name == name)
    if bound is not None:
        goal = goal._replace(threshold=bound)

    def look(measured: Measured) -> Found:
        verdict = judge(goal, measured.rows)
        if verdict.status in (NOT_MEASURED, MET, PARTLY):
            return Found(verdict.status, verdict.value, verdict.row)
        return Found(MISSED, verdict.value, verdict.row)

    return Prediction(text, f"the goal `{name}`", goal.threshold, goal.at_most, look)


def _nothing(text: str, needs: str) -> Prediction:
    return Prediction(text, needs, None, True, lambda _: Found(NOT_MEASURED, None))


def _adasum_over_sum(measured: Measured) -> Found:
    ours, theirs = measured.ranks.get(VHDD), measured.ranks.get(NCCL)
    if ours is None or theirs is None:
        return Found(NOT_MEASURED, None)
    ratio = ours["median"] / theirs["median"]
    return Found(MET if ratio <= 1.25 and not ours["wrong"] else MISSED, ratio)


PREDICTIONS = (
    _of_goal(
        "pack and unpack move 0.95 of the copy roof from 64 MB on.",
        "pack, unpack of 64 MB or more: fraction of the roof",
    ),
    _of_goal(
        "sum_n and scaled_add move 0.95 of the copy roof from 64 MB on.",
        "sum_n, scaled_add of tensors of 64 MB or more: fraction of the roof",
    ),
    _of_goal("Misaligned, pack and unpack move 0.85 in float32.", "the same, misaligned"),
    _of_goal(
        "1,000 tensors of 1 KiB take at most two empty launches.",
        "1,000 tensors of 1 KiB: times an empty launch",
    ),
    _of_goal(
        "sum_n of 8 is three times as fast as a chain of additions.",
        "sum_n of 8: chain of adds over ours",
        3.0,
    ),
    _of_goal(
        "dot_and_norms reads at 0.9 of the read-only roof from 64 MB on.",
        "dot_and_norms of 64 MB or more: fraction of the read-only roof",
    ),
    _of_goal(
        "adasum of up to 2 Mi elements takes, less an empty launch, 1.2 of the three-unit roof.",
        "adasum on chip: (time - empty launch) over the three-unit roof",
    ),
    _of_goal(
        "With that launch it takes at most 1.5 of that roof and the launch.",
        "adasum on chip: time over the three-unit roof and an empty launch",
    ),
    _of_goal(
        "160 segments on chip take at most 1.05 of the time of one.",
        "adasum of 160 segments on chip over one segment",
    ),
    _of_goal(
        "adasum beyond the chip, a bucket of 25 MiB say, moves 0.93 of the roof of five units.",
        "adasum beyond: fraction of the five-unit roof",
    ),
    _of_goal(
        "A model's segments take at most 1.05 of the time of one segment.",
        "adasum of a model's segments over one segment",
    ),
    _of_goal(
        "adasum of up to 1 MiB in two launches takes no longer where they overlap.",
        "adasum of up to 1 MiB in two launches: without overlap over with it",
    ),
    _of_goal(
        "adasum is three times as fast as torch in eager mode, or more.",
        "adasum: torch eager over ours",
    ),
    _of_goal(
        "adasum is 1.5 times as fast as torch.compile, or more.",
        "adasum: torch.compile over ours",
    ),
    _of_goal(
        "A planned run costs the host at most 10 microseconds and 0.1 a tensor, the driver's part "
        "included.",
        "host cost of a planned run beside 0.1 a tensor, microseconds",
    ),
    _of_goal(
        "Every kernel replays inside a CUDA graph with the right answer.",
        "replays inside a CUDA graph (1: yes), every kernel",
    ),
    Prediction(
        "Adasum of 64 MiB by vhdd takes at most 1.25 times NCCL's sum, two ranks on one GPU.",
        "`python -m bench.collectives.one_gpu`",
        1.25,
        True,
        _adasum_over_sum,
    ),
    _nothing(
        "Messages in parts hide all but an eighth of a step's reduction between nodes, from 59 MB "
        "a message, and nothing between ranks on one GPU.",
        "several GPUs, and `python -m bench.collectives.all_reduce`",
    ),
    _nothing(
        "16-bit work is the first to miss its goal on a B200.",
        "a B200, and the same bench",
    ),
)
