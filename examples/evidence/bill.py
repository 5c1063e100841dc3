"""What the protocol costs in core-hours, from a few steps that are timed now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from evidence.cells import Cell, cpu_seconds, make_ranks
from evidence.methods import METHODS
from evidence.protocol import TUNING_RANKS, count
from evidence.tasks import TASKS, TEST, VALIDATION, Task

MOST_HOURS = 10.0
# Of each kind the slowest optimizer of the task's family.
TIMED = {
    "sgd": {"gradient": "lars", "adasum": "adasum-gradient", "delta": "adasum-delta"},
    "adamw": {"gradient": "lamb", "adasum": "adasum-gradient-adamw", "delta": "adasum-delta-adamw"},
}


def kind_of(cell: Cell) -> str:
    method = METHODS[cell.method]
    return "adasum" if (method.op, method.kind) == ("adasum", "gradient") else method.kind


class Prices:
    """CPU seconds of a cell of a task: its batches, its looks and its test."""

    def __init__(self, name: str) -> None:
        self.task: Task = TASKS[name]()
        self.batch = {kind: self._batch(name, m) for kind, m in TIMED[self.task.family].items()}
        model = self.task.make_model()
        self.look, self.test = (
            _timed(lambda part=part: self.task.evaluate(model, part)) for part in (VALIDATION, TEST)
        )

    def of(self, cell: Cell) -> float:
        looks = self.task.looks * self.look
        return self.batch[kind_of(cell)] * self.task.batches + looks + cell.test * self.test

    def _batch(self, name: str, method: str) -> float:
        cell = Cell(name, method, TUNING_RANKS, 1e-3, 0)
        ranks, loss_of = make_ranks(cell, self.task), self.task.losses(0)
        ranks.step(loss_of, 1e-3)  # the first one allocates
        return _timed(lambda: ranks.step(loss_of, 1e-3)) / TUNING_RANKS


def table(names: Sequence[str]) -> tuple[str, float]:
    """Return a Markdown table of the stages, and the hours in all."""
    lines = ["| task | stage | trainings | seconds each | core-hours |", "|---|---|---:|---:|---:|"]
    total, trainings = 0.0, Counter[str]()
    for name in names:
        prices = Prices(name)
        for stage, cells in count(name).items():
            seconds = sum(prices.of(cell) for cell in cells)
            if cells:
                each = seconds / len(cells)
                hours = seconds / 3600
                lines.append(f"| {name} | {stage} | {len(cells)} | {each:.1f} | {hours:.2f} |")
            total += seconds / 3600
            trainings[name] += len(cells)
    lines.append(f"| all | | {trainings.total()} | | {total:.2f} |")
    return "\n".join(lines), total


def _timed(work: Callable[[], object]) -> float:
    before = cpu_seconds()
    work()
    return cpu_seconds() - before
