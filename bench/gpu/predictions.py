"""What was predicted of a GPU before any had run this, held against a run.

bench/kernels/goals.py has what the kernels' bench measures; the rest is here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bench.kernels.goals import GOALS
from bench.kernels.judging import MET, NOT_MEASURED, NOT_MET, judge
from bench.kernels.measure import Row

VHDD, NCCL = "vhdd, request", "nccl"
ADASUM_OVER_SUM = (
    "Adasum of 64 MiB by vhdd, as a request, takes at most 1.25 times NCCL's sum, two ranks on "
    "one GPU."
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

    bound: what the figure is held against, "" where nothing here measures it; figure: None where it
    was not measured; where: the row where it was worst.
    """

    text: str
    bound: str
    figure: float | None
    status: str
    where: str
    measured_by: str


def look(rows: Sequence[Row], ranks: Mapping[str, Mapping[str, Any]]) -> list[Found]:
    """Hold all predictions against the rows of the kernels' bench.

    ranks: what bench.collectives.one_gpu has written, by algorithm; empty where it did not run.
    """
    found = []
    for goal in (goal for goal in GOALS["cuda"] if goal.predicted):
        goal = goal._replace(threshold=goal.predicted_threshold or goal.threshold)
        verdict = judge(goal, rows)
        figures = verdict.value, verdict.status, verdict.row
        found.append(Found(goal.predicted, goal.limit, *figures, f"the goal `{goal.name}`"))
    ratio, status = None, NOT_MEASURED
    if {VHDD, NCCL} <= ranks.keys():
        ratio = ranks[VHDD]["median"] / ranks[NCCL]["median"]
        status = MET if ratio <= 1.25 and not ranks[VHDD]["wrong"] else NOT_MET
    by = "`python -m bench.collectives.one_gpu`"
    found.append(Found(ADASUM_OVER_SUM, "<= 1.25", ratio, status, "", by))
    return found + [Found(text, "", None, NOT_MEASURED, "", by) for text, by in _BY_NOTHING_HERE]
