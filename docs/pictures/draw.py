"""Draw the pictures in this folder; `python docs/pictures/draw.py` writes all of them again.

The messages are what `collectives.schedule(...).draw()` makes of the schedules that run, the
results of the pairs come from `kernels.adasum`, and the accuracies from docs/evidence/results:
nothing is drawn by hand.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import matplotlib
import torch

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER.parents[1]), str(FOLDER.parents[1] / "examples")]

from evidence.intervals import interval  # noqa: E402
from evidence.report import Results  # noqa: E402
from evidence.store import Store  # noqa: E402

import collectives  # noqa: E402
import kernels  # noqa: E402
from collectives import Schedule  # noqa: E402
from collectives.schedules.registry import SCHEDULES  # noqa: E402

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

RANKS = 4
# Okabe and Ito's colours, which colour-blind readers tell apart; shapes and dashes differ, too.
BLUE, GREEN, VERMILION = "#0072B2", "#009E73", "#D55E00"
# By the row of the results: its name, how it is drawn, and how far above its end it is named.
ACCURACIES = {
    "Average": ("Average", BLUE, "^", "--", 0),
    "Average, rate × n, clipped": ("Average,\nrate × n,\nclipped", BLUE, "v", ":", 3),
    "Adasum of gradients": ("Adasum of\ngradients", GREEN, "s", "-", -19),
    "Adasum of deltas": ("Adasum\nof deltas", VERMILION, "o", "-", 0),
}
# As wide as a phone shows without making 11 points smaller than it can be read.
WIDTH = 4.8
plt.rcParams.update({"font.size": 11, "svg.hashsalt": "adasum", "axes.spines.top": False})
plt.rcParams["axes.spines.right"] = False


def schedules() -> dict[str, tuple[str, Schedule]]:
    """Return title and schedule of every picture of messages, by its file's name.

    Algorithms that send the same messages share one.
    """
    found: dict[str, tuple[str, Schedule]] = {}
    for name in SCHEDULES:
        schedule = collectives.schedule(name, RANKS)
        lines = schedule.table().splitlines()[1:]
        same = [file for file, (_, it) in found.items() if it.table().splitlines()[1:] == lines]
        file = same[0] if same else name
        title = f"{found[file][0]}, {name}" if same else name
        found[file] = title, found.get(file, ("", schedule))[1]
    title, slices = found["direct"]
    found["direct"] = f"{title}, psgpu#{RANKS}, pscpu#{RANKS}", slices
    line = collectives.schedule("xring", RANKS, op="adasum")
    both = collectives.schedule("rechd/vhdd", 8, nodes=2, op="adasum")
    found["xring-adasum"] = "xring carrying Adasum", line
    found["two-level"] = "rechd/vhdd on two nodes of four", both
    return found


def draw_pair() -> Any:
    """Draw Adasum of two vectors: parallel ones give their average, orthogonal ones their sum."""
    figure, panels = plt.subplots(1, 2, figsize=(WIDTH, 2.5), layout="constrained")
    pairs = {"parallel: the average": (3.0, 0.0), "orthogonal: the sum": (0.0, 1.0)}
    first = torch.tensor([1.0, 0.0])
    for axes, (title, (x, y)) in zip(panels, pairs.items(), strict=True):
        second = torch.tensor([x, y])
        result = kernels.adasum(first, second)
        # Parallel ones would hide each other: each has a line of its own.
        apart = 0.45 if y == 0 else 0.0
        vectors = (("a", first, BLUE), ("b", second, VERMILION), ("Adasum", result, GREEN))
        for line, (name, vector, colour) in enumerate(vectors):
            low = 2 * apart - apart * line
            end = vector[0].item(), vector[1].item() + low
            style = {"arrowstyle": "-|>", "color": colour, "shrinkA": 0, "shrinkB": 0}
            style["linewidth"] = 4.0 if name == "Adasum" else 2.0
            style["mutation_scale"] = 16
            axes.annotate("", end, (0.0, low), arrowprops=style)
            shift, side = ((8, 0), "left") if y == 0 or name != "b" else ((0, 8), "center")
            axes.annotate(
                name,
                end,
                shift,
                textcoords="offset points",
                color=colour,
                ha=side,
                va="center" if shift[1] == 0 else "bottom",
                weight="bold",
            )
        axes.set_title(title, fontsize=11)
        axes.set(xlim=(-0.1, 4.9) if y == 0 else (-0.1, 2.0), ylim=(-0.3, 1.4))
        axes.axis("off")
    return figure


def draw_tree(leaves: int = 8) -> Any:
    """Draw the tree of order="tree", and which part of it a rank makes on 8, 4 and 2 ranks."""
    figure, axes = plt.subplots(figsize=(WIDTH, 3.6), layout="constrained")

    def place(node: Any) -> tuple[float, int]:
        """Draw a node under its two; return where it is."""
        if isinstance(node, int):
            axes.annotate(str(node), (node, 0), ha="center", va="center", weight="bold")
            return float(node), 0
        ends = [place(each) for each in node]
        x, y = sum(at for at, _ in ends) / 2, ends[0][1] + 1
        for at, level in ends:
            axes.plot([at, x], [level + 0.2, y - 0.2], color="grey", linewidth=1.2, zorder=0)
        axes.annotate("+", (x, y), ha="center", va="center", weight="bold")
        return x, y

    place(collectives.order_of("rd", leaves, order="tree"))
    # Rows below the leaves: each rank's passes, side by side.
    for row, (ranks, colour) in enumerate(((8, BLUE), (4, GREEN), (2, VERMILION)), 1):
        passes = leaves // ranks
        for rank in range(ranks):
            first, low = rank * passes - 0.42, -0.05 - 0.62 * row
            box = plt.Rectangle((first, low), passes - 0.16, 0.46, fc=colour, alpha=0.25, ec=colour)
            axes.add_patch(box)
            name = f"rank {rank}" if passes > 1 else str(rank)
            middle = first + (passes - 0.16) / 2
            axes.annotate(name, (middle, low + 0.22), ha="center", va="center", fontsize=9)
        axes.annotate(
            f"{ranks} ranks,\n{passes} pass{'es' * (passes > 1)}",
            (leaves - 0.3, -0.05 - 0.62 * row + 0.22),
            va="center",
            fontsize=9,
        )
    axes.annotate("leaves", (leaves - 0.3, 0), va="center", fontsize=9)
    axes.set(xlim=(-0.7, leaves + 1.4), ylim=(-2.2, 3.3))
    axes.axis("off")
    axes.set_title('order="tree": a backward pass is a leaf', fontsize=11)
    return figure


def draw_accuracy() -> Any:
    """Draw the digits' final accuracy over the number of ranks, at one rank's rate."""
    results = Results("digits", Store())
    alone = results.alone()
    figure, axes = plt.subplots(figsize=(WIDTH, 3.4), layout="constrained")
    for label, (name, colour, marker, dashes, above) in ACCURACIES.items():
        cells = {1: alone, **results.untuned_rows()[label]}
        found = [
            interval([100 * score for score in results.scores(each)]) for each in cells.values()
        ]
        means, halves = [each.mean for each in found], [each.half for each in found]
        axes.errorbar(list(cells), means, halves, color=colour, marker=marker, ls=dashes, capsize=3)
        axes.annotate(
            name,
            (max(cells), means[-1]),
            (10, above),
            textcoords="offset points",
            color=colour,
            va="center",
            weight="bold",
            fontsize=9,
        )
    axes.set(xscale="log", ylim=(0, 103), xlabel="ranks", ylabel="final test accuracy in %")
    axes.set_xlim(0.9, 110)
    ranks = [1, *results.task.ranks]
    axes.set_xticks(ranks, [str(count) for count in ranks])
    axes.minorticks_off()
    axes.set_title("Digits, the learning rate of one rank, 8 epochs", fontsize=11)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the pictures")
    out = parser.parse_args().out
    drawn = {"pair": draw_pair(), "accuracy": draw_accuracy(), "tree": draw_tree()}
    for name, figure in drawn.items():
        figure.savefig(out / f"{name}.svg", metadata={"Date": None})
    for name, (title, schedule) in schedules().items():
        (out / f"{name}.svg").write_text(schedule.draw(title=title))


if __name__ == "__main__":
    main()
