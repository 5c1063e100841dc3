"""`bench.gpu` by a pretended clock: its stages are no processes, and take what they are given.

What a stage leaves is what its command says it would: a report of pytest's, the ranks' rows.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from bench.gpu import __main__ as command
from bench.gpu import stages
from bench.processes import ENDINGS

NEVER = float("inf")
# Seconds until a process that is asked to end has done so, and of one that is deaf.
POLITE, DEAF = 3.0, sum(seconds for _, seconds in ENDINGS)
# Of a step of the runner's loop, and of all that it does beside: facts, page and archive.
TICK, AROUND = 0.5, 10.0


@dataclass
class Clock:
    """The pretended seconds, and the names of the stages that were begun."""

    seconds: float = 0.0
    begun: list[str] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        if seconds:
            self.seconds += max(seconds, TICK)
        if self.seconds > 36_000.0:
            raise AssertionError(f"after 10 hours there is no end: {self.begun[-1]} never ends")


class _Running:
    """A stage's process, which is none."""

    clock: Clock
    takes: Callable[[str], float]
    deaf: Callable[[str], bool]

    def __init__(self, words: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        name = log.parent.name
        self._until = self.clock.seconds + type(self).takes(name)
        self.needs = DEAF if type(self).deaf(name) else POLITE
        self.process = SimpleNamespace(poll=self._poll)
        self.clock.begun.append(name)
        log.write_text(f"{name} was here\n")
        parser = argparse.ArgumentParser()
        parser.add_argument("--junitxml", type=Path)
        parser.add_argument("-J", dest="rows", type=Path)
        found, _ = parser.parse_known_args([word for word in words if word != "-m"])
        if found.junitxml:
            found.junitxml.write_text('<testsuite><testcase classname="t" name="a"/></testsuite>')
        if found.rows:
            kinds = ("nccl", "rechd", "vhdd", "direct")
            rows = [
                {"algorithm": kind, "ranks": 2, "size": 1 << 26, "median": 1e-3, "wrong": 0}
                for kind in kinds
            ]
            found.rows.write_text(json.dumps({"results": rows}))

    def _poll(self) -> int | None:
        return 0 if self.clock.seconds >= self._until else None

    def __enter__(self) -> _Running:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def run(
    clock: Clock,
    facts: Mapping[str, Any],
    words: Sequence[str],
    takes: Callable[[str], float],
    deaf: Callable[[str], bool] = lambda name: False,
    given: Sequence[stages.Stage] = (),
) -> int:
    """Run `python -m bench.gpu` with these words; return its status.

    takes: seconds of a stage by its name; deaf: whether it ends only when it is killed; given: in
    the place of the plan's stages.
    """

    class Running(_Running):
        pass

    Running.clock, Running.takes, Running.deaf = clock, staticmethod(takes), staticmethod(deaf)

    def end(running: Sequence[_Running]) -> None:
        left = [each.needs for each in running if each.process.poll() is None]
        clock.seconds += max(left, default=0.0)

    def found(environment: Mapping[str, str] | None) -> Mapping[str, Any]:
        clock.seconds += AROUND
        return facts

    pretended = SimpleNamespace(
        monotonic=lambda: clock.seconds,
        sleep=clock.sleep,
        strftime=time.strftime,
        gmtime=time.gmtime,
    )
    with (
        mock.patch.object(stages, "Running", Running),
        mock.patch.object(stages, "end", end),
        mock.patch.object(stages, "time", pretended),
        mock.patch.object(command, "time", pretended),
        mock.patch.object(command, "facts", found),
        mock.patch.object(command.signal, "signal"),
        mock.patch.object(command, "stages", return_value=given) if given else nullcontext(),
    ):
        return command.main(words)
