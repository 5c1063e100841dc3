"""The digits experiment of `compare_digits.py`, on up to 32 ranks and with more seeds.

    PYTHONPATH=examples python -m evidence.first.digits    # --quick: on a small scale

It writes docs/evidence/digits.json, .md and .png.

Model, data, rate and schedule are those of `train_digits.py`: plain SGD, for which Adasum of deltas
is Adasum of gradients. There are two rules for how long to train: EPOCHS epochs on any number of
ranks, so n ranks take one n-th of the steps; and as many epochs as ranks, so 16 and 32 ranks take
as many steps as 8. Ranks are simulated in one process (`evidence.ranks`); one seed of CHECKED is
also trained by DistributedOptimizer on as many threads.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import matplotlib
import torch
from compare_digits import COLOURS, DASHES, grouped, table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from train_digits import (
    BATCH,
    EPOCHS,
    EXAMPLES_PER_LOOK,
    LEARNING_RATE,
    OPS,
    TARGET,
    Digits,
    LeNet,
    Run,
    accuracy_on_test,
    schedule,
)
from train_digits import train as train_on_ranks

import collectives
from evidence.first.shared import in_parallel, mean_and_spread, options_of, save
from evidence.ranks import Ranks, Reduction

matplotlib.use("Agg")
from matplotlib import pyplot as plt

RANKS = (1, 2, 4, 8, 16, 32)
LONGER = (8, 16, 32)
SEEDS = (0, 1, 2, 3, 4)
CHECKED = ((16, "sum"), (16, "average"), (16, "adasum"), (32, "adasum"))


@dataclass(frozen=True)
class Job:
    op: str
    ranks: int
    seed: int
    epochs: int = EPOCHS
    learning_rate: float = LEARNING_RATE
    momentum: float = 0.0

    def __str__(self) -> str:
        return f"{self.ranks} ranks, {self.op}, seed {self.seed}, {self.epochs} epochs"


@lru_cache(maxsize=1)
def data() -> Digits:
    return Digits.load(torch.device("cpu"))


def batches(examples: int, ranks: int, epochs: int, seed: int) -> Tensor:
    """Return the images, [steps, ranks, BATCH], that `train_digits.train` gives each rank."""
    steps_an_epoch = examples // (ranks * BATCH)
    shuffle = torch.Generator().manual_seed(seed + 1000)
    orders = [torch.randperm(examples, generator=shuffle) for _ in range(epochs)]
    shares = [order[rank::ranks] for order in orders for rank in range(ranks)]
    whole = torch.stack([share[: steps_an_epoch * BATCH] for share in shares])
    return whole.view(epochs, ranks, steps_an_epoch, BATCH).transpose(1, 2).flatten(0, 1)


def train(job: Job, digits: Digits | None = None) -> Run:
    """Train as `train_digits.train` does, with all ranks in this process."""
    started = time.perf_counter()
    digits = digits or data()
    torch.manual_seed(job.seed)
    ranks = Ranks(
        LeNet(),
        lambda parameters: torch.optim.SGD(parameters, lr=job.learning_rate, momentum=job.momentum),
        job.ranks,
        Reduction(job.op, "delta" if job.op == "adasum" else "gradient"),
    )
    images = batches(len(digits.labels), job.ranks, job.epochs, job.seed)
    steps = len(images)
    run = Run(job.op, job.ranks, job.seed, job.learning_rate, steps)
    looks_every = max(1, EXAMPLES_PER_LOOK // (job.ranks * BATCH))
    for step in range(steps):

        def loss_of(model: nn.Module, rank: int, step: int = step) -> Tensor:
            mine = images[step, rank]
            return cross_entropy(model(digits.images[mine]), digits.labels[mine])

        ranks.step(loss_of, job.learning_rate * schedule(step, steps))
        if (step + 1) % looks_every == 0 or step + 1 == steps:
            run.looks.append((step + 1, accuracy_on_test(ranks.model, digits)))
    run.seconds = time.perf_counter() - started
    return run


def jobs_of(ranks: tuple[int, ...], seeds: tuple[int, ...], epochs: int | None) -> list[Job]:
    """Return the jobs; epochs None stands for as many as a job has ranks."""
    return [
        Job(op, count, seed, epochs or count)
        for count in ranks
        for op in (OPS if count > 1 else ("average",))
        for seed in seeds
    ]


def check(
    pairs: tuple[tuple[int, str], ...], runs: list[Run], seed: int, epochs: int
) -> list[dict[str, Any]]:
    """Return one seed's final accuracy in one process, and by DistributedOptimizer on threads."""
    rows = []
    for ranks, op in pairs:
        played = next(r for r in runs if (r.ranks, r.op, r.seed) == (ranks, op, seed))
        models = []
        for _ in range(ranks):
            torch.manual_seed(seed)
            models.append(LeNet())
        real = collectives.run_threads(
            ranks,
            lambda group, op=op, models=models: train_on_ranks(
                data(), op, seed, epochs=epochs, model=models[group.rank]
            ),
            timeout=600.0,
        )[0]
        pair = {
            "ranks": ranks,
            "op": op,
            "seed": seed,
            "one_process": played.accuracy,
            "threads": real.accuracy,
        }
        rows.append(pair)
        print(pair, flush=True)
    return rows


def row(run: Run) -> dict[str, Any]:
    """Round for the file: of 389 images, four digits say all."""
    return {**asdict(run), "looks": [(step, round(value, 4)) for step, value in run.looks]}


def plot(runs: list[Run], longer: list[Run], epochs: int, path: Path) -> None:
    """Plot final accuracy over ranks, mean and standard deviation, under either rule."""
    figure, panels = plt.subplots(1, 2, figsize=(5.6, 3.4), sharey=True, layout="constrained")
    titles = (f"{epochs} epochs", "as many epochs as ranks")
    for panel, group, title in zip(panels, (runs, longer), titles, strict=True):
        alone = [run.accuracy for run in runs if run.ranks == 1]
        by_op: dict[str, list[tuple[int, float, float]]] = {
            op: [(1, *mean_and_spread(alone))] if group is runs else [] for op in OPS
        }
        for (count, op), members in grouped(group).items():
            if count > 1:
                by_op[op].append((count, *mean_and_spread([run.accuracy for run in members])))
        for op, points in by_op.items():
            x, mean, spread = zip(*points, strict=True)
            panel.errorbar(
                x,
                mean,
                spread,
                marker="o",
                capsize=4,
                color=COLOURS[op],
                linestyle=DASHES[op],
                label=op.capitalize(),
            )
        counts = sorted({run.ranks for run in group})
        panel.set(title=title, xlabel="ranks", xscale="log", ylim=(0, 1.02))
        panel.set_xticks(counts, [str(count) for count in counts])
        panel.minorticks_off()
        panel.axhline(TARGET, color="grey", linewidth=0.8, linestyle=":")
        panel.axhline(0.1, color="grey", linewidth=0.8, linestyle="--")
    panels[0].set_ylabel("final test accuracy")
    named = panels[0].get_legend_handles_labels()
    figure.legend(*named, loc="outside lower center", ncols=len(OPS), frameon=False)
    figure.suptitle("Digits, SGD, one learning rate, tuned for one rank")
    figure.savefig(path, dpi=140)
    plt.close(figure)


def main() -> None:
    options = options_of(__doc__.splitlines()[0], "few ranks, one seed, two epochs")
    started = time.perf_counter()
    counts, longer_counts, seeds, checked, epochs = RANKS, LONGER, SEEDS, CHECKED, EPOCHS
    if options.quick:
        counts, longer_counts, seeds, checked, epochs = (1, 4), (2,), (0,), ((4, "adasum"),), 2
    jobs = jobs_of(counts, seeds, epochs)
    longer_jobs = jobs_of(longer_counts, seeds, None)
    both = in_parallel(train, [*jobs, *longer_jobs], options.workers)
    runs, longer = both[: len(jobs)], both[len(jobs) :]
    rows = check(checked, runs, seeds[0], epochs)
    options.out.mkdir(parents=True, exist_ok=True)
    save(
        options.out / "digits.json",
        {
            "rate": LEARNING_RATE,
            "batch": BATCH,
            "checked_on_threads": rows,
            "same_epochs": [row(run) for run in runs],
            "epochs_as_ranks": [row(run) for run in longer],
        },
    )
    text = f"{epochs} epochs:\n\n{table(runs)}\n\nAs many epochs as ranks:\n\n{table(longer)}\n"
    (options.out / "digits.md").write_text(text)
    plot(runs, longer, epochs, options.out / "digits.png")
    print(f"\n{text}\n{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
