"""Commands in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def ran(
    *command: str | Path,
    place: Path = ROOT,
    timeout: float = 120.0,
    without: Collection[str] = (),
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, well or not.

    place: Where it runs.
    without: Variables of this process that it is not to have; it gets `variables`, too.
    """
    kept = {name: text for name, text in os.environ.items() if name not in without}
    return subprocess.run(
        command,
        cwd=place,
        env={**kept, **variables},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def printed(*command: str | Path, **options: Any) -> str:
    """Return what `ran` prints; an AssertionError has all that a failed command said."""
    done = ran(*command, **options)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    return done.stdout


def python(*arguments: str | Path, **options: Any) -> str:
    """Return what Python prints: `printed`."""
    return printed(sys.executable, *arguments, **options)
