"""The tables of a task's results: every seed, every interval, and the cells behind each row."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from evidence.cells import Cell
from evidence.intervals import interval, paired, verdict
from evidence.methods import METHODS
from evidence.protocol import PERIODS_OF, RETUNING_RANKS, TUNING_RANKS, Choices, Untuned
from evidence.store import Store
from evidence.tasks import Task
from evidence.wall_clock import seconds_a_step


class Missing(Exception):
    """A cell that a table needs has not been run."""


class Results:
    """A task's results on disk, by cell.

    Args:
        name: The task.
        store: The results there are.
    """

    def __init__(self, name: str, store: Store) -> None:
        self.name, self._store = name, store
        self.choices = Choices(name, self)
        self.task = self.choices.task

    def __call__(self, cell: Cell) -> dict[str, Any]:
        result = self._store.named(cell.name)
        if result is None:
            raise Missing(cell.name)
        return result

    def scores(self, cells: Sequence[Cell]) -> list[float]:
        """Return the final scores, of the test part where it was looked at."""
        return [(self(cell)["test"] or self(cell)["validation"])[0] for cell in cells]

    def alone(self, label: str = "Average") -> list[Cell]:
        """One rank with the optimizer of that untuned row; with momentum for tuned rows."""
        row = self.choices.untuned_rows().get(label) or self.choices.untuned_rows()["Average"]
        method = self.choices.plain(METHODS[row.method].optimizer)
        return self.choices.untuned_cells(Untuned(method), 1)

    def tuned_rows(self) -> dict[str, dict[int, list[Cell]]]:
        """The best four methods' cells, by label and ranks."""
        return {
            METHODS[method].label: _by_ranks(self.choices.tuned(method))
            for method in self.choices.best()
        }

    def retuned_rows(self) -> dict[str, dict[int, list[Cell]]]:
        """The same methods, tuned anew at 32 ranks; none where a task has no 32."""
        if RETUNING_RANKS not in self.task.ranks:
            return {}
        return {
            METHODS[method].label: {RETUNING_RANKS: self.choices.retuned(method)}
            for method in self.choices.best()
        }

    def untuned_rows(self) -> dict[str, dict[int, list[Cell]]]:
        return {
            label: {
                n: self.choices.untuned_cells(row, n) for n in self.choices.untuned_ranks(label)
            }
            for label, row in self.choices.untuned_rows().items()
            if self.choices.untuned_ranks(label)
        }

    def batch_seconds(self) -> float:
        """Return the median CPU seconds of a batch on one rank."""
        return statistics.median(self(cell)["seconds_a_batch"] for cell in self.alone())

    def step_seconds(self, cell: Cell) -> float:
        sizes = [p.numel() for p in self.task.make_model().parameters() if p.requires_grad]
        return seconds_a_step(cell, self.batch_seconds(), sizes)

    def target(self) -> float:
        """Return one rank's mean validation score at the end, a twentieth of the way to chance."""
        scores = [self(cell)["validation"][0] for cell in self.alone()]
        return statistics.mean(scores) * 0.95 + self.task.chance[0] * 0.05

    def examples_to_target(self, cell: Cell) -> int | None:
        """Return how many examples had been seen when a look first had the target."""
        goal = self.task.better(self.target())
        looks = self(cell)["looks"]
        return next((look[0] for look in looks if self.task.better(look[1]) >= goal), None)


def page(results: Results) -> str:
    """Return all tables of a task that its results allow; the others say which cell is missing."""
    parts = [
        f"# Results: {results.task.label}",
        f"Scores: {results.task.score}. ± is half of a 95 % interval.",
    ]
    for title, make in (
        ("Rates of one rank", base_table),
        ("Tuning at 8 ranks", tuning_table),
        ("Rivals at their best", lambda r: sweep_table(r, r.tuned_rows())),
        ("Tuning at 32 ranks", retuning_table),
        ("Rivals tuned at 32 ranks", lambda r: sweep_table(r, r.retuned_rows())),
        ("One rank's rate", lambda r: sweep_table(r, r.untuned_rows())),
        ("One rank's rate against rivals at their best", untuned_table),
        ("To the target", target_table),
        ("Noise", noise_table),
        ("Weights", weights_table),
        ("The range of rates", rates_table),
        ("Local steps", local_table),
        ("Layers", layers_table),
    ):
        try:
            body = "\n".join(make(results))
        except Missing as missing:
            body = f"Not run yet: {missing}"
        if body:
            parts += [f"## {title}", body]
    return "\n\n".join(parts) + "\n"


def base_table(results: Results) -> Iterator[str]:
    yield from _head("optimizer", "rate", "mean score", "chosen")
    for optimizer in results.choices.optimizers():
        cells = results.choices.base_cells(optimizer)
        for rate in dict.fromkeys(cell.rate for cell in cells):
            values = results.scores([cell for cell in cells if cell.rate == rate])
            chosen = "yes" if rate == results.choices.base(optimizer) else ""
            yield f"| {optimizer} | {rate:.6g} | {statistics.mean(values):.4f} | {chosen} |"


def tuning_table(results: Results) -> Iterator[str]:
    choices = results.choices
    tried = {method: choices.first(method) for method in choices.methods}
    yield from _tuning(results, tried)


def retuning_table(results: Results) -> Iterator[str]:
    choices = results.choices
    if RETUNING_RANKS in results.task.ranks:
        yield from _tuning(results, {method: choices.regrid(method) for method in choices.best()})


def _tuning(results: Results, tried: dict[str, list[Cell]]) -> Iterator[str]:
    yield from _head("method", "rate", "warm-up", "clip", "score by seed", "chosen")
    for method, first in tried.items():
        frozen, _ = results.choices.settle(first)
        cells = [*first, *results.choices.again(first)]
        groups: dict[tuple[Any, ...], list[Cell]] = {}
        for cell in cells:
            groups.setdefault((cell.rate, cell.warm_up, cell.clip), []).append(cell)
        for (rate, warm_up, clip), group in groups.items():
            chosen = ""
            if (frozen.rate, frozen.warm_up, frozen.clip) == (rate, warm_up, clip):
                rates = [cell.rate for cell in cells]
                chosen = "yes, at the edge" if rate in (min(rates), max(rates)) else "yes"
            scores = _listed(results.scores(group))
            label = METHODS[method].label
            yield f"| {label} | {rate:.6g} | {warm_up:g} | {clip} | {scores} | {chosen} |"


def sweep_table(results: Results, rows: dict[str, dict[int, list[Cell]]]) -> Iterator[str]:
    """Yield a row a method and number of ranks, beside Adasum of the same table, seed by seed."""
    adasum = next((label for label in rows if label.startswith("Adasum")), None)
    if adasum is None:
        return
    names = ("score", "less one rank", "shown", f"less {adasum}", "shown", "every seed", "cells")
    yield from _head("ranks", "method", *names)
    for alone in {tuple(results.alone(label)): None for label in rows}:
        label = f"one rank: {METHODS[alone[0].method].label}"
        yield f"| 1 | {label} | {_pm(results.scores(alone))} | | | | | {_row_end(results, alone)}"
    for n in results.task.ranks:
        for label in (label for label, by_ranks in rows.items() if n in by_ranks):
            cells, theirs = rows[label][n], rows[adasum][n]
            one_rank = results.alone(label)
            beside = "| " if cells == theirs else _beside(results, cells, theirs)
            yield (
                f"| {n} | {label} | {_pm(results.scores(cells))} "
                f"| {_beside(results, cells, one_rank)} | {beside} | {_row_end(results, cells)}"
            )


def untuned_table(results: Results) -> Iterator[str]:
    """Yield what Adasum has without tuning, less what each of the best has with it."""
    tuned = results.tuned_rows()
    yield from _head("ranks", "one rank's rate", "at its best", "difference", "shown")
    for label, by_ranks in results.untuned_rows().items():
        if label.startswith("Adasum"):
            for n, cells in by_ranks.items():
                for rival, theirs in tuned.items():
                    yield f"| {n} | {label} | {rival} | {_beside(results, cells, theirs[n])} |"


def target_table(results: Results) -> Iterator[str]:
    yield f"The target is {results.target():.4f} on the validation part.\n"
    yield from _head("panel", "ranks", "method", "seeds there", "examples", "modelled seconds")
    panels = (("best", results.tuned_rows()), ("untuned", results.untuned_rows()))
    for panel, rows in panels:
        for n in results.task.ranks:
            for label in (label for label, by_ranks in rows.items() if n in by_ranks):
                cells = rows[label][n]
                seen = [examples for c in cells if (examples := results.examples_to_target(c))]
                row = f"| {panel} | {n} | {label} | {len(seen)} of {len(cells)} |"
                if seen:
                    examples = statistics.mean(seen)
                    steps = examples / results.task.batch / n
                    row += f" {examples:.0f} | {steps * results.step_seconds(cells[0]):.2f} |"
                else:
                    row += " | |"
                yield row


def noise_table(results: Results) -> Iterator[str]:
    """Yield the simple noise scale, variance / squared gradient, beside the batch of all ranks.

    Both are means over looks and seeds, of Average at one rank's rate, before they are divided: a
    quotient of single steps is mostly their own noise. Source: arXiv 1812.06162.
    """
    yield from _head("ranks", "examples a step", "noise scale, examples", "past it")
    for n, cells in results.untuned_rows()["Average"].items():
        pairs = [pair for cell in cells for pair in results(cell)["noise"]]
        variance, square = (statistics.mean(column) for column in zip(*pairs, strict=True))
        scale = results.task.batch * variance / square if square > 0 else math.inf
        step = n * results.task.batch
        yield f"| {n} | {step} | {scale:.0f} | {'yes' if step > scale else ''} |"


def weights_table(results: Results) -> Iterator[str]:
    plain = results.choices.unweighted()
    if not plain:
        return
    yield from _head("ranks", "weighted", "unweighted", "difference", "shown")
    rows = results.untuned_rows()["Adasum of deltas"]
    for n, cells in _by_ranks(plain).items():
        with_ = rows[n]
        yield (
            f"| {n} | {_pm(results.scores(with_))} | {_pm(results.scores(cells))} "
            f"| {_beside(results, with_, cells)} |"
        )


def rates_table(results: Results) -> Iterator[str]:
    cells = results.choices.rates()
    if not cells:
        return
    yield from _head(
        "method", "ranks", "rate", "of one rank's", "score by seed", "works", "has the target"
    )
    target = results.task.better(results.target())
    rows = rates_by_row(cells)
    # The other methods at 8 ranks: the plain trainings of their grids.
    for method in results.choices.methods:
        if (method, None, TUNING_RANKS) not in rows:
            grid = results.choices.plain_grid(method)
            rows[method, None, TUNING_RANKS] = {cell.rate: [cell] for cell in grid}
    for (method, clip, n), by_rate in rows.items():
        one, label = METHODS[method], row_label(method, clip)
        means = {rate: statistics.mean(results.scores(group)) for rate, group in by_rate.items()}
        good = working(results.task, means)
        for rate, group in by_rate.items():
            of_one = "" if one.absolute else f"{rate / results.choices.base(one.optimizer):g}"
            marks = rate in good, results.task.better(means[rate]) >= target
            works, has_it = ("yes" if mark else "" for mark in marks)
            yield (
                f"| {label} | {n} | {rate:.6g} | {of_one} | {_listed(results.scores(group))} "
                f"| {works} | {has_it} |"
            )


def local_table(results: Results) -> Iterator[str]:
    rows = results.choices.local()
    if not rows:
        return
    adasum = results.choices.delta()
    less = f"less {METHODS[adasum].label}"
    yield from _head(
        "H", "method", "of one rank's rate", "score", less, "shown", "every seed", "cells"
    )
    for period in PERIODS_OF[results.name]:
        theirs = rows[adasum, period]
        for method in dict.fromkeys(method for method, _ in rows):
            cells = rows[method, period]
            beside = "| " if cells == theirs else _beside(results, cells, theirs)
            of_one = f"{cells[0].rate / results.choices.base(METHODS[method].optimizer):g}"
            yield (
                f"| {period} | {METHODS[method].label} | {of_one} | {_pm(results.scores(cells))} "
                f"| {beside} | {_row_end(results, cells)}"
            )


def layers_table(results: Results) -> Iterator[str]:
    points = layer_points(results)
    if not points:
        return
    yield from _head("layer", "mean orthogonality", "gain of Adasum there alone")
    for layer, (ratio, gain) in points.items():
        yield f"| {layer} | {ratio:.3f} | {gain.mean:+.4f} ± {gain.half:.4f} |"


def layer_points(results: Results) -> dict[str, tuple[float, Any]]:
    """Return each layer's mean orthogonality under Adasum, and what Adasum there alone gains."""
    points = {}
    for layer, cells in results.choices.layers().items():
        whole, plain = (
            results.choices.untuned_cells(Untuned(method), TUNING_RANKS)[: len(cells)]
            for method in ("adasum-gradient", "average")
        )
        ratios = [
            look[i]
            for cell in whole
            for look in results(cell)["ratios"]
            for i in cells[0].layers
            if look[i] is not None
        ]
        gain = paired(results.scores(cells), results.scores(plain))
        points[layer] = (statistics.mean(ratios), gain)
    return points


def working(task: Task, scores: dict[float, float]) -> set[float]:
    """Return the rates whose score is within a twentieth, of the way from guessing, of the best."""
    best = max(scores.values(), key=task.better)
    least = best + 0.05 * (task.chance[0] - best)
    return {rate for rate, score in scores.items() if task.better(score) >= task.better(least)}


def row_label(method: str, clip: float | None) -> str:
    return METHODS[method].label + (", clipped" if clip else "")


def rates_by_row(
    cells: Sequence[Cell],
) -> dict[tuple[str, float | None, int], dict[float, list[Cell]]]:
    """Return the cells by (method, clip, ranks), then by rate."""
    rows: dict[tuple[str, float | None, int], dict[float, list[Cell]]] = {}
    for cell in cells:
        row = rows.setdefault((cell.method, cell.clip, cell.ranks), {})
        row.setdefault(cell.rate, []).append(cell)
    return rows


def _by_ranks(cells: Sequence[Cell]) -> dict[int, list[Cell]]:
    groups: dict[int, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.ranks, []).append(cell)
    return groups


def _head(*names: str) -> tuple[str, str]:
    return f"| {' | '.join(names)} |", "|---" * len(names) + "|"


def _pm(scores: Sequence[float]) -> str:
    found = interval(scores)
    return f"{found.mean:.4f} ± {found.half:.4f}"


def _beside(results: Results, cells: Sequence[Cell], theirs: Sequence[Cell]) -> str:
    """Return the difference seed by seed and what it shows, as two columns."""
    beside = paired(results.scores(cells), results.scores(theirs))
    return f"{beside.mean:+.4f} ± {beside.half:.4f} | {verdict(beside, results.task.score)}"


def _listed(scores: Sequence[float]) -> str:
    return " ".join(f"{score:.4f}" for score in scores)


def _row_end(results: Results, cells: Sequence[Cell]) -> str:
    """List every seed's score, and the name of the first cell, which --check takes."""
    return f"{_listed(results.scores(cells))} | `{cells[0].name}` |"
