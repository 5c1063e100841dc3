"""Ranks as real processes, forked from one that has imported torch already.

`python -m tests.processes.nursery` reads one request a line and answers each with one line. A rank
ends as a program does: an error that nothing catches goes through the interpreter's own exit, exit
hooks included. Starting one costs milliseconds instead of the seconds that importing torch takes.
What differs from processes of their own: all of a nursery's ranks hash strings alike, and those
started with `teardown=False` end where the exit hooks have.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# The packages, what torch imports at an optimizer's first use, and what test modules import.
PRELOAD = ("adasum", "torch._dynamo", "torch.nn.parallel", "pytest", "numpy")
_PR_SET_PDEATHSIG = 1


class Rank:
    """A process of the nursery, known by its number there."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.pid = pid
        self.ended: float | None = None
        self._nursery = nursery
        self._status: int | None = None

    def status(self) -> int | None:
        """The exit status, or minus the signal that ended it; None while it runs."""
        if self._status is None:
            self._status = self._nursery.ask(do="poll", pid=self.pid)
            self.ended = None if self._status is None else time.monotonic()
        return self._status

    def wait(self, deadline: float) -> int | None:
        """The status, waiting for it until `deadline`, of time.monotonic()."""
        while self.status() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return self._status

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.status() is None:
            self._nursery.ask(do="signal", pid=self.pid, signal=int(number))


class Nursery:
    """A context manager; all processes end with it. command: in front of the interpreter's."""

    def __init__(self, command: Sequence[str] = ()) -> None:
        self._process = subprocess.Popen(
            [*command, sys.executable, "-m", "tests.processes.nursery"],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                # A second thread would not be there in the forked process.
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
                "MKL_NUM_THREADS": "1",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Ctrl-C is for pytest, with which this one ends.
            start_new_session=True,
        )
        self._lock = threading.Lock()

    def __enter__(self) -> Nursery:
        return self

    def ask(self, **request: Any) -> Any:
        """The answer to one request; RuntimeError where the nursery has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the nursery has ended with status {self._process.wait(10.0)}")
        return json.loads(answer)

    def start(
        self,
        main: str,
        argument: Any,
        environment: dict[str, str],
        log: Path,
        *,
        teardown: bool = True,
    ) -> Rank:
        """Call main, "module:function", with what JSON makes of the argument, in a new process.

        Its variables are those of this process, and `environment`; all that it says goes to `log`.
        teardown: whether the interpreter and the libraries take themselves apart at its exit. Where
        nobody looks at that, it is 0.4 s of a processor for each rank: torch takes back every
        operator that it registered.
        """
        environment = {**own_variables(), **environment}
        request = {"main": main, "argument": argument, "environment": environment, "log": str(log)}
        return Rank(self, self.ask(do="start", teardown=teardown, **request))

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def own_variables() -> dict[str, str]:
    """This process's environment, also while another thread changes it.

    pytest sets and deletes a variable for each test while the ranks of others start in threads; a
    plain copy lists the names first and raises KeyError for one that is gone when its turn comes.
    """
    return {name: text for name in os.environ if (text := os.environ.get(name)) is not None}


@functools.cache
def nursery() -> Nursery:
    """The one of this process, with which it ends."""
    return Nursery()


def _serve() -> dict[str, Any] | None:
    """Answer requests until there are no more; in a new rank, return the one that started it."""
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        if request["do"] == "start":
            pid = os.fork()
            if not pid:
                _become(request["environment"], request["log"])
                return dict(request)
            answer: int | None = pid
        elif request["do"] == "signal":
            os.kill(request["pid"], request["signal"])
            answer = 0
        else:
            ended, status = os.waitpid(request["pid"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        print(json.dumps(answer), flush=True)
    return None


def _become(environment: dict[str, str], log: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 1)
    os.dup2(1, 2)


if __name__ == "__main__":
    mine: dict[str, Any] | None = None
    status = 1

    # The first that is registered is the last to be called.
    @atexit.register
    def _end_here() -> None:
        if mine is not None and not mine["teardown"]:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    gc.disable()
    for name in PRELOAD:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would not be there after fork"
    # Else a rank would spend a second of its exit on copies of all that torch imported.
    gc.freeze()
    gc.enable()
    if (mine := _serve()) is None:
        os._exit(0)
    module, _, function = mine["main"].partition(":")
    getattr(importlib.import_module(module), function)(mine["argument"])
    status = 0
