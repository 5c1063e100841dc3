"""Digits over learning rates: would another rate, or momentum, give Average what Adasum has?

    PYTHONPATH=examples python -m evidence.first.rates    # --quick: on a small scale

It writes docs/evidence/rates.json, .md and .png.

Final test accuracy at 4 and 8 ranks over multiples of the rate that is best on one rank, without
and with momentum. Sum at a rate is Average at n times that rate, so Average's curve shows Sum too,
at the multiple n. The rate for momentum is tuned as the other was (`compare_digits.py --tune`).

To see why, the loss's largest curvature λ is measured after each epoch on one rank: on a quadratic,
gradient descent with momentum β diverges at rates above 2(1+β)/λ.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import matplotlib
import torch
from compare_digits import COLOURS, DASHES, TUNING_SEEDS
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from train_digits import EPOCHS, LEARNING_RATE, Digits, LeNet, Run, schedule

from evidence.first import digits as evidence_digits
from evidence.first.digits import Job, batches
from evidence.first.shared import in_parallel, mean_and_spread, options_of, save

matplotlib.use("Agg")
from matplotlib import pyplot as plt

MOMENTUM = 0.9
RANKS = (4, 8)
SEEDS = (0, 1, 2)
MULTIPLES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
TUNING_RATES = tuple(2 ** (-k / 2) for k in range(8, 16))
# Iterations of the power method, whose estimate settles well before.
ITERATIONS = 30
Cell = tuple[float, int, str, float]


def train_for_tuning(job: Job) -> Run:
    """Train on the training images alone, some of which are held back."""
    return evidence_digits.train(job, Digits.load(torch.device("cpu")).for_tuning())


def tune(epochs: int, rates: tuple[float, ...], workers: int) -> list[dict[str, object]]:
    """Return the steps to the target with momentum on one rank, for each rate and seed."""
    jobs = [
        Job("average", 1, seed, epochs, rate, MOMENTUM) for rate in rates for seed in TUNING_SEEDS
    ]
    runs = in_parallel(train_for_tuning, jobs, workers)
    return [
        {"rate": rate, "steps": [run.steps_to_target for run in runs if run.learning_rate == rate]}
        for rate in rates
    ]


def best(tuning: list[dict[str, object]]) -> float:
    """Return the rate with the fewest steps among those that get there with every seed."""
    means = {row["rate"]: statistics.mean(row["steps"]) for row in tuning if all(row["steps"])}
    return min(means, key=means.__getitem__)


def curvatures(job: Job) -> list[float]:
    """Return the largest curvature at the start and after each epoch of training on one rank."""
    digits = evidence_digits.data()
    torch.manual_seed(job.seed)
    model = LeNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=job.learning_rate, momentum=job.momentum)
    images = batches(len(digits.labels), 1, job.epochs, job.seed)[:, 0]
    answers = [largest_curvature(model, digits)]
    for step, mine in enumerate(images):
        optimizer.param_groups[0]["lr"] = job.learning_rate * schedule(step, len(images))
        optimizer.zero_grad()
        cross_entropy(model(digits.images[mine]), digits.labels[mine]).backward()
        optimizer.step()
        if (step + 1) % (len(images) // job.epochs) == 0:
            answers.append(largest_curvature(model, digits))
    return answers


def largest_curvature(model: nn.Module, digits: Digits) -> float:
    """Return the training loss's Hessian's eigenvalue of largest size, by power iteration."""
    parameters = list(model.parameters())
    loss = cross_entropy(model(digits.images), digits.labels)
    gradients = joined(torch.autograd.grad(loss, parameters, create_graph=True))
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(len(gradients), generator=generator)
    for _ in range(ITERATIONS):
        direction = direction / direction.norm()
        product = joined(torch.autograd.grad(gradients @ direction, parameters, retain_graph=True))
        value, direction = (direction @ product).item(), product
    return value


def joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def table(cells: dict[Cell, list[float]]) -> str:
    """Return a Markdown table: a row a momentum, ranks and op, a column a multiple."""
    multiples = sorted({cell[3] for cell in cells})
    heads = " | ".join(f"× {multiple:g}" for multiple in multiples)
    lines = [
        f"| momentum | ranks | op | {heads} |",
        "|---:|---:|---|" + "---|" * len(multiples),
    ]
    for momentum, ranks, op in dict.fromkeys(cell[:3] for cell in cells):
        row = [
            "{:.1f} ± {:.1f}".format(
                *mean_and_spread([100 * a for a in cells[momentum, ranks, op, multiple]])
            )
            for multiple in multiples
        ]
        lines.append(f"| {momentum:g} | {ranks} | {op.capitalize()} | {' | '.join(row)} |")
    return "\n".join(lines)


def plot(cells: dict[Cell, list[float]], path: Path) -> None:
    """Plot accuracy over multiples of the rate, mean and standard deviation."""
    places = list(dict.fromkeys(cell[:2] for cell in cells))
    rows = (len(places) + 1) // 2
    figure, panels = plt.subplots(
        rows, 2, figsize=(5.6, 2.5 * rows + 0.5), sharey=True, squeeze=False, layout="constrained"
    )
    for panel in panels.flat[len(places) :]:
        panel.set_visible(False)
    for panel, (momentum, ranks) in zip(panels.flat, places, strict=False):
        for op in ("average", "adasum"):
            points = [
                (multiple, *mean_and_spread(values))
                for (m, n, o, multiple), values in cells.items()
                if (m, n, o) == (momentum, ranks, op)
            ]
            x, mean, spread = zip(*points, strict=True)
            panel.errorbar(
                x,
                mean,
                spread,
                capsize=3,
                marker="o",
                color=COLOURS[op],
                linestyle=DASHES[op],
                label=op.capitalize(),
            )
        panel.axvline(ranks, color=COLOURS["sum"], linestyle=":", label="Sum at × 1")
        panel.set(xscale="log", ylim=(0, 1.02), xlabel="multiple of one rank's rate")
        panel.set_xticks(x, [f"{multiple:g}" for multiple in x])
        panel.minorticks_off()
        panel.set_title(f"{ranks} ranks, momentum {momentum:g}")
    for row in panels:
        row[0].set_ylabel("final test accuracy")
    named = panels[0][0].get_legend_handles_labels()
    figure.legend(*named, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def main() -> None:
    options = options_of(__doc__.splitlines()[0], "few rates, one epoch, one seed")
    started = time.perf_counter()
    counts, seeds, multiples, rates, epochs = RANKS, SEEDS, MULTIPLES, TUNING_RATES, EPOCHS
    if options.quick:
        counts, seeds, multiples, rates, epochs = (4,), (0,), (1.0, 2.0), (2**-5.5,), 1
    tuning = tune(epochs, rates, options.workers)
    base = {0.0: LEARNING_RATE, MOMENTUM: 2**-5.5 if options.quick else best(tuning)}
    jobs = {
        (momentum, ranks, op, multiple): [
            Job(op, ranks, seed, epochs, multiple * base[momentum], momentum) for seed in seeds
        ]
        for momentum in base
        for ranks in counts
        for op in ("average", "adasum")
        for multiple in multiples
    }
    flat = [job for cell in jobs.values() for job in cell]
    accuracies = iter(
        run.accuracy for run in in_parallel(evidence_digits.train, flat, options.workers)
    )
    cells = {cell: [next(accuracies) for _ in of_seeds] for cell, of_seeds in jobs.items()}
    alone = [Job("average", 1, seed, epochs, base[m], m) for m in base for seed in seeds]
    curved = in_parallel(curvatures, alone, options.workers)
    options.out.mkdir(parents=True, exist_ok=True)
    save(
        options.out / "rates.json",
        {
            "tuning_with_momentum": tuning,
            "rates": [{"momentum": m, "rate": rate} for m, rate in base.items()],
            "curvature_by_epoch": [
                {"momentum": job.momentum, "seed": job.seed, "values": values}
                for job, values in zip(alone, curved, strict=True)
            ],
            "accuracies": [
                {**asdict(of_seeds[0]), "seed": [job.seed for job in of_seeds], "accuracy": values}
                for of_seeds, values in zip(jobs.values(), cells.values(), strict=True)
            ],
        },
    )
    (options.out / "rates.md").write_text(table(cells) + "\n")
    plot(cells, options.out / "rates.png")
    print(f"\n{base}\n\n{table(cells)}\n\n{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
