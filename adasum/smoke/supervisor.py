"""Runs the checks in processes of their own: one that hangs or ends its process costs its line."""

from __future__ import annotations

import argparse
import functools
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

import torch

from adasum.smoke import one_gpu, ranks

# Seconds that one check may take, compiling its kernels included.
LIMIT = 120.0
NO_GPU = "torch sees no GPU here"
_LATE = "no answer within {:g} s"
OK, FAILED, LEFT_OUT = "ok", "FAILED", "left out"


def checks() -> dict[str, one_gpu.Check]:
    """Return the checks of this machine, by their lines' names and in their order."""
    gpus = torch.cuda.device_count()
    found = one_gpu.KERNELS | {
        "graph replay": one_gpu.replayed,
        "two streams": one_gpu.two_streams,
    }
    if gpus > 1:
        found["a GPU not current"] = one_gpu.second_gpu
    most = 1 << min(gpus, 8).bit_length() - 1
    for name, kind in (("torch", ranks.TORCH), ("cupy", ranks.CUPY)):
        for size in (1, most)[: 1 + (most > 1)]:
            found[f"NCCL of {name}, ranks: {size}"] = functools.partial(_over_nccl, kind, size)
    return found


def _over_nccl(kind: str, size: int, device: str, sizes: Sequence[int]) -> None:
    ranks.start(kind, size)


def line(verdict: str, name: str, seconds: float, reason: str = "") -> str:
    """Return a check's line."""
    return f"{verdict:8} {name:24} {seconds:7.1f} s  {reason}".rstrip()


def here(names: Sequence[str], device: str = "cuda", sizes: Sequence[int] = one_gpu.SIZES) -> int:
    """Run these checks in this process up to the first that fails; return the exit status."""
    known = checks()
    for name in names:
        begin = time.perf_counter()
        try:
            known[name](device, sizes)
            if device != "cpu":
                torch.cuda.synchronize()
            verdict, reason = OK, ""
        except Exception as error:  # noqa: BLE001 - it is what the line is for
            verdict = LEFT_OUT if isinstance(error, ranks.NotInstalledError) else FAILED
            reason = " ".join((str(error) or type(error).__name__).split())[:300]
        print(line(verdict, name, time.perf_counter() - begin, reason), flush=True)
        if verdict == FAILED:
            # After some errors CUDA is of no more use to a process.
            return 1
    return 0


def supervise(
    names: Sequence[str],
    say: Callable[[str], None],
    limit: float = LIMIT,
    command: Sequence[str] = (sys.executable, "-m", "adasum.smoke", "--here"),
) -> bool:
    """Run the checks in other processes, a new one after each failure; return whether all passed.

    Args:
        names: Of the checks.
        say: Gets each line.
        limit: Seconds for a check.
        command: Runs those whose names follow, as `here` does.
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


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each check; return the exit status."""
    parser = argparse.ArgumentParser(prog="adasum.smoke", description="Run the smoke test.")
    parser.add_argument("--here", action="store_true", help="in this process, to the first failure")
    parser.add_argument("names", nargs="*", metavar="CHECK", help="only these")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print(f"adasum.smoke: {NO_GPU}", file=sys.stderr)
        return 2
    names = options.names or [*checks()]
    if unknown := [name for name in names if name not in checks()]:
        parser.error(f"no check {unknown[0]!r}: there are {', '.join(checks())}")
    if options.here:
        return here(names)
    return 0 if supervise(names, print) else 1
