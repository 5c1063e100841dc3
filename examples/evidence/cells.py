"""A cell: one training, all that it depends on, and its result."""

from __future__ import annotations

import math
import resource
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from evidence.methods import METHODS, make_optimizer
from evidence.optimizers import AdaScale, OuterNesterov, noise
from evidence.ranks import Ranks, Reduction
from evidence.tasks import TASKS, TEST, VALIDATION, Task


@dataclass(frozen=True)
class Cell:
    """One training.

    Attributes:
        task: A name of TASKS.
        method: A name of METHODS.
        ranks: Simulated ranks.
        rate: Largest learning rate of the schedule.
        seed: Of the first weights and the batches.
        warm_up: Share of the steps over which the rate rises from zero; then it falls to zero.
        clip: Longest gradient, or none.
        test: Whether the test part is looked at, after the last step.
        weighted: Adasum's weights.
        local_steps: Steps of each rank by itself between two reductions, of the delta method.
        layers: The parameters that Adasum reduces, all if None.
    """

    task: str
    method: str
    ranks: int
    rate: float
    seed: int
    warm_up: float = 0.1
    clip: float | None = None
    test: bool = False
    weighted: bool = True
    local_steps: int = 1
    layers: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """Name the cell as the command line and its file do."""
        parts = [self.method, f"n{self.ranks}", f"r{self.rate:.6g}", f"w{self.warm_up:g}"]
        parts += [f"c{self.clip:g}"] if self.clip is not None else []
        parts += [f"H{self.local_steps}"] if self.local_steps > 1 else []
        parts += [] if self.weighted else ["unweighted"]
        parts += ["l" + "+".join(map(str, self.layers))] if self.layers is not None else []
        parts += [f"s{self.seed}", "test"] if self.test else [f"s{self.seed}"]
        return f"{self.task}/{'_'.join(parts)}"


def schedule(step: int, steps: int, warm_up: float) -> float:
    """Return the factor on the rate: linearly up, then linearly down to zero."""
    warm = max(1.0, warm_up * steps)
    return min((step + 1) / warm, (steps - step) / max(1.0, steps - warm), 1.0)


def make_ranks(cell: Cell, task: Task) -> Ranks:
    """Seed torch's generator and make the cell's model and ranks."""
    method = METHODS[cell.method]
    torch.manual_seed(cell.seed)
    return Ranks(
        task.make_model(),
        lambda parameters: make_optimizer(method.optimizer, parameters),
        cell.ranks,
        Reduction(method.op, method.kind, weighted=cell.weighted, layers=cell.layers),
        clip=cell.clip,
        gain=AdaScale() if method.gain else None,
        outer=OuterNesterov() if cell.method.startswith("nesterov") else None,
    )


def train(cell: Cell) -> dict[str, Any]:
    """Return the cell's result; the same on every run on one kind of machine, but for seconds."""
    # How many threads share a sum is part of its bits.
    torch.set_num_threads(1)
    started = cpu_seconds()
    task = TASKS[cell.task]()
    ranks, loss_of = make_ranks(cell, task), task.losses(cell.seed)
    steps = task.batches // cell.ranks
    rates = [cell.rate * schedule(step, steps, cell.warm_up) for step in range(steps)]
    looks_at = {math.ceil(steps * k / task.looks) for k in range(1, task.looks + 1)}
    batch_seconds, looks, records = [0.0], [], []

    def loss_at(step: int) -> Callable[[nn.Module, int], torch.Tensor]:
        return lambda model, rank: loss_of(model, step * cell.ranks + rank)

    step, finite = 0, True
    while step < steps and finite:
        # A period ends at the last step, whatever is left of it.
        period = min(cell.local_steps, steps - step)
        before = cpu_seconds()
        if cell.local_steps > 1:
            losses = [loss_at(step + i) for i in range(period)]
            loss = ranks.local_steps(losses, rates[step : step + period])
        else:
            loss = ranks.step(loss_at(step), rates[step])
        batch_seconds[0] += cpu_seconds() - before
        due = any(step < at <= step + period for at in looks_at)
        step += period
        finite = math.isfinite(loss) and bool(ranks.flat.isfinite().all())
        if due and finite:
            score, loss = task.evaluate(ranks.model, VALIDATION)
            looks.append([step * cell.ranks * task.batch, _digits(score), _digits(loss)])
            records.append(_record(ranks))
    at_end = looks[-1][1:] if finite else [_digits(value) for value in task.chance]
    test = None
    if cell.test:
        pair = task.evaluate(ranks.model, TEST) if finite else task.chance
        test = [_digits(value) for value in pair]
    return {
        "cell": asdict(cell),
        "steps": step,
        "diverged": not finite,
        "looks": looks,
        "validation": at_end,
        "test": test,
        **_summary(cell, records),
        "seconds_a_batch": _digits(batch_seconds[0] / (step * cell.ranks)),
        "seconds": round(cpu_seconds() - started, 2),
    }


def _record(ranks: Ranks) -> dict[str, Any]:
    """Return the last step's |reduced|^2 / sum of |row|^2 of each parameter, and its noise."""
    rows, cuts = ranks.rows, list(zip(ranks.bounds, ranks.bounds[1:], strict=False))
    own = [rows[:, low:high].square().sum().item() for low, high in cuts]
    both = [ranks.reduced[low:high].square().sum().item() for low, high in cuts]
    ratios = [_digits(b / o) if o else None for b, o in zip(both, own, strict=True)]
    pair = noise(rows) if len(rows) > 1 else (0.0, 0.0)
    return {"ratios": ratios, "noise": [_digits(value) for value in pair]}


def _summary(cell: Cell, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Keep each layer's orthogonality of Adasum at 8 ranks, and gradients' noise, by look."""
    kept: dict[str, Any] = {}
    method = METHODS[cell.method]
    if method.op == "adasum" and cell.ranks == 8 and cell.test:
        kept["ratios"] = [record["ratios"] for record in records]
    if method.kind == "gradient" and cell.ranks > 1:
        kept["noise"] = [record["noise"] for record in records]
    return kept


def _digits(value: float) -> float:
    """Round to six digits, which say all and compare as text."""
    return float(f"{value:.6g}")


def cpu_seconds() -> float:
    """Return this process's CPU time: other processes' work does not count."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
