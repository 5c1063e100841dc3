"""Draw the pictures beside this file; `python docs/pictures/draw.py` writes all of them again.

The messages are read from the schedules, the results of the pairs come from `kernels.adasum`, and
the accuracies from docs/evidence/results: nothing is drawn by hand.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import torch

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER.parents[1]), str(FOLDER.parents[1] / "examples")]

from evidence.intervals import interval  # noqa: E402
from evidence.report import Results  # noqa: E402
from evidence.store import Store  # noqa: E402

import kernels  # noqa: E402
from collectives.schedules import two_level  # noqa: E402
from collectives.schedules.algorithm import Level  # noqa: E402
from collectives.schedules.registry import SCHEDULES, algorithm  # noqa: E402
from collectives.schedules.schedule import Action, Schedule, steps_of  # noqa: E402
from collectives.schedules.topology import Topology  # noqa: E402

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402

RANKS = 4
# Okabe and Ito's colours, which colour-blind readers tell apart; shapes and dashes differ, too.
BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
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


class Message(NamedTuple):
    """What one rank sends another in one step; `share` is of the whole buffer."""

    step: int
    source: int
    target: int
    share: Fraction
    reduces: bool


def messages(schedule: Schedule) -> Iterator[Message]:
    """Yield a schedule's messages, joined where one rank sends another several in a step."""
    for rank in range(schedule.size):
        for number, step in enumerate(steps_of(schedule, rank)):
            chunks: dict[tuple[int, bool], int] = {}
            for recv in step.recvs:
                key = recv.peer, recv.action is not Action.COPY
                chunks[key] = chunks.get(key, 0) + recv.stop - recv.start
            for (peer, reduces), count in chunks.items():
                share = Fraction(count, schedule.parts)
                yield Message(number, peer, rank, share, reduces)


def one_level(name: str, shards: int = 1, *, one_tree: bool = False) -> Schedule:
    """Return an algorithm's schedule on the ranks of one node."""
    make = algorithm(name).schedule
    assert make is not None
    return make(Level(RANKS, shards, Topology(RANKS, RANKS), one_tree))


def schedules() -> dict[str, tuple[str, Schedule]]:
    """Return title and schedule of every picture of messages, by its file's name.

    Algorithms that send the same messages share one.
    """
    found: dict[str, tuple[str, Schedule]] = {}
    for name in SCHEDULES:
        schedule = one_level(name)
        same = [
            file
            for file, (_, other) in found.items()
            if sorted(messages(other)) == sorted(messages(schedule))
        ]
        if same:
            title, other = found[same[0]]
            found[same[0]] = f"{title}, {name}", other
        else:
            found[name] = name, schedule
    title, slices = found["direct"]
    found["direct"] = f"{title}, psgpu#{RANKS}, pscpu#{RANKS}", slices
    levels = algorithm("direct").schedule
    assert levels is not None
    on_nodes = levels(Level(8, 1, Topology(8, 4), one_tree=True))
    found["direct-levels"] = "direct in levels, Adasum on two nodes of four", on_nodes
    found["xring-adasum"] = "xring carrying Adasum", one_level("xring", one_tree=True)
    inner, outer = algorithm("rechd").scatter_gather, algorithm("vhdd").schedule
    assert inner is not None
    assert outer is not None
    both = two_level.all_reduce(Topology(8, 4), inner(Level(4)), outer(Level(2, one_tree=True)))
    found["two-level"] = "rechd/vhdd on two nodes of four", both
    return found


def draw_messages(title: str, schedule: Schedule) -> Any:
    """Draw ranks as lines, steps from left to right, and a message as an arrow."""
    drawn = list(messages(schedule))
    steps = max(message.step for message in drawn) + 1
    height = 1.5 + 0.32 * schedule.size
    figure, axes = plt.subplots(figsize=(WIDTH, height), layout="constrained")
    for rank in range(schedule.size):
        axes.plot([0, steps], [rank, rank], color="lightgrey", linewidth=1, zorder=0)
    for message in drawn:
        axes.annotate(
            "",
            (message.step + 0.92, message.target),
            (message.step + 0.08, message.source),
            arrowprops={
                "arrowstyle": "-|>",
                "color": BLUE if message.reduces else ORANGE,
                "linestyle": "-" if message.reduces else (0, (4, 2)),
                "linewidth": 1 + 2 * min(float(message.share), 1.5),
                "shrinkA": 0,
                "shrinkB": 0,
            },
        )
    ticks = range(0, steps, 1 if steps < 8 else 5)
    labels = []
    for step in ticks:
        shares = sorted({message.share for message in drawn if message.step == step})
        labels.append(f"{step + 1}\n{', '.join(map(str, shares))}")
    axes.set(ylim=(schedule.size - 0.6, -0.4), xlim=(0, steps))
    axes.set_xlabel("step, and each message's share of the buffer")
    axes.set_xticks([step + 0.5 for step in ticks], labels)
    axes.set_yticks(range(schedule.size), [f"rank {rank}" for rank in range(schedule.size)])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(title, fontsize=11)
    key = [Line2D([], [], color=BLUE, lw=2), Line2D([], [], color=ORANGE, lw=2, ls=(0, (4, 2)))]
    figure.legend(key, ["reduced", "copied"], loc="outside lower center", ncols=2, frameon=False)
    return figure


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
    figures = {"pair": draw_pair(), "accuracy": draw_accuracy()}
    figures |= {name: draw_messages(*each) for name, each in schedules().items()}
    for name, figure in figures.items():
        figure.savefig(out / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
