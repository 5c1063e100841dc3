"""What these scripts share: work on all cores, files of numbers, the machine's name."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch

FOLDER = Path(__file__).parents[3] / "docs" / "evidence"

Job = TypeVar("Job")
Answer = TypeVar("Answer")


def in_parallel(
    function: Callable[[Job], Answer], jobs: Sequence[Job], workers: int
) -> list[Answer]:
    """Return the results in the order of the jobs, from processes of one thread each.

    Prints its progress. With one worker the jobs run in this process.
    """
    started = time.perf_counter()
    with ExitStack() as stack:
        answers: Iterable[Answer] = map(function, jobs)
        if workers > 1:
            pool = ProcessPoolExecutor(
                workers, get_context("spawn"), torch.set_num_threads, initargs=(1,)
            )
            answers = stack.enter_context(pool).map(function, jobs)
        done = []
        for job, answer in zip(jobs, answers, strict=True):
            done.append(answer)
            seconds = time.perf_counter() - started
            print(f"{len(done)}/{len(jobs)}, {seconds:.0f} s: {job}", flush=True)
    return done


def machine() -> dict[str, Any]:
    """Return what the numbers were measured on."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def save(path: Path, content: dict[str, Any]) -> None:
    """Write `content` and the machine as JSON; nested rows have one line each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"  {json.dumps(key)}: {_value(value)}" for key, value in content.items()]
    lines.append(f'  "machine": {json.dumps(machine())}')
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def options_of(description: str, quick: str) -> argparse.Namespace:
    """Parse the options that all scripts have: --out, --workers, and --quick, described by `quick`.

    Each worker is a process of one thread, in which ranks are simulated.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the three files")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--quick", action="store_true", help=quick)
    torch.set_num_threads(1)
    return parser.parse_args()


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and standard deviation, which is 0 for a single value."""
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def _value(value: Any) -> str:
    if isinstance(value, list):
        return "[\n    " + ",\n    ".join(json.dumps(row) for row in value) + "\n  ]"
    return json.dumps(value)


def _cpu() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
