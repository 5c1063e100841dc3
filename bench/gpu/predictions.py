"""What was predicted of a GPU before any had run this, what measures it, and the bound.

bench/NOTES.md quotes each text; the page of a run says what became of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bench.kernels.goals import GOALS
from bench.kernels.judging import MET, NOT_MEASURED, NOT_MET, Goal, judge
from bench.kernels.measure import Row

VHDD, NCCL = "vhdd", "nccl"
# By the goal of the kernels' bench that measures it; a bound stands where it is not the goal's.
_BY_GOALS: tuple[tuple[str, str] | tuple[str, str, float], ...] = (
    (
        "pack, unpack of 64 MB or more: fraction of the roof",
        "pack and unpack move 0.95 of the copy roof from 64 MB on.",
    ),
    (
        "sum_n, scaled_add of tensors of 64 MB or more: fraction of the roof",
        "sum_n and scaled_add move 0.95 of the copy roof from 64 MB on.",
    ),
    ("the same, misaligned", "Misaligned, pack and unpack move 0.85 in float32."),
    (
        "1,000 tensors of 1 KiB: times an empty launch",
        "1,000 tensors of 1 KiB take at most two empty launches.",
    ),
    (
        "sum_n of 8: chain of adds over ours",
        "sum_n of 8 is three times as fast as a chain of additions.",
        3.0,
    ),
    (
        "dot_and_norms of 64 MB or more: fraction of the read-only roof",
        "dot_and_norms reads at 0.9 of the read-only roof from 64 MB on.",
    ),
    (
        "adasum on chip: (time - empty launch) over the three-unit roof",
        "adasum of up to 2 Mi elements takes, less an empty launch, 1.2 of the three-unit roof.",
    ),
    (
        "adasum on chip: time over the three-unit roof and an empty launch",
        "With that launch it takes at most 1.5 of that roof and the launch.",
    ),
    (
        "adasum of 160 segments on chip over one segment",
        "160 segments on chip take at most 1.05 of the time of one.",
    ),
    (
        "adasum beyond: fraction of the five-unit roof",
        "adasum beyond the chip, a bucket of 25 MiB say, moves 0.93 of the roof of five units.",
    ),
    (
        "adasum of a model's segments over one segment",
        "A model's segments take at most 1.05 of the time of one segment.",
    ),
    (
        "adasum of up to 1 MiB in two launches: without overlap over with it",
        "adasum of up to 1 MiB in two launches takes no longer where they overlap.",
    ),
    (
        "adasum: torch eager over ours",
        "adasum is three times as fast as torch in eager mode, or more.",
    ),
    ("adasum: torch.compile over ours", "adasum is 1.5 times as fast as torch.compile, or more."),
    (
        "host cost of a planned run beside 0.1 a tensor, microseconds",
        "A planned run costs the host at most 10 microseconds and 0.1 a tensor, the driver's part "
        "included.",
    ),
    (
        "replays inside a CUDA graph (1: yes), every kernel",
        "Every kernel replays inside a CUDA graph with the right answer.",
    ),
)
ADASUM_OVER_SUM = (
    "Adasum of 64 MiB by vhdd takes at most 1.25 times NCCL's sum, two ranks on one GPU."
)
_BY_NOTHING_HERE = (
    (
        "Messages in parts hide all but an eighth of a step's reduction between nodes, from 59 MB "
        "a message, and nothing between ranks on one GPU.",
        "several GPUs, and `python -m bench.collectives.all_reduce`",
    ),
    ("16-bit work is the first to miss its goal on a B200.", "a B200, and the same bench"),
)


class Found(NamedTuple):
    """What became of a prediction.

    Attributes:
        text: The prediction.
        bound: What the figure is held against, "" where nothing here measures it.
        figure: What was found, None where it was not measured.
        status: Whether it is met.
        where: The row where it was worst.
        measured_by: What measures it.
    """

    text: str
    bound: str
    figure: float | None
    status: str
    where: str
    measured_by: str


def look(rows: Sequence[Row], ranks: Mapping[str, Mapping[str, Any]]) -> list[Found]:
    """Hold all predictions against a run.

    Args:
        rows: Of the kernels' bench.
        ranks: What bench.collectives.one_gpu has written, by algorithm; empty where it did not run.
    """
    goals = {goal.name: goal for goal in GOALS["cuda"]}
    found = []
    for name, text, *bound in _BY_GOALS:
        goal: Goal = goals[name]._replace(threshold=bound[0]) if bound else goals[name]
        verdict = judge(goal, rows)
        limit = f"{'<=' if goal.at_most else '>='} {goal.threshold:g}"
        by = f"the goal `{name}`"
        found.append(Found(text, limit, verdict.value, verdict.status, verdict.row, by))
    ratio, status = None, NOT_MEASURED
    if {VHDD, NCCL} <= ranks.keys():
        ratio = ranks[VHDD]["median"] / ranks[NCCL]["median"]
        status = MET if ratio <= 1.25 and not ranks[VHDD]["wrong"] else NOT_MET
    by = "`python -m bench.collectives.one_gpu`"
    found.append(Found(ADASUM_OVER_SUM, "<= 1.25", ratio, status, "", by))
    return found + [Found(text, "", None, NOT_MEASURED, "", by) for text, by in _BY_NOTHING_HERE]
