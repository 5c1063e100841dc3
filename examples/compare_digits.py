"""Compare Sum, Average and Adasum on the handwritten digits at 1, 2, 4 and 8 ranks.

    python examples/compare_digits.py            # a table and a picture in out/
    python examples/compare_digits.py --tune     # how the learning rate was found

This is the LeNet experiment of the Adasum paper (arXiv 2006.02924) on a small scale. The learning
rate is tuned for one rank, and more ranks use it unchanged: in a step n ranks see n times the
examples, so they take one n-th of the steps over the same epochs. Sum then steps n times too far,
Average no further than one rank would, and Adasum further the more the ranks' gradients differ.

Of the rates 2^(-k/2), `--tune` takes the one that reaches 97% on one rank in the fewest steps, as a
mean over TUNING_SEEDS, among those that reach it with every seed. It evaluates on training images
that it holds back, never on the test images, and the comparison uses other seeds. Batch size and
momentum were chosen after simulations of several values, which docs/evidence/demo.md lists.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import torch
from train_digits import (
    BATCH,
    EPOCHS,
    LEARNING_RATE,
    OPS,
    TARGET,
    TRAINING_IMAGES,
    Digits,
    Run,
    train,
)

import adasum as hvd

matplotlib.use("Agg")
from matplotlib import pyplot as plt

RANKS = (1, 2, 4, 8)
# Two, so that it takes less than five minutes on two cores, set-up included.
SEEDS = (0, 1)
TUNING_SEEDS = (100, 101, 102, 103)
TUNING_RATES = tuple(2 ** (-k / 2) for k in range(2, 9))
# Several times what the slowest launch takes on two busy cores, so that a hang ends.
LAUNCH_SECONDS = 240
# Okabe and Ito's, which colour-blind readers tell apart, and dashes for those who print.
COLOURS = {"sum": "#D55E00", "average": "#0072B2", "adasum": "#009E73"}
DASHES = {"sum": ":", "average": "--", "adasum": "-"}


def launch(
    ranks: int, ops: Sequence[str], seeds: Sequence[int], options: Sequence[str]
) -> list[Run]:
    """Train with every op and seed in one torchrun, whose progress goes to standard output.

    Raises:
        RuntimeError: It fails, or takes longer than LAUNCH_SECONDS.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "runs.json"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(ranks)),
            str(Path(__file__).with_name("train_digits.py")),
            *("--op", *ops),
            *("--seed", *map(str, seeds)),
            *("--json", str(answer)),
            *options,
        ]
        # The ranks share the cores: with more than one thread each they would slow each other down.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            status = process.wait(LAUNCH_SECONDS)
        except BaseException as error:
            # torchrun's ranks are in its session, and would outlive it.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise RuntimeError(f"{ranks} ranks: no end after {LAUNCH_SECONDS} s") from error
            raise
        if status != 0:
            raise RuntimeError(f"{ranks} ranks: torchrun ended with status {status}")
        return [Run(**run) for run in json.loads(answer.read_text())]


def grouped(runs: Sequence[Run]) -> dict[tuple[int, str], list[Run]]:
    """Group the runs by (ranks, op), in the order in which they were made."""
    groups: dict[tuple[int, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.ranks, run.op), []).append(run)
    return groups


def label(ranks: int, op: str) -> str:
    # One rank has nothing to reduce, so it is trained once and not under three names.
    return "(any)" if ranks == 1 else op.capitalize()


def table(runs: Sequence[Run]) -> str:
    """Return a Markdown table: accuracy, its deviation, mean steps of the seeds that got there."""
    lines = [
        f"| ranks | op | final test accuracy | steps to {TARGET:.0%} | of steps |",
        "|---:|---|---|---|---:|",
    ]
    for (ranks, op), group in grouped(runs).items():
        accuracies = [100 * run.accuracy for run in group]
        reached = [run.steps_to_target for run in group if run.steps_to_target is not None]
        spread = statistics.stdev(accuracies) if len(group) > 1 else 0.0
        steps = f"{statistics.mean(reached):.0f}" if reached else "never"
        if 0 < len(reached) < len(group):
            steps += f" ({len(reached)} of {len(group)} seeds)"
        lines.append(
            f"| {ranks} | {label(ranks, op)} | {statistics.mean(accuracies):.1f} ± {spread:.1f} % "
            f"| {steps} | {group[0].steps} |"
        )
    return "\n".join(lines)


def plot(runs: Sequence[Run], path: Path) -> None:
    """Plot accuracy over epochs, a panel a number of ranks; bands go from worst to best seed."""
    groups = grouped(runs)
    counts = sorted({ranks for ranks, _ in groups})
    # Two panels side by side can still be read on a phone.
    rows = (len(counts) + 1) // 2
    figure, panels = plt.subplots(
        rows, 2, figsize=(5.6, 2.5 * rows + 0.5), sharey=True, squeeze=False, layout="constrained"
    )
    for panel in panels.flat[len(counts) :]:
        panel.set_visible(False)
    lines = {}
    for panel, ranks in zip(panels.flat, counts, strict=False):
        for (group_ranks, op), group in groups.items():
            if group_ranks != ranks:
                continue
            looks = len(group[0].looks)
            per_step = ranks * BATCH / TRAINING_IMAGES
            epochs = [step * per_step for step, _ in group[0].looks]
            by_look = [[run.looks[i][1] for run in group] for i in range(looks)]
            colour, dashes = ("black", "-") if ranks == 1 else (COLOURS[op], DASHES[op])
            mean, worst, best = ([f(a) for a in by_look] for f in (statistics.mean, min, max))
            name = label(ranks, op)
            (lines[name],) = panel.plot(epochs, mean, color=colour, linestyle=dashes)
            panel.fill_between(epochs, worst, best, color=colour, alpha=0.15)
        panel.axhline(TARGET, color="grey", linewidth=0.8, linestyle=":")
        panel.set(title=f"{ranks} rank{'s' if ranks > 1 else ''}", xlabel="epochs", ylim=(0, 1))
    for row in panels:
        row[0].set_ylabel("test accuracy")
    figure.legend(
        lines.values(), lines, loc="outside lower center", ncols=len(lines), frameon=False
    )
    figure.suptitle("Digits, one learning rate, tuned for one rank")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def compare(ranks: Sequence[int], seeds: Sequence[int], out: Path, options: Sequence[str]) -> None:
    started = time.perf_counter()
    print(
        f"Digits on {', '.join(map(str, ranks))} ranks, {len(seeds)} seeds each; "
        f"all with {' '.join(options)}",
        flush=True,
    )
    runs: list[Run] = []
    for count in ranks:
        runs += launch(count, ["average"] if count == 1 else list(OPS), seeds, options)
    out.mkdir(parents=True, exist_ok=True)
    (out / "digits.md").write_text(table(runs) + "\n")
    plot(runs, out / "digits.png")
    print(f"\n{table(runs)}\n")
    print(f"{time.perf_counter() - started:.0f} s; {out / 'digits.md'}, {out / 'digits.png'}")


def tune(momentum: float) -> None:
    """Print, for every rate, the steps to TARGET and the accuracy on one rank; then the choice."""
    torch.set_num_threads(1)
    hvd.init()
    if hvd.size() != 1:
        raise SystemExit("--tune is for one rank: start it without torchrun")
    digits = Digits.load(torch.device("cpu")).for_tuning()
    means: dict[float, float] = {}
    for rate in TUNING_RATES:
        runs = [
            train(digits, "average", seed, learning_rate=rate, momentum=momentum)
            for seed in TUNING_SEEDS
        ]
        steps = [run.steps_to_target for run in runs]
        accuracy = statistics.mean(run.accuracy for run in runs)
        print(
            f"rate {rate:.4f}: accuracy {accuracy:.4f}, steps to {TARGET:.0%} {steps}", flush=True
        )
        if None not in steps:
            means[rate] = statistics.mean(step for step in steps if step is not None)
    best = min(means, key=means.__getitem__)
    print(f"fewest steps: rate {best:.4f}, {means[best]:.0f} on average")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of table and plot")
    parser.add_argument("--tune", action="store_true", help="search the one-rank learning rate")
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    options = parser.parse_args()
    if options.tune:
        tune(options.momentum)
        return
    names = ("momentum", "learning_rate", "epochs")
    handed_on = [
        text
        for name in names
        for text in (f"--{name.replace('_', '-')}", str(getattr(options, name)))
    ]
    try:
        compare(options.ranks, options.seeds, options.out, handed_on)
    except RuntimeError as error:
        sys.exit(f"compare_digits: {error}")


if __name__ == "__main__":
    main()
