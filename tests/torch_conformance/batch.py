"""Run tests on ranks that end by themselves, with new ones after every test that failed."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from signal import SIGKILL
from typing import Any, NamedTuple

from tests.processes.harness import free_port, on_one_node
from tests.processes.nursery import Rank, nursery

# Seconds for a test, the ranks' start included, and for the other ranks once one has failed.
SECONDS, GRACE = 150.0, 5.0
# What a rank says whose peer has failed before it.
_OF_PEERS = ("Connection", "Read error", "Timed out", "Collective")


class Outcome(NamedTuple):
    """The worst of a test's outcomes over the ranks, why, and the seconds it took."""

    outcome: str
    said: str
    seconds: float


def run(
    suite: str, tests: Sequence[str], size: int, hook: bool, logs: Path | None = None
) -> dict[str, Outcome]:
    """Return the outcome of every test.

    Ranks run one test after the other until one fails; the tests after it get new processes.

    suite: Where the ranks find it, "module:name".
    logs: A folder for what they print.
    """
    outcomes: dict[str, Outcome] = {}
    left = list(tests)
    while left:
        with tempfile.TemporaryDirectory(prefix="torch-") as name:
            batch = Batch(Path(name), suite, left, size, hook, logs)
            try:
                outcomes |= batch.outcomes()
            finally:
                batch.end()
        left = [test for test in left if test not in outcomes]
    return outcomes


class Batch:
    """Ranks that run tests in their order, and what they have said of them so far."""

    def __init__(
        self,
        directory: Path,
        suite: str,
        tests: Sequence[str],
        size: int,
        hook: bool,
        logs: Path | None,
    ) -> None:
        self._tests = tests
        self._reports = [directory / f"report{rank}" for rank in range(size)]
        self._ranks: list[Rank] = []
        port = free_port()
        name = suite.rpartition(":")[2].lower()
        variant = f"{name}.{size}.{'hook' if hook else 'alone'}"
        argument = {"suite": suite, "tests": list(tests), "size": size, "hook": hook}
        for rank, report in enumerate(self._reports):
            report.touch()
            place = {"rank": rank, "report": str(report), "directory": str(directory)}
            log = directory / f"log{rank}" if logs is None else logs / f"{variant}.{rank}.log"
            variables = {**on_one_node(rank, size, port), "OMP_NUM_THREADS": "1"}
            main = f"{__package__}.rank:main"
            self._ranks.append(nursery().start(main, {**argument, **place}, variables, log))

    def outcomes(self) -> dict[str, Outcome]:
        """Wait for the tests up to the first that fails, and return their outcomes."""
        found: dict[str, Outcome] = {}
        for test in self._tests:
            found[test] = self._outcome(test)
            if found[test].outcome == "failed":
                break
        return found

    def end(self) -> None:
        """End the processes."""
        for each in self._ranks:
            each.send(SIGKILL)
            each.wait(time.monotonic() + 10.0)

    def _outcome(self, test: str) -> Outcome:
        began = time.monotonic()
        deadline = began + SECONDS
        while True:
            said = [self._said(rank, test) for rank in range(len(self._ranks))]
            known = [each for each in said if each is not None]
            now = time.monotonic()
            if any(each[1] == "failed" for each in known):
                deadline = min(deadline, now + GRACE)
            if len(known) == len(said) or (known and now > deadline):
                _, outcome, why = min(known, key=_worst_first)
                if outcome == "failed" or len(known) == len(said):
                    return Outcome(outcome, why, now - began)
            if now > deadline:
                return Outcome("failed", f"not done after {SECONDS:.0f} s", now - began)
            time.sleep(0.02)

    def _said(self, rank: int, test: str) -> tuple[float, str, str] | None:
        # Before the report is read: a rank may write there and end in between.
        status = self._ranks[rank].status()
        for line in self._reports[rank].read_text().splitlines(keepends=True):
            said: list[Any] = json.loads(line) if line.endswith("\n") else []
            if len(said) == 4 and said[0] == test:
                return said[1], said[2], said[3]
        return None if status is None else (time.time(), "failed", f"a rank ended with {status}")


def _worst_first(said: tuple[float, str, str]) -> tuple[int, bool, float]:
    """Order by outcome; of failures that which is no echo of another's comes first."""
    at, outcome, why = said
    echo = any(each in why for each in _OF_PEERS)
    return ("failed", "skipped", "passed").index(outcome), echo, at
