"""The plots of a task's results: one panel below the other, for a phone held upright.

The colours are Okabe and Ito's, which people of every kind of colour vision tell apart ("Color
Universal Design", 2008); markers and dashes say the same once more.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from evidence.cells import Cell
from evidence.intervals import interval
from evidence.methods import METHODS
from evidence.protocol import TUNING_RANKS
from evidence.report import Missing, Results, layer_points, rates_by_row, row_label

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter

WIDTH, DPI = 4.6, 180
# By the first word of a label: colour and marker.
STYLES = {
    "Average": ("#0072B2", "o"),
    "Adasum": ("#D55E00", "s"),
    "Sum": ("#E69F00", "^"),
    "AdaScale": ("#009E73", "D"),
    "LARS": ("#CC79A7", "v"),
    "LAMB": ("#56B4E9", "P"),
    "one": ("#000000", "X"),
}
# What labels of plain SGD end with.
PLAIN = ", no momentum"
DASHES = ("-", "--", ":", "-.", (0, (1, 3)))


def write(results: Results, folder: Path) -> list[Path]:
    """Write each plot that the results allow; return their paths."""
    written = []
    plots: dict[str, Callable[[Results], Any]] = {
        "curves": curves,
        "ranks": ranks,
        "rates": rates,
        "layers": layers,
    }
    for name, draw in plots.items():
        try:
            figure = draw(results)
        except Missing:
            continue
        if figure is not None:
            path = folder / f"{results.name}_{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            # Else labels that constrained layout does not see, beside a legend, are cut off.
            figure.savefig(path, dpi=DPI, bbox_inches="tight")
            plt.close(figure)
            written.append(path)
    return written


def curves(results: Results) -> Any:
    """Validation loss against examples and the modelled clock, at 8 ranks: two panels a table."""
    tables = {"each at its best": results.tuned_rows(), "one rank's rate": results.untuned_rows()}
    figure, panels = _panels(2 * len(tables))
    for i, (title, table) in enumerate(tables.items()):
        over_examples, over_time = panels[2 * i : 2 * i + 2]
        rows = {
            label: by_ranks[TUNING_RANKS]
            for label, by_ranks in table.items()
            if not label.endswith(PLAIN)
        }
        rows = {"one rank": results.alone(), **rows}
        styles = _styles(rows)
        for label, cells in rows.items():
            seen, losses = _mean_curve(results, cells)
            steps = [count / results.task.batch / cells[0].ranks for count in seen]
            seconds = [step * results.step_seconds(cells[0]) for step in steps]
            over_examples.plot(seen, losses, **styles[label])
            over_time.plot(seconds, losses, label=label, **styles[label])
        over_examples.set(title=title, xlabel="examples")
        over_time.set(title=title, xlabel="modelled seconds", xscale="log")
        _plain_numbers(over_time.xaxis)
        for panel in (over_examples, over_time):
            panel.set(ylabel="validation loss", yscale="log")
            _plain_numbers(panel.yaxis)
        _legend(over_time)
    return _titled(figure, f"{results.task.label}, {TUNING_RANKS} ranks")


def ranks(results: Results) -> Any:
    """Final score against ranks, where a task has several: at the best and at one rank's rate."""
    if len(results.task.ranks) < 2:
        return None
    untuned = results.untuned_rows()
    plain = {label: row for label, row in untuned.items() if label.endswith(PLAIN)}
    tables = {
        "each at its best": results.tuned_rows(),
        "one rank's rate": {label: row for label, row in untuned.items() if label not in plain},
        f"one rank's rate{PLAIN}": {label.removesuffix(PLAIN): row for label, row in plain.items()},
    }
    tables = {title: rows for title, rows in tables.items() if rows}
    figure, panels = _panels(len(tables))
    for panel, (title, rows) in zip(panels, tables.items(), strict=True):
        alone = interval(results.scores(results.alone("Average" + PLAIN * title.endswith(PLAIN))))
        styles = _styles(rows)
        for i, (label, by_ranks) in enumerate(rows.items()):
            found = [interval(results.scores(cells)) for cells in by_ranks.values()]
            # Side by side, so that no bar hides another.
            places = [n * (1 + 0.02 * (i - len(rows) / 2)) for n in by_ranks]
            means, halves = [f.mean for f in found], [f.half for f in found]
            panel.errorbar(places, means, halves, capsize=2, label=label, **styles[label])
        panel.axhspan(alone.low, alone.high, color="#000000", alpha=0.12, label="one rank")
        panel.set(title=title, xscale="log", xlabel="ranks", ylabel=f"test {results.task.score}")
        panel.set_xticks(results.task.ranks, [str(n) for n in results.task.ranks])
        panel.minorticks_off()
        _legend(panel)
    return _titled(figure, results.task.label)


def rates(results: Results) -> Any:
    """Score against the multiple of one rank's rate, a panel a number of ranks.

    The last panel has all methods at 8 ranks, against the multiple of the best rate of each.
    """
    cells = results.choices.rates()
    if not cells:
        return None
    counts = list(dict.fromkeys(cell.ranks for cell in cells))
    figure, (*panels, last) = _panels(len(counts) + 1)
    rows = rates_by_row(cells)
    styles = _styles(dict.fromkeys(row_label(method, clip) for method, clip, _ in rows))
    for panel, n in zip(panels, counts, strict=True):
        for method, clip in ((m, c) for m, c, count in rows if count == n):
            base, label = results.choices.base(METHODS[method].optimizer), row_label(method, clip)
            points = [
                (rate / base, statistics.mean(results.scores(group)))
                for rate, group in rows[method, clip, n].items()
            ]
            panel.plot(*zip(*points, strict=True), label=label, **styles[label])
        panel.axhline(results.target(), color="#000000", linewidth=0.8, linestyle=":")
        panel.set(title=f"{n} ranks", xscale="log", ylabel=f"validation {results.task.score}")
        panel.set_xticks([x for x, _ in points], [f"{x:g}" for x, _ in points])
        panel.minorticks_off()
    panels[-1].set_xlabel("multiple of one rank's rate")
    # Only the panel of 8 ranks has every row.
    _legend(panels[-1], panels[counts.index(TUNING_RANKS)])
    all_styles = _styles(method.label for method in results.choices.methods.values())
    for name, method in results.choices.methods.items():
        grid = results.choices.plain_grid(name)
        scores = results.scores(grid)
        best = grid[scores.index(max(scores, key=results.task.better))].rate
        multiples = [cell.rate / best for cell in grid]
        last.plot(multiples, scores, label=method.label, **all_styles[method.label])
    last.set(title=f"all at {TUNING_RANKS} ranks, one seed", xscale="log")
    last.set(xlabel="multiple of its best rate", ylabel=f"validation {results.task.score}")
    _plain_numbers(last.xaxis)
    _legend(last)
    return _titled(figure, results.task.label)


def layers(results: Results) -> Any:
    """What Adasum of one layer alone gains, against how orthogonal its gradients are."""
    points = layer_points(results)
    if not points:
        return None
    figure, (panel,) = _panels(1)
    colour, marker = STYLES["Adasum"]
    for layer, (ratio, gain) in points.items():
        panel.errorbar(ratio, gain.mean, gain.half, color=colour, marker=marker, capsize=2)
        panel.annotate(layer, (ratio, gain.mean), xytext=(4, 4), textcoords="offset points")
    panel.axhline(0.0, color="#000000", linewidth=0.8)
    panel.set(xlabel="|Adasum|² / sum of |g|², mean", ylabel=f"gain in test {results.task.score}")
    return _titled(figure, f"{results.task.label}: Adasum of one layer")


def _mean_curve(results: Results, cells: Sequence[Cell]) -> tuple[list[int], list[float]]:
    """Return examples and mean validation loss; after a training diverged, its loss is chance's."""
    looks = [results(cell)["looks"] for cell in cells]
    longest = max(looks, key=len)
    seen = [look[0] for look in longest]
    chance = results.task.chance[1]
    losses = [
        statistics.mean(own[i][2] if i < len(own) else chance for own in looks)
        for i in range(len(seen))
    ]
    return seen, losses


def _styles(labels: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Give each label its word's colour and marker, and a dash of its own among these.

    In the order of their letters, so that a method looks alike in every panel of a task.
    """
    styles: dict[str, dict[str, Any]] = {}
    met: Counter[str] = Counter()
    for label in sorted(labels):
        word = label.split(",")[0].split()[0]
        colour, marker = STYLES[word]
        styles[label] = {
            "color": colour,
            "marker": marker,
            "markersize": 4.5,
            "markerfacecolor": colour if met[word] == 0 else "white",
            "linestyle": DASHES[met[word] % len(DASHES)],
            "linewidth": 1.4,
        }
        met[word] += 1
    return styles


def _panels(count: int) -> tuple[Any, Sequence[Any]]:
    size = (WIDTH, 1.2 + 3.4 * count)
    figure, panels = plt.subplots(count, 1, figsize=size, squeeze=False, layout="constrained")
    return figure, panels[:, 0]


def _legend(panel: Any, drawn: Any = None) -> None:
    """Put below `panel` the legend of `drawn`, by default its own, where it hides nothing."""
    handles, labels = (drawn or panel).get_legend_handles_labels()
    place = {"loc": "upper center", "bbox_to_anchor": (0.45, -0.18)}
    panel.legend(handles, labels, fontsize=8, frameon=False, **place)


def _plain_numbers(axis: Any) -> None:
    """Mark 1, 2 and 5 times the powers of ten of a logarithmic axis, without exponents."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def _titled(figure: Any, title: str) -> Any:
    figure.suptitle(title)
    return figure
