"""Where figures come from: the commit, and versions of packages."""

from __future__ import annotations

import subprocess
from importlib import metadata
from pathlib import Path


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
