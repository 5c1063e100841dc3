"""Runs each check in its own processes, so that a hang or crash fails this check only."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import IO, Any

import torch

OK, FAILED = "ok", "FAILED"
# Seconds that one check may take, compiling its kernels included.
LIMIT = 120.0


def run(
    name: str,
    ranks: int,
    limit: float = LIMIT,
    command: Sequence[str] = (sys.executable, "-m", "adasum.check", "--here"),
) -> str:
    """Run a check on a number of ranks; return the line with its verdict."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # These replace the variables of a surrounding job.
    own = {**os.environ, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    own |= {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    begin, children = time.monotonic(), []
    with ExitStack() as stack:
        for rank in range(ranks):
            output = stack.enter_context(tempfile.TemporaryFile("w+"))
            own |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            options: Any = {"stdout": output, "stderr": subprocess.STDOUT, "env": own}
            child = subprocess.Popen([*command, name], start_new_session=True, **options)
            stack.callback(child.wait)
            stack.callback(_kill, child.pid)
            children.append((child, output))
        answers = [_answer(each, output, begin + limit) for each, output in children]
    verdict, text = next((each for each in answers if each[0] == FAILED), answers[0])
    return line(verdict, name, time.monotonic() - begin, text)


def _answer(child: subprocess.Popen[bytes], output: IO[str], until: float) -> tuple[str, str]:
    """Return one rank's verdict and its reason."""
    status, how = None, "no answer in time"
    with suppress(subprocess.TimeoutExpired):
        status = child.wait(max(until - time.monotonic(), 0.1))
        how = f"the process ended with status {status}"
    output.seek(0)
    said = [text.strip() for text in output if text.strip()]
    # Libraries write to the output too, before and after the verdict.
    for text in reversed(said):
        if text.startswith(OK if status == 0 else FAILED):
            return text.split(": ")[0], text.partition(": ")[2]
    return FAILED, f"{how}: {said[-1][:300] if said else 'it wrote nothing'}"


def run_here(check: Callable[[], str]) -> int:
    """Run a check in this process, and print its verdict; return the exit status."""
    verdict = OK
    try:
        said = check()
        if torch.cuda.is_initialized():
            # Otherwise an error of a launch would appear after the verdict.
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - the line reports it
        verdict, said = FAILED, " ".join((str(error) or type(error).__name__).split())[:300]
    print(f"\n{verdict}: {said}", flush=True)
    return int(verdict == FAILED)


def line(verdict: str, name: str, seconds: float, reason: str = "") -> str:
    """Return a check's line."""
    return f"{verdict:8} {name:24} {seconds:7.1f} s  {reason}".rstrip()


def _kill(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
