"""Train LeNet on digits with and without a faulty rank, and count the recorder's alarms.

    python -m bench.gradient_recorder               # what is missing, then the table
    python -m bench.gradient_recorder --ranks 8     # some of it, beside another process
    python -m bench.gradient_recorder --table       # the table alone

A training of 8 epochs takes a quarter of a minute. Its line goes to bench/results/cpu; what is
there is not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from adasum.gradient_recorder import Alarm, GradientRecorder
from bench.gradient_recorder.digits import FAULTS, Training, train

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "bench" / "results" / "cpu" / "gradient_recorder"
SEEDS = range(10)
RANKS = (8, 4, 2)
NOTHING = "nothing"
MOMENTUM = 0.9


def trainings(size: int) -> Iterator[Training]:
    """What is run at a number of ranks."""
    # Two ranks have no direction to compare, and take twice as many steps.
    faults = [fault for fault in FAULTS if size > 2 or fault not in ("wild", "flipped")]
    epochs = 8 if size > 2 else 4
    for seed in SEEDS:
        for fault in (None, *faults):
            yield Training(size, seed, fault, epochs)
        if size == 4:
            # Each rank's own momentum makes its differences of one step like those of the last.
            yield Training(size, seed, method="delta", momentum=MOMENTUM)


def result_of(training: Training) -> dict[str, Any]:
    """Train, and return what the recorders said; all ranks' say the same."""
    recorders, accuracy = train(training, GradientRecorder)
    # repr, since NaN is not equal to itself.
    assert len({repr(recorder.alarms) for recorder in recorders}) == 1
    return {
        "training": asdict(training),
        "accuracy": round(accuracy, 4),
        "alarms": recorders[0].alarms,
    }


def run(sizes: list[int]) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for size in sizes:
        path = FOLDER / f"digits_{size}.jsonl"
        done = {Training(**each["training"]) for each in read(size)}
        for training in trainings(size):
            if training not in done:
                line = json.dumps(result_of(training))
                with path.open("a") as file:
                    file.write(line + "\n")


def read(size: int) -> list[dict[str, Any]]:
    path = FOLDER / f"digits_{size}.jsonl"
    return list(map(json.loads, path.read_text().splitlines())) if path.exists() else []


def table() -> str:
    """Return the table of the guide, from the results."""
    lines = [
        "| ranks | what one rank sends | trainings | found | steps until then | other alarms |",
        "|---:|---|---:|---:|---:|---:|",
    ]
    for size in RANKS:
        by_label: dict[str, list[tuple[int | None, int]]] = {}
        for each in read(size):
            training = Training(**each["training"])
            alarms = [Alarm(a[0], a[1], tuple(a[2]), tuple(a[3]), a[4]) for a in each["alarms"]]
            by_label.setdefault(_label(training), []).append(judged(training, alarms))
        for label in sorted(by_label, key=_order):
            lines.append(f"| {size} | {label} | {_cells(label, by_label[label])} |")
    return "\n".join(lines)


def _label(training: Training) -> str:
    label = training.fault or NOTHING
    return label if training.method == "gradient" else f"{label}, deltas with momentum"


def _order(label: str) -> tuple[int, str]:
    return (list(FAULTS).index(label) + 1 if label in FAULTS else 0, label)


def judged(training: Training, alarms: list[Alarm]) -> tuple[int | None, int]:
    """Return how many faulty steps it took to be found, and how many alarms say something else."""
    faulty = (0, 1) if training.size == 2 else (training.rank,)
    both = (0, training.rank)
    found, wrong = None, 0
    for alarm in alarms:
        right = alarm.ranks == (both if alarm.kind == "duplicated" else faulty)
        if training.size == 2 and alarm.ranks == (training.rank,):
            right = alarm.kind != "scaled"
        if training.fault is None or alarm.step < training.begin or not right:
            wrong += 1
        elif alarm.kind == FAULTS[training.fault] and found is None:
            found = alarm.step - training.begin + 1
    return found, wrong


def _cells(label: str, judged: list[tuple[int | None, int]]) -> str:
    steps = sorted(found for found, _ in judged if found is not None)
    wrong = sum(count for _, count in judged)
    if label not in FAULTS:
        return f"{len(judged)} | | | {wrong}"
    span = f"{steps[0]} to {steps[-1]}, median {statistics.median(steps):g}" if steps else ""
    return f"{len(judged)} | {len(steps)} | {span} | {wrong}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gradient_recorder")
    parser.description = "Count the gradient recorder's alarms on digits."
    parser.add_argument("--ranks", nargs="+", type=int, choices=RANKS, default=list(RANKS))
    parser.add_argument("--table", action="store_true", help="run nothing")
    options = parser.parse_args()
    if not options.table:
        run(options.ranks)
    print(table())


if __name__ == "__main__":
    main()
