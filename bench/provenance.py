"""Where figures come from, and where they go: commits, versions of packages, JSON."""

from __future__ import annotations

import json
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any


def commit() -> str:
    """Return the commit, and whether tracked files differ from it; "unknown" without git."""

    def git(*arguments: str) -> str:
        root = Path(__file__).resolve().parent
        return subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short", "HEAD") + (" and changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def version(*packages: str) -> str:
    """Return the version of the first of these that is installed, "none" where none is."""
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return "none"


def unfinished(path: Path) -> Path:
    """Return where a file lies until it is whole."""
    return path.with_name(f"{path.name}.part")


def write(path: Path, record: Any) -> None:
    """Write JSON; whoever waits for the file, or finds it after a kill, gets all of it or none."""
    unfinished(path).write_text(json.dumps(record, indent=1, default=str) + "\n")
    unfinished(path).replace(path)
