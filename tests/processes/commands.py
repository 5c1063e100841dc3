"""Commands in processes of their own that must end well."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

ROOT = Path(__file__).parents[2]


def printed(
    *command: str | Path,
    place: Path = ROOT,
    timeout: float = 120.0,
    without: Collection[str] = (),
    **variables: str,
) -> str:
    """Return what a command prints; an AssertionError has all that a failed one said.

    place: Where it runs.
    without: Variables of this process that it is not to have; it gets `variables`, too.
    """
    kept = {name: text for name, text in os.environ.items() if name not in without}
    done = subprocess.run(
        command,
        cwd=place,
        env={**kept, **variables},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    return done.stdout


def python(*arguments: str | Path, **options: object) -> str:
    """Return what Python prints: `printed`."""
    return printed(sys.executable, *arguments, **options)  # type: ignore[arg-type]
