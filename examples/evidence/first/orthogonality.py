"""How orthogonal the ranks' gradients are, layer by layer, over the training of two models.

    PYTHONPATH=examples python -m evidence.first.orthogonality    # --quick: on a small scale

It writes docs/evidence/orthogonality.json and .png.

The figure of the Adasum paper (arXiv 2006.02924), made with `adasum.orthogonality.Recorder`, which
any training can use: 1 where all ranks' gradients are orthogonal, 1/n where they are equal. Models,
data and rates are those of digits.py and text.py, whose text.json has the rate.
The RANKS ranks are threads, each with a DistributedOptimizer.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch
from char_transformer import Text, Transformer, held_out_loss, loss
from char_transformer import batches as windows_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from train_digits import EPOCHS, LEARNING_RATE, Digits, LeNet, accuracy_on_test, schedule

import adasum as hvd
import collectives
from evidence.first import digits as evidence_digits
from evidence.first import text as evidence_text
from evidence.first.shared import FOLDER, save

matplotlib.use("Agg")
from matplotlib import pyplot as plt

RANKS = 8
SEED = 0
RECORDS = 32


@dataclass(frozen=True)
class Training:
    """A model to train: loss_of(model, step, rank), and score(model) after the last step."""

    label: str
    method: str
    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    rate: float
    steps: int
    loss_of: Callable[[nn.Module, int, int], Tensor]
    score: Callable[[nn.Module], float]


def digits(quick: bool) -> Training:
    data = Digits.load(torch.device("cpu"))
    images = evidence_digits.batches(len(data.labels), RANKS, 1 if quick else EPOCHS, SEED)

    def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
        mine = images[step, rank]
        return cross_entropy(model(data.images[mine]), data.labels[mine])

    return Training(
        "digits, SGD: gradients",
        "gradient",
        LeNet,
        lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE),
        LEARNING_RATE,
        len(images),
        loss_of,
        lambda model: accuracy_on_test(model, data),
    )


def text(method: str, rate: float, quick: bool) -> Training:
    data = Text.load()
    count = RANKS * (8 if quick else evidence_text.BATCHES // RANKS)
    windows = windows_of(data.training, count, evidence_text.BATCH, SEED)
    return Training(
        f"characters, AdamW: {method}s",
        method,
        Transformer,
        lambda parameters: torch.optim.AdamW(parameters, lr=rate),
        rate,
        count // RANKS,
        lambda model, step, rank: loss(model, windows[step * RANKS + rank]),
        lambda model: held_out_loss(model, data.test),
    )


def train(training: Training) -> dict[str, Any]:
    """Return each parameter's ratios, a value a record, of rank 0: all ranks have the same."""
    every = max(1, training.steps // RECORDS)
    # All threads share one generator, so the models are made here.
    models = []
    for _ in range(RANKS):
        torch.manual_seed(SEED)
        models.append(training.make_model())

    def run(group: collectives.Group) -> list[hvd.orthogonality.Row]:
        model = models[group.rank]
        optimizer = hvd.DistributedOptimizer(
            training.make_optimizer(model.parameters()),
            model.named_parameters(),
            op=hvd.Adasum,
            method=training.method,
        )
        recorder = hvd.orthogonality.Recorder(every)
        optimizer.set_observer(recorder)
        for step in range(training.steps):
            for parameters in optimizer.param_groups:
                parameters["lr"] = training.rate * schedule(step, training.steps)
            optimizer.zero_grad()
            training.loss_of(model, step, group.rank).backward()
            optimizer.step()
        return recorder.rows

    rows = collectives.run_threads(RANKS, run, timeout=600.0)[0]
    names = [name for name, _ in models[0].named_parameters()]
    return {
        "label": training.label,
        "rate": training.rate,
        "steps": sorted({row.step for row in rows}),
        "score": training.score(models[0]),
        "ratios": {name: [row.ratio for row in rows if row.name == name] for name in names},
    }


def plot(answers: list[dict[str, Any]], path: Path) -> None:
    """Plot each parameter's ratio in thin lines, their mean in bold."""
    rows = (len(answers) + 1) // 2
    figure, grid = plt.subplots(
        rows, 2, figsize=(5.6, 2.6 * rows + 0.6), sharey=True, squeeze=False, layout="constrained"
    )
    for panel in grid.flat[len(answers) :]:
        panel.set_visible(False)
    for panel, answer in zip(grid.flat, answers, strict=False):
        for values in answer["ratios"].values():
            panel.plot(answer["steps"], values, color="#009E73", linewidth=0.6, alpha=0.5)
        # A layer whose gradient is zero on every rank has no ratio.
        means = [
            statistics.mean(ratio for ratio in column if not math.isnan(ratio))
            for column in zip(*answer["ratios"].values(), strict=True)
        ]
        panel.plot(answer["steps"], means, color="black", linewidth=2, label="mean of layers")
        for level, name in ((1, "orthogonal"), (1 / RANKS, "equal")):
            panel.axhline(level, color="grey", linewidth=0.8, linestyle=":")
            panel.annotate(name, (answer["steps"][-1], level), ha="right", va="bottom")
        panel.set(xlabel="steps", ylim=(0, 1.08))
        panel.set_title(answer["label"], fontsize="medium")
    for row in grid:
        row[0].set_ylabel("|Adasum|² / sum of |g|²")
    named = grid[0][0].get_legend_handles_labels()
    figure.legend(*named, loc="outside lower center", frameon=False)
    figure.suptitle(f"Orthogonality, {RANKS} ranks, each parameter")
    figure.savefig(path, dpi=140)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the files")
    parser.add_argument("--quick", action="store_true", help="few steps; the rate is 2^-7")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    rate = 2**-7 if options.quick else json.loads((options.out / "text.json").read_text())["rate"]
    answers = []
    for training in (
        digits(options.quick),
        text("gradient", rate, options.quick),
        text("delta", rate, options.quick),
    ):
        answers.append(train(training))
        seconds = time.perf_counter() - started
        print(f"{seconds:.0f} s: {training.label}, score {answers[-1]['score']:.4f}", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    save(options.out / "orthogonality.json", {"ranks": RANKS, "trainings": answers})
    plot(answers, options.out / "orthogonality.png")


if __name__ == "__main__":
    main()
