"""The protocol of docs/evidence/protocol.md as cells, stage by stage.

A stage's cells may follow from results of the one before, their number never does: `bill` counts
them before anything has run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from evidence.cells import Cell
from evidence.methods import ADAMW, BASE_RATES, LOCAL_GRIDS, METHODS, SGD, Method, powers
from evidence.tasks import TASKS, Task

TUNING_RANKS = 8
TUNING_SEEDS = (100, 101)
PAIRS = ((0.1, None), (0.3, 1.0))
CLIP = 1.0
OTHER_PAIRS = ((0.1, 1.0), (0.3, None))
SECOND_SEED = 4
BEST = 4
# At so many ranks the best methods are tuned again, about the rate that their rule gives there.
RETUNING_RANKS, RETUNING_MULTIPLES = 32, powers(-4, 2)
# Of one rank: pretrained weights take lower ones than those of BASE_RATES.
FINETUNING_RATES = powers(-13, -8)
# Of the rate that is best on one rank, for the range of rates that work.
MULTIPLES = powers(-2, 5)
SENSITIVE_RANKS = {"digits": (2, 8, 32), "fashion": (2, 8, 32), "text": (8, 32), "finetune": ()}
# Of the text H = 1 is in the other tables.
PERIODS_OF = {"digits": (1, 4, 16, 64), "text": (4, 16, 64)}
LOCAL_SEEDS = {"digits": TUNING_SEEDS, "text": TUNING_SEEDS[:1]}
LAYERED = {"digits": 10, "fashion": 5}
FINETUNED = ("average", "adasum-gradient", "adasum-delta")

# Rows that were added have these numbers of ranks alone where a training is dear.
FEW_RANKS = {"text": (8, 32), "finetune": ()}

Result = Callable[[Cell], dict[str, Any]]
Stage = tuple[str, list[Cell]]


@dataclass(frozen=True)
class Untuned:
    """One rank's rate at n ranks, by a rule: times n to this power, and maybe clipped."""

    method: str
    power: float = 0.0
    clip: float | None = None


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
        yield "tuning", chosen.again(chosen.first(method))
    yield "tuned", [cell for method in chosen.best() for cell in chosen.tuned(method)]
    if RETUNING_RANKS in task.ranks:
        for method in chosen.best():
            yield "retuning", chosen.regrid(method)
            yield "retuning", chosen.again(chosen.regrid(method))
        yield "retuned", [cell for method in chosen.best() for cell in chosen.retuned(method)]
    yield "untuned", chosen.untuned()
    yield "unweighted", chosen.unweighted()
    yield "rates", chosen.rates()
    yield "local steps", [cell for cells in chosen.local_grids().values() for cell in cells]
    yield "local steps", [cell for cells in chosen.local().values() for cell in cells]
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
            for rate in (FINETUNING_RATES if self.name == "finetune" else BASE_RATES[optimizer])
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

    def first(self, method: str) -> list[Cell]:
        """Return a method's tuning cells of the first seed."""
        return self.grid(method) + self.rest(method)

    def again(self, tried: Sequence[Cell]) -> list[Cell]:
        """Return the best cells of `tried`, whose seed is the first, with the second seed."""
        return [replace(cell, seed=TUNING_SEEDS[1]) for cell in self._best(tried)[:SECOND_SEED]]

    def settle(self, tried: Sequence[Cell]) -> tuple[Cell, float]:
        """Return the cell with the best mean over both seeds, and that mean."""
        second = self.again(tried)
        cell = self._best([replace(cell, seed=TUNING_SEEDS[0]) for cell in second] + second)[0]
        return cell, self._mean([cell, replace(cell, seed=TUNING_SEEDS[1])])

    def setting(self, method: str) -> tuple[Cell, float]:
        """Return the frozen setting of a method, and its mean score over both seeds."""
        if method not in self._settings:
            self._settings[method] = self.settle(self.first(method))
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
        return [
            replace(cell, seed=seed, test=True)
            for n in ranks or self.task.ranks
            for cell in [self._at(method, n)]
            for seed in self.task.seeds
        ]

    def regrid(self, method: str) -> list[Cell]:
        """Return rates about the rule's at 32 ranks, with the frozen pair and one that clips."""
        cell = self._at(method, RETUNING_RANKS)
        frozen = cell.warm_up, cell.clip
        other = next(pair for pair in ((0.1, CLIP), (0.3, CLIP)) if pair != frozen)
        return [
            self._tuning(method, cell.rate * multiple, pair, TUNING_SEEDS[0], RETUNING_RANKS)
            for multiple in RETUNING_MULTIPLES
            for pair in (frozen, other)
        ]

    def retuned(self, method: str) -> list[Cell]:
        """Return the final trainings of the best cell of `regrid`."""
        cell, _ = self.settle(self.regrid(method))
        return [replace(cell, seed=seed, test=True) for seed in self.task.seeds]

    def _at(self, method: str, ranks: int) -> Cell:
        """Return the frozen setting at so many ranks, by the method's own rule for the rate."""
        cell, _ = self.setting(method)
        rate = cell.rate * (ranks / TUNING_RANKS) ** METHODS[method].power
        return replace(cell, ranks=ranks, rate=rate)

    def untuned_rows(self) -> dict[str, Untuned]:
        """The rules that take one rank's rate to n ranks, by label."""
        if self.task.family == "adamw":
            return {
                "Average": Untuned("average-adamw"),
                "Average, rate × √n": Untuned("average-adamw", 0.5),
                "Adasum of deltas": Untuned("adasum-delta-adamw"),
                "Average, rate × √n, clipped": Untuned("average-adamw", 0.5, CLIP),
                "Adasum of gradients": Untuned("adasum-gradient-adamw"),
            }
        rows = {
            "Average": Untuned("average"),
            "Average, rate × n (Sum)": Untuned("average", 1.0),
            "Adasum of deltas": Untuned("adasum-delta"),
            "Average, rate × n, clipped": Untuned("average", 1.0, CLIP),
            "Adasum of gradients": Untuned("adasum-gradient"),
        }
        if self.name == "digits":
            rows["Average, rate × √n"] = Untuned("average", 0.5)
            rows["Average, no momentum"] = Untuned("average-m0")
            rows["Average, rate × n (Sum), no momentum"] = Untuned("average-m0", 1.0)
            rows["Adasum, no momentum"] = Untuned("adasum-m0")
        return rows

    def untuned_ranks(self, label: str) -> tuple[int, ...]:
        """Return the numbers of ranks of a row: few where it was added and is dear."""
        added = label.endswith("clipped") or label == "Adasum of gradients"
        return FEW_RANKS.get(self.name, self.task.ranks) if added else self.task.ranks

    def untuned(self) -> list[Cell]:
        """One rank's rate, by each rule at its numbers of ranks, and one rank itself."""
        alone = [
            cell
            for optimizer in self.optimizers()
            for cell in self.untuned_cells(Untuned(self.plain(optimizer)), 1)
        ]
        return alone + [
            cell
            for label, row in self.untuned_rows().items()
            for n in self.untuned_ranks(label)
            for cell in self.untuned_cells(row, n)
        ]

    def untuned_cells(self, row: Untuned, ranks: int) -> list[Cell]:
        rate = self.base(METHODS[row.method].optimizer) * ranks**row.power
        return [
            Cell(self.name, row.method, ranks, rate, seed, clip=row.clip, test=True)
            for seed in self.task.seeds
        ]

    def unweighted(self) -> list[Cell]:
        """Adasum of deltas without weights, where they make a difference: at 3 and 6 ranks."""
        return [
            replace(cell, weighted=False)
            for n in self.task.ranks
            if n & (n - 1)
            for cell in self.untuned_cells(Untuned(self.delta()), n)
        ]

    def rates(self) -> list[Cell]:
        """The main methods over a wide range of rates, on the validation part."""
        suffix = self._suffix()
        main = ((self._average(), None), (self.delta(), None))
        added = ((self._average(), CLIP), (f"adasum-gradient{suffix}", None))
        counts = SENSITIVE_RANKS[self.name]
        few = {"digits": counts, "fashion": (TUNING_RANKS,)}.get(self.name, ())
        return [
            self._tuning(method, base * multiple, (PAIRS[0][0], clip), seed, ranks)
            for rows, all_ranks in ((main, counts), (added, few))
            for method, clip in rows
            for base in [self.base(METHODS[method].optimizer)]
            for ranks in all_ranks
            for multiple in MULTIPLES
            for seed in TUNING_SEEDS
        ]

    def local_grids(self) -> dict[tuple[str, int], list[Cell]]:
        """The rates to tune H local steps among at 8 ranks, by method and H."""
        suffix, periods = self._suffix(), PERIODS_OF.get(self.name, ())
        return {
            (method, period): [
                replace(self._tuning(method, base * multiple, PAIRS[0], seed), local_steps=period)
                for base in [self.base(METHODS[method].optimizer)]
                for multiple in LOCAL_GRIDS[METHODS[method].optimizer]
                for seed in LOCAL_SEEDS[self.name]
            ]
            for method in (self.delta(), f"average-delta{suffix}", f"nesterov{suffix}")
            for period in periods
        }

    def local(self) -> dict[tuple[str, int], list[Cell]]:
        """H local steps at 8 ranks and the rate that was best for this method and H."""
        return {
            key: [replace(self._best(grid)[0], seed=seed, test=True) for seed in self.task.seeds]
            for key, grid in self.local_grids().items()
        }

    def layers(self) -> dict[str, list[Cell]]:
        """Adasum of one layer's gradients and the average of all others, at 8 ranks."""
        seeds = LAYERED.get(self.name, 0)
        return {
            layer: [
                replace(cell, layers=numbers)
                for cell in self.untuned_cells(Untuned("adasum-gradient"), TUNING_RANKS)[:seeds]
            ]
            for layer, numbers in (layers_of(self.task).items() if seeds else ())
        }

    def plain(self, optimizer: str) -> str:
        """The method that stands for one rank, which has nothing to reduce."""
        return {"sgd": "average-m0", "momentum": "average", "adamw": "average-adamw"}[optimizer]

    def _suffix(self) -> str:
        return "" if self.task.family == "sgd" else "-adamw"

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
