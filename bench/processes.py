"""Commands in processes of their own: ended in time with all that they started, and in turns."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# How a process is asked to end, and for how many seconds it may: pytest answers the first with a
# report of what it has run.
ENDINGS = ((signal.SIGINT, 15.0), (signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0))
# Every process below a command has this variable, whatever session or group it is in.
VARIABLE = "ADASUM_BENCH_COMMAND"


class Running:
    """A command under way in `folder`, whose packages it imports; ended on leaving.

    log: gets what it prints; environment: variables beside those of this process. OSError: it
    cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        folder: Path = ROOT,
    ) -> None:
        self._value = uuid.uuid4().hex
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
        variables = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", VARIABLE: self._value}
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, **variables, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End the process with all that it started."""
        end([self])

    def kill_what_is_left(self) -> None:
        """Kill the process's group, and whatever below it went its own way."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        needle = f"{VARIABLE}={self._value}".encode()
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if needle in (entry / "environ").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)


def end(running: Sequence[Running]) -> None:
    """End commands with all that they started, in the time that the slowest of them takes."""
    for number, seconds in ENDINGS:
        left = [each.process for each in running if each.process.poll() is None]
        for process in left:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        deadline = time.monotonic() + seconds
        for process in left:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.0))
    for each in running:
        each.kill_what_is_left()


def run(
    command: Sequence[str],
    log: Path,
    limit: float | None = None,
    environment: Mapping[str, str] | None = None,
    folder: Path = ROOT,
) -> int | None:
    """Run a command to its end: `Running`; return its status, None if ended.

    limit: seconds after which it is ended with all that it started.
    """
    with Running(command, log, environment, folder) as running:
        try:
            return running.process.wait(limit)
        except subprocess.TimeoutExpired:
            return None


def in_turns(
    commands: Mapping[str, Sequence[str]],
    rounds: int,
    trees: Mapping[str, Path] | None = None,
    limit: float | None = None,
) -> Iterator[tuple[int, str, Any]]:
    """Run all commands once a round; yield the round, the name, and what the command wrote.

    What drifts on the machine then reaches all alike. Each command gets `-J FILE` and writes JSON
    there; one that fails raises SystemExit with the end of its output. trees: by name, the checkout
    that a command runs in and imports; limit: seconds for each.
    """
    for number in range(rounds):
        # Each takes the lead in turn, so that neither gets the quieter half of the rounds.
        for name in sorted(commands, reverse=bool(number % 2)):
            with tempfile.TemporaryDirectory() as folder:
                log, file = Path(folder) / "log.txt", Path(folder) / "result.json"
                whole = [*commands[name], "-J", str(file)]
                # Ranks share the processors: one with several threads would take the others'.
                one = {"OMP_NUM_THREADS": "1"}
                status = run(whole, log, limit, one, (trees or {}).get(name, ROOT))
                if status != 0:
                    end = log.read_text(errors="replace")[-6000:]
                    raise SystemExit(f"error: {shlex.join(whole)}: exit {status}\n{end}")
                yield number, name, json.loads(file.read_text())
