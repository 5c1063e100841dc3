"""A character-level transformer with AdamW at 1, 2, 4, 8 and 16 ranks: which reduction learns most?

    PYTHONPATH=examples python -m evidence.first.text    # --quick: on a small scale

It writes docs/evidence/text.json, .md and .png.

Every rank sees BATCH windows a step, so n ranks take one n-th of the steps over the same windows.
The learning rate is tuned on one rank: of the rates 2^(-k/2), the one with the lowest loss on the
tuning text, as a mean over TUNING_SEEDS; the loss reported is on the test text, with other seeds.
More ranks use that rate unchanged, except where a row says otherwise. Ranks are simulated in one
process (`evidence.ranks`).
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import matplotlib
import torch
from char_transformer import Text, Transformer, batches, held_out_loss, loss
from torch import Tensor, nn
from train_digits import schedule

from evidence.first.shared import in_parallel, mean_and_spread, options_of, save
from evidence.ranks import Ranks, Reduction

matplotlib.use("Agg")
from matplotlib import pyplot as plt

BATCH = 4
# Steps on one rank: 524,000 characters, each of the training text 1.8 times.
BATCHES = 2048
RANKS = (1, 2, 4, 8, 16)
SEEDS = (0, 1, 2)
TUNING_SEEDS = (100, 101)
TUNING_RATES = tuple(2 ** (-k / 2) for k in range(9, 18))
LOOKS = 16
# Ranks of a node in the rows of two levels.
LOCAL_SIZE = 2


@dataclass(frozen=True)
class Row:
    """A way to reduce, and the factor on the learning rate."""

    label: str
    reduction: Reduction
    factor: str = "1"

    def rate(self, rate: float, ranks: int) -> float:
        return rate * {"1": 1.0, "√n": ranks**0.5, "local size": float(LOCAL_SIZE)}[self.factor]


ROWS = (
    Row("Sum", Reduction("sum")),
    Row("Average", Reduction("average")),
    Row("Average, rate × √n", Reduction("average"), "√n"),
    Row("Adasum of gradients", Reduction("adasum")),
    Row("Adasum of deltas", Reduction("adasum", "delta")),
    Row("two-level, gradients", Reduction("adasum", "gradient", LOCAL_SIZE)),
    Row(
        "two-level, gradients, rate × 2", Reduction("adasum", "gradient", LOCAL_SIZE), "local size"
    ),
    Row("two-level, deltas", Reduction("adasum", "delta", LOCAL_SIZE)),
    Row("two-level, deltas, rate × 2", Reduction("adasum", "delta", LOCAL_SIZE), "local size"),
)
ONE_RANK = Row("one rank", Reduction("average"))


@dataclass(frozen=True)
class Job:
    row: Row
    ranks: int
    seed: int
    rate: float
    batches: int = BATCHES
    tuning: bool = False

    def __str__(self) -> str:
        return f"{self.ranks} ranks, {self.row.label}, seed {self.seed}, rate {self.rate:.5f}"


@dataclass
class Run:
    """One training; `looks` has (step, loss on held-out text), the last one after the last step."""

    label: str
    ranks: int
    seed: int
    rate: float
    steps: int
    looks: list[tuple[int, float]] = field(default_factory=list)


@lru_cache(maxsize=1)
def text() -> Text:
    return Text.load()


def train(job: Job) -> Run:
    torch.manual_seed(job.seed)
    ranks = Ranks(Transformer(), torch.optim.AdamW, job.ranks, job.row.reduction)
    windows = batches(text().training, job.batches, BATCH, job.seed)
    held_out = text().tuning if job.tuning else text().test
    steps = job.batches // job.ranks
    rate = job.row.rate(job.rate, job.ranks)
    run = Run(job.row.label, job.ranks, job.seed, rate, steps)
    for step in range(steps):

        def loss_of(model: nn.Module, rank: int, step: int = step) -> Tensor:
            return loss(model, windows[step * job.ranks + rank])

        ranks.step(loss_of, rate * schedule(step, steps))
        if (step + 1) % max(1, steps // LOOKS) == 0 or step + 1 == steps:
            run.looks.append((step + 1, held_out_loss(ranks.model, held_out)))
    return run


def tune(options: argparse.Namespace) -> list[dict[str, float]]:
    """Return the mean final loss on the tuning text for each rate, on one rank."""
    jobs = [
        Job(ONE_RANK, 1, seed, rate, options.batches, tuning=True)
        for rate in options.rates
        for seed in options.tuning_seeds
    ]
    runs = in_parallel(train, jobs, options.workers)
    losses: dict[float, list[float]] = {}
    for run in runs:
        losses.setdefault(run.rate, []).append(run.looks[-1][1])
    return [
        {"rate": rate, "mean": mean_and_spread(values)[0], "spread": mean_and_spread(values)[1]}
        for rate, values in losses.items()
    ]


def compare(rate: float, options: argparse.Namespace) -> list[Run]:
    jobs = [
        Job(row, ranks, seed, rate, options.batches)
        for seed in options.seeds
        for ranks in options.ranks
        for row in (ROWS if ranks > 1 else (ONE_RANK,))
        # Two levels on a single node would be the average.
        if ranks > row.reduction.local_size or ranks == 1
    ]
    return in_parallel(train, jobs, options.workers)


def final_losses(runs: list[Run]) -> dict[str, dict[int, list[float]]]:
    """Return each seed's last loss, by label and ranks."""
    losses: dict[str, dict[int, list[float]]] = {}
    for run in runs:
        losses.setdefault(run.label, {}).setdefault(run.ranks, []).append(run.looks[-1][1])
    return losses


def table(runs: list[Run]) -> str:
    """Return a Markdown table: a row a way to reduce, a column a number of ranks."""
    steps = {run.ranks: run.steps for run in runs}
    heads = [f"{n} rank{'s'[: n > 1]}, {steps[n]} steps" for n in sorted(steps)]
    lines = [f"| test loss | {' | '.join(heads)} |", "|---|" + "---|" * len(heads)]
    for label, by_ranks in final_losses(runs).items():
        cells = [
            "{:.3f} ± {:.3f}".format(*mean_and_spread(by_ranks[n])) if n in by_ranks else ""
            for n in sorted(steps)
        ]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def gains(runs: list[Run]) -> str:
    """Return a Markdown table of each way beside Average of the same seed.

    The same seed has the same first weights and windows. The table has the difference of the final
    losses, and the steps to the loss that Average ends with.
    """
    by_key = {(run.label, run.ranks, run.seed): run for run in runs}
    counts = sorted({run.ranks for run in runs} - {1})
    seeds = sorted({run.seed for run in runs})
    heads = [f"{n} ranks" for n in counts]
    lines = [f"| beside Average | {' | '.join(heads)} |", "|---|" + "---|" * len(counts)]
    for label in final_losses(runs):
        cells = []
        for n in counts:
            if (label, n, seeds[0]) not in by_key:
                cells.append("")
                continue
            pairs = [(by_key[label, n, s].looks, by_key["Average", n, s].looks) for s in seeds]
            goals = [theirs[-1][1] for _, theirs in pairs]
            mean, spread = mean_and_spread(
                [mine[-1][1] - goal for (mine, _), goal in zip(pairs, goals, strict=True)]
            )
            reached = [
                next((step for step, loss in mine if loss <= goal), None)
                for (mine, _), goal in zip(pairs, goals, strict=True)
            ]
            steps = [step for step in reached if step is not None]
            when = f"{mean_and_spread(steps)[0]:.0f} steps" if steps else "never"
            if 0 < len(steps) < len(seeds):
                when += f" ({len(steps)} of {len(seeds)} seeds)"
            cells.append(f"{mean:+.3f} ± {spread:.3f}, {when}")
        if any(cells) and label != "Average":
            lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def style(label: str) -> dict[str, Any]:
    # Okabe and Ito's colours, which colour-blind readers tell apart.
    colours = {"one": "black", "Sum": "#D55E00", "Average": "#0072B2"}
    colour = colours.get(label.split(",")[0].split()[0])
    if colour is None:
        colour = "#009E73" if "deltas" in label else "#E69F00"
    two_level = ":" if label.startswith("two-level") else "-"
    # AdamW takes the same steps by a sum and by an average: one would hide the other.
    width = 4.0 if label == "Sum" else 1.5
    return {"color": colour, "linestyle": "--" if "rate" in label else two_level, "lw": width}


def plot(runs: list[Run], path: Path) -> None:
    """Plot the loss over steps for each number of ranks, and the final loss over ranks."""
    counts = sorted({run.ranks for run in runs} - {1})
    rows = (len(counts) + 2) // 2
    figure, grid = plt.subplots(
        rows, 2, figsize=(5.6, 2.5 * rows + 1.6), squeeze=False, layout="constrained"
    )
    panels = grid.flat[: len(counts) + 1]
    for panel in grid.flat[len(counts) + 1 :]:
        panel.set_visible(False)
    groups: dict[tuple[int, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.ranks, run.label), []).append(run)
    finals = [run.looks[-1][1] for run in runs]
    for panel, count in zip(panels, counts, strict=False):
        for (ranks, label), group in groups.items():
            if ranks != count:
                continue
            steps = [step for step, _ in group[0].looks]
            by_look = list(zip(*([value for _, value in run.looks] for run in group), strict=True))
            means = [mean_and_spread(look)[0] for look in by_look]
            panel.plot(steps, means, **style(label))
        panel.set(title=f"{count} ranks", xlabel="steps", ylim=(0.95 * min(finals), 3.4))
    for row in grid:
        row[0].set_ylabel("test loss, nats a character")
    for i, (label, by_ranks) in enumerate(final_losses(runs).items()):
        points = [(n, *mean_and_spread(values)) for n, values in sorted(by_ranks.items())]
        x, mean, spread = zip(*points, strict=True)
        # Side by side, so that no error bar hides another.
        x = [count * (1 + 0.025 * (i - 5)) if count > 1 else 1 for count in x]
        marker = "o" if label == "one rank" else None
        panels[-1].errorbar(x, mean, spread, capsize=3, label=label, marker=marker, **style(label))
    panels[-1].set(title="at the end", xlabel="ranks", xscale="log")
    panels[-1].set_xticks([1, *counts], [str(n) for n in (1, *counts)])
    panels[-1].minorticks_off()
    handles, labels = panels[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle("Transformer, AdamW, rate tuned on one rank, same examples")
    figure.savefig(path, dpi=140)
    plt.close(figure)


def main() -> None:
    options = options_of(__doc__.splitlines()[0], "few steps, ranks, rates, one seed")
    started = time.perf_counter()
    options.batches, options.ranks, options.seeds = BATCHES, RANKS, SEEDS
    options.rates, options.tuning_seeds = TUNING_RATES, TUNING_SEEDS
    if options.quick:
        options.batches, options.ranks, options.seeds = 16, (1, 4), (0,)
        options.rates, options.tuning_seeds = (2**-7, 2**-6), (100,)
    tuning = tune(options)
    rate = min(tuning, key=lambda row: row["mean"])["rate"]
    runs = compare(rate, options)
    options.out.mkdir(parents=True, exist_ok=True)
    save(
        options.out / "text.json",
        {
            "text": {"characters": text().characters, "sha256": text().sha256},
            "batch": BATCH,
            "batches": options.batches,
            "rate": rate,
            "tuning": tuning,
            "runs": [asdict(run) for run in runs],
        },
    )
    tables = f"{table(runs)}\n\n{gains(runs)}\n"
    (options.out / "text.md").write_text(tables)
    plot(runs, options.out / "text.png")
    print(f"\nrate {rate:.5f}\n\n{tables}\n{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
