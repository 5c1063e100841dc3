"""Runs the checks in processes of their own: one that hangs or ends its process costs its line."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO

from adasum.check.checks import FAILED, LEFT_OUT, OK, line

# Seconds that one check may take, compiling its kernels included.
LIMIT = 120.0
_LATE = "no answer within {:g} s"


def supervise(
    names: Sequence[str],
    say: Callable[[str], None],
    limit: float = LIMIT,
    command: Sequence[str] = (sys.executable, "-m", "adasum.check", "--here"),
) -> bool:
    """Run the checks in other processes, a new one after each failure; return whether all passed.

    `say` gets each line; a check has `limit` seconds; `command` runs those whose names follow it,
    as `run_here` does.
    """
    left, passed = [*names], True
    while left:
        with tempfile.TemporaryFile("w+") as errors:
            child = subprocess.Popen(
                [*command, *left],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
            try:
                while left:
                    begin = time.monotonic()
                    said = _next_line(child, limit)
                    seconds = time.monotonic() - begin
                    if not said:
                        reason = _why(child, errors) if seconds < limit else _LATE.format(limit)
                        said = line(FAILED, left[0], seconds, reason)
                    say(said)
                    del left[0]
                    if said.startswith(FAILED):
                        passed = False
                        break
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.communicate()
    return passed


def _next_line(child: subprocess.Popen[str], limit: float) -> str:
    """Return the next line of a check, "" where the process ends or is silent for too long."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        assert child.stdout is not None
        for text in child.stdout:
            # Libraries, too, write there.
            if text.startswith((f"{OK} ", f"{FAILED} ", f"{LEFT_OUT} ")):
                lines.put(text.rstrip())
                return
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    try:
        return lines.get(timeout=limit)
    except queue.Empty:
        return ""


def _why(child: subprocess.Popen[str], errors: IO[str]) -> str:
    """Return how a process ended that closed its output."""
    try:
        status: int | str = child.wait(30.0)
    except subprocess.TimeoutExpired:
        status = "none yet"
    errors.seek(0)
    said = next((text for text in reversed(errors.readlines()) if text.strip()), "")
    return f"the process ended with status {status}: {said.strip()[:300]}"
