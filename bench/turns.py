"""Commands that run in turns, each in processes of its own, where two sides cannot share one.

What drifts on the machine then reaches both sides alike.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


def in_turns(
    commands: Mapping[str, Sequence[str]],
    rounds: int,
    trees: Mapping[str, Path] | None = None,
    limit: float | None = None,
) -> Iterator[tuple[int, str, Any]]:
    """Run all commands once a round; yield the round, the name, and what the command wrote.

    Args:
        commands: By name; each gets `-J FILE` and writes JSON there.
        rounds: How often each runs.
        trees: By name, the checkout that a command runs in and imports.
        limit: Seconds after which a command and all that it started are killed.

    Raises:
        SystemExit: A command has failed; the end of its output.
    """
    for number in range(rounds):
        # Each takes the lead in turn, so that neither gets the quieter half of the rounds.
        for name in sorted(commands, reverse=bool(number % 2)):
            yield number, name, _result(commands[name], (trees or {}).get(name), limit)


def _result(command: Sequence[str], tree: Path | None, limit: float | None) -> Any:
    # Ranks share the processors: one with several threads would take the others'.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if tree is not None:
        environment["PYTHONPATH"] = str(tree)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        whole = [*command, "-J", str(file)]
        run = subprocess.Popen(
            whole, text=True, env=environment, cwd=tree, start_new_session=True, **pipes
        )
        try:
            said = run.communicate(timeout=limit)
        except BaseException:
            os.killpg(run.pid, signal.SIGKILL)
            run.communicate()
            raise
        if run.returncode:
            output = "\n".join(text[-3000:] for text in said)
            raise SystemExit(f"error: {shlex.join(whole)}: exit {run.returncode}\n{output}")
        return json.loads(file.read_text())
