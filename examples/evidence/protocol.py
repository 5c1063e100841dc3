"""The protocol of docs/evidence/protocol.md as cells, stage by stage.

A stage's cells may follow from results of the one before, their number never does: `bill` counts
them before anything has run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from evidence.cells import Cell
from evidence.methods import ADAMW, BASE_RATES, METHODS, SGD, Method, powers
from evidence.tasks import TASKS, Task

TUNING_RANKS = 8
TUNING_SEEDS = (100, 101)
PAIRS = ((0.1, None), (0.3, 1.0))
OTHER_PAIRS = ((0.1, 1.0), (0.3, None))
SECOND_SEED = 4
BEST = 4
PERIODS = (1, 4, 16, 64)
# Of the rate that is best on one rank, for the range of rates that work.
MULTIPLES = powers(-2, 5)
SENSITIVE_RANKS = {"digits": (2, 8, 32), "fashion": (2, 8, 32), "text": (8, 32), "finetune": ()}
LOCAL_TASKS = ("digits", "text")
LAYERED = {"digits": 10, "fashion": 5}
FINETUNED = ("average", "adasum-gradient", "adasum-delta")

Result = Callable[[Cell], dict[str, Any]]
Stage = tuple[str, list[Cell]]


def methods_of(name: str, task: Task) -> dict[str, Method]:
    if name == "finetune":
        return {key: SGD[key] for key in FINETUNED}
    return SGD if task.family == "sgd" else ADAMW


def stages(name: str, result: Result) -> Iterator[Stage]:
    """Yield each stage's name and cells, in order; `result` is asked for cells of earlier ones."""
    task, chosen = TASKS[name](), Choices(name, result)
    yield "rates of one rank", [c for o in chosen.optimizers() for c in chosen.base_cells(o)]
    for method in methods_of(name, task):
        yield "tuning", chosen.grid(method)
        yield "tuning", chosen.rest(method)
        yield "tuning", chosen.again(method)
    yield "tuned", [cell for method in chosen.best() for cell in chosen.tuned(method)]
    yield "untuned", chosen.untuned()
    yield "unweighted", chosen.unweighted()
    yield "rates", chosen.rates()
    yield "local steps", [cell for rows in chosen.local().values() for cell in rows]
    yield "layers", [cell for cells in chosen.layers().values() for cell in cells]


class Choices:
    """What is chosen on the validation part, and the cells that follow from it."""

    def __init__(self, name: str, result: Result) -> None:
        self.name, self.task, self.result = name, TASKS[name](), result
        self.methods = methods_of(name, self.task)
        self._bases: dict[str, float] = {}
        self._settings: dict[str, tuple[Cell, float]] = {}

    def optimizers(self) -> list[str]:
        """The optimizers whose rate is tuned on one rank."""
        used = (m.optimizer for m in self.methods.values() if not m.absolute)
        return list(dict.fromkeys(used))

    def base_cells(self, optimizer: str) -> list[Cell]:
        method = self.plain(optimizer)
        return [
            Cell(self.name, method, 1, rate, seed)
            for rate in BASE_RATES[optimizer]
            for seed in TUNING_SEEDS
        ]

    def base(self, optimizer: str) -> float:
        """Return the rate of one rank that has the best mean score."""
        if optimizer not in self._bases:
            self._bases[optimizer] = self._best(self.base_cells(optimizer))[0].rate
        return self._bases[optimizer]

    def grid(self, method: str) -> list[Cell]:
        """Six rates, each plain and with long warm-up and clipping, one seed."""
        return [
            self._tuning(method, rate, pair, TUNING_SEEDS[0])
            for rate in self._rates(method)
            for pair in PAIRS
        ]

    def plain_grid(self, method: str) -> list[Cell]:
        """Those of the grid with the short warm-up and no clipping: a method over its rates."""
        return [cell for cell in self.grid(method) if (cell.warm_up, cell.clip) == PAIRS[0]]

    def rest(self, method: str) -> list[Cell]:
        """The other two pairs of warm-up and clipping, at the rate of the best of the grid."""
        rate = self._best(self.grid(method))[0].rate
        return [self._tuning(method, rate, pair, TUNING_SEEDS[0]) for pair in OTHER_PAIRS]

    def again(self, method: str) -> list[Cell]:
        """The best so far, with the second seed."""
        best = self._best(self.grid(method) + self.rest(method))[:SECOND_SEED]
        return [self._tuning(method, c.rate, (c.warm_up, c.clip), TUNING_SEEDS[1]) for c in best]

    def setting(self, method: str) -> tuple[Cell, float]:
        """Return the frozen setting of a method, and its mean score over both seeds."""
        if method in self._settings:
            return self._settings[method]
        second = self.again(method)
        first = [replace(cell, seed=TUNING_SEEDS[0]) for cell in second]
        cell = self._best(first + second)[0]
        both = [cell, replace(cell, seed=TUNING_SEEDS[1])]
        self._settings[method] = cell, self._mean(both)
        return self._settings[method]

    def best(self) -> list[str]:
        """The four methods to sweep over ranks: the best, an Average and an Adasum among them."""

        def order(method: str) -> float:
            return -self.task.better(self.setting(method)[1])

        ordered = sorted(self.methods, key=order)
        kept = [
            next(method for method in ordered if METHODS[method].label.startswith(label))
            for label in ("Average", "Adasum")
        ]
        return [*kept, *(m for m in ordered if m not in kept)][:BEST]

    def tuned(self, method: str, ranks: Sequence[int] | None = None) -> list[Cell]:
        """The frozen setting at every number of ranks, by the method's own rule for the rate."""
        cell, _ = self.setting(method)
        power = METHODS[method].power
        return [
            Cell(self.name, method, n, rate, seed, cell.warm_up, cell.clip, test=True)
            for n in ranks or self.task.ranks
            for rate in [cell.rate * (n / TUNING_RANKS) ** power]
            for seed in self.task.seeds
        ]

    def untuned_rows(self) -> dict[str, tuple[str, float]]:
        """Label, method and power of the rules that take one rank's rate to n ranks."""
        if self.task.family == "adamw":
            return {
                "Average": ("average-adamw", 0.0),
                "Average, rate × √n": ("average-adamw", 0.5),
                "Adasum of deltas": ("adasum-delta-adamw", 0.0),
            }
        rows = {
            "Average": ("average", 0.0),
            "Average, rate × n (Sum)": ("average", 1.0),
            "Adasum of deltas": ("adasum-delta", 0.0),
        }
        if self.name == "digits":
            rows["Average, rate × √n"] = ("average", 0.5)
            rows["Average, no momentum"] = ("average-m0", 0.0)
            rows["Average, rate × n (Sum), no momentum"] = ("average-m0", 1.0)
            rows["Adasum, no momentum"] = ("adasum-m0", 0.0)
        return rows

    def untuned(self) -> list[Cell]:
        """One rank's rate, by each rule at every number of ranks, and one rank itself."""
        alone = [
            Cell(self.name, self.plain(optimizer), 1, self.base(optimizer), seed, test=True)
            for optimizer in self.optimizers()
            for seed in self.task.seeds
        ]
        rows = self.untuned_rows().values()
        return alone + [
            cell
            for method, power in rows
            for n in self.task.ranks
            for cell in self.untuned_cells(method, power, n)
        ]

    def untuned_cells(self, method: str, power: float, ranks: int) -> list[Cell]:
        rate = self.base(METHODS[method].optimizer) * ranks**power
        return [Cell(self.name, method, ranks, rate, seed, test=True) for seed in self.task.seeds]

    def unweighted(self) -> list[Cell]:
        """Adasum of deltas without weights, where they make a difference: at 3 and 6 ranks."""
        method = self.delta()
        return [
            replace(cell, weighted=False)
            for n in self.task.ranks
            if n & (n - 1)
            for cell in self.untuned_cells(method, 0.0, n)
        ]

    def rates(self) -> list[Cell]:
        """Average and Adasum of deltas over a wide range of rates, on the validation part."""
        return [
            self._tuning(method, base * multiple, PAIRS[0], seed, ranks)
            for method in (self._average(), self.delta())
            for base in [self.base(METHODS[method].optimizer)]
            for ranks in SENSITIVE_RANKS[self.name]
            for multiple in MULTIPLES
            for seed in TUNING_SEEDS
        ]

    def local(self) -> dict[tuple[str, int], list[Cell]]:
        """H local steps at 8 ranks and one rank's rate, by method and H."""
        if self.name not in LOCAL_TASKS:
            return {}
        suffix = "-adamw" if self.task.family == "adamw" else ""
        rows = [self.delta(), f"average-delta{suffix}", f"nesterov{suffix}"]
        return {
            (method, period): [
                replace(cell, local_steps=period)
                for cell in self.untuned_cells(method, 0.0, TUNING_RANKS)
            ]
            for method in rows
            for period in PERIODS
        }

    def layers(self) -> dict[str, list[Cell]]:
        """Adasum of one layer's gradients and the average of all others, at 8 ranks."""
        seeds = LAYERED.get(self.name, 0)
        return {
            layer: [
                replace(cell, layers=numbers)
                for cell in self.untuned_cells("adasum-gradient", 0.0, TUNING_RANKS)[:seeds]
            ]
            for layer, numbers in (layers_of(self.task).items() if seeds else ())
        }

    def plain(self, optimizer: str) -> str:
        """The method that stands for one rank, which has nothing to reduce."""
        return {"sgd": "average-m0", "momentum": "average", "adamw": "average-adamw"}[optimizer]

    def _average(self) -> str:
        return "average" if self.task.family == "sgd" else "average-adamw"

    def delta(self) -> str:
        """Return the name of Adasum of deltas."""
        return "adasum-delta" if self.task.family == "sgd" else "adasum-delta-adamw"

    def _rates(self, method: str) -> list[float]:
        one = METHODS[method]
        base = 1.0 if one.absolute else self.base(one.optimizer)
        return [base * multiple for multiple in one.grid]

    def _tuning(
        self,
        method: str,
        rate: float,
        pair: tuple[float, float | None],
        seed: int,
        ranks: int = TUNING_RANKS,
    ) -> Cell:
        return Cell(self.name, method, ranks, rate, seed, *pair)

    def _mean(self, cells: Sequence[Cell]) -> float:
        return statistics.mean(self.result(cell)["validation"][0] for cell in cells)

    def _best(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return the cells of the first seed that there is, best mean over seeds first."""
        groups: dict[Cell, list[Cell]] = {}
        for cell in cells:
            groups.setdefault(replace(cell, seed=0), []).append(cell)
        # Ties, as of accuracies that are shares of a few hundred, go to the lower rate.
        ordered = sorted(
            groups.values(), key=lambda g: (-self.task.better(self._mean(g)), g[0].rate)
        )
        return [group[0] for group in ordered]


def layers_of(task: Task) -> dict[str, tuple[int, ...]]:
    """Return the numbers of each layer's parameters; a layer is what stands before the dot."""
    layers: dict[str, list[int]] = {}
    names = [name for name, p in task.make_model().named_parameters() if p.requires_grad]
    for i, name in enumerate(names):
        layers.setdefault(name.partition(".")[0], []).append(i)
    return {layer: tuple(numbers) for layer, numbers in layers.items()}


def of_no_results(cell: Cell) -> dict[str, Any]:
    """Stand in for any result, to count cells: how many there are follows from none."""
    return {"validation": [0.0, 0.0]}


def count(name: str) -> dict[str, list[Cell]]:
    """Return a task's cells by stage, at most: those that two stages share count in both."""
    counted: dict[str, list[Cell]] = {}
    for stage, cells in stages(name, of_no_results):
        counted.setdefault(stage, []).extend(dict.fromkeys(cells))
    return counted
