"""Random programs of nested groups, each with one fault on one rank.

A program is some equal steps, of calls of several groups in one order. In its last step the rank at
fault does something else than what comes next. What a rank does afterwards is what a user's script
does: it goes on, or an error ends it.
"""

from __future__ import annotations

import random
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

import collectives
from collectives import CollectiveError, Group
from collectives.tools.flight.analysis import Analysis
from collectives.tools.flight.reader import read

STEPS = 3
IN_THREADS = ("sleep", "skip", "another call", "another shape", "raise")


class OnPurpose(Exception):
    """What a rank raises in its own code."""


@dataclass(frozen=True)
class Scenario:
    """A program and its fault.

    Attributes:
        size: How many ranks there are.
        groups: The members of each group, by their numbers in the one that it is split from: the
            number of that one, and the members. The first is of all ranks.
        calls: Of each step, in order: the group, the collective and the number of elements.
        fault: What happens.
        victim: The rank at fault.
        at: Before which call of the last step.
        timeout: Of each wait, in seconds.
    """

    size: int
    groups: tuple[tuple[int, tuple[int, ...]], ...]
    calls: tuple[tuple[int, str, int], ...]
    fault: str
    victim: int
    at: int
    timeout: float

    def __str__(self) -> str:
        return f"{self.fault.replace(' ', '_')}-{self.size}-{len(self.groups)}-{self.at}"


def draw(seed: int, faults: tuple[str, ...], timeout: float, most: int = 6) -> Scenario:
    """Draw a scenario."""
    generator = random.Random(seed)
    size = generator.randint(2, most)
    groups: list[tuple[int, tuple[int, ...]]] = [(-1, tuple(range(size)))]
    members = [tuple(range(size))]
    for _ in range(generator.randint(1, 3)):
        of = generator.randrange(len(groups))
        if len(members[of]) > 1:
            count = generator.randint(2, len(members[of]))
            part = tuple(sorted(generator.sample(range(len(members[of])), count)))
            groups.append((of, part))
            members.append(tuple(members[of][each] for each in part))
    kinds = ("all_reduce", "broadcast", "barrier")
    calls = [
        (
            generator.randrange(len(groups)),
            generator.choice(kinds),
            generator.choice((3, 5, 70_000)),
        )
        for _ in range(generator.randint(3, 6))
    ]
    # All meet in the end, so that all learn of it.
    calls.append((0, "all_reduce", 7))
    fault = generator.choice(faults)
    # A barrier has no shape, and the last call is nobody's to skip: the rank would just end.
    at = generator.choice(
        [
            i
            for i, (_, kind, _) in enumerate(calls[:-1])
            if fault != "another shape" or kind != "barrier"
        ]
        or [len(calls) - 1]
    )
    victim = generator.choice(members[calls[at][0]])
    return Scenario(size, tuple(groups), tuple(calls), fault, victim, at, timeout)


def play(scenario: Scenario, group: Group) -> None:
    """Be one rank of the program."""
    groups: list[Group | None] = [group]
    for of, part in scenario.groups[1:]:
        whole = groups[of]
        groups.append(whole.split(part) if whole is not None else None)
    for step in range(STEPS):
        for at, (number, kind, numel) in enumerate(scenario.calls):
            mine = groups[number]
            if mine is None:
                continue
            now = (step, at, group.rank) == (STEPS - 1, scenario.at, scenario.victim)
            if now:
                kind, numel = _strike(scenario, kind, numel)
            if kind == "barrier":
                mine.barrier()
            elif kind:
                getattr(mine, kind)(torch.ones(numel))


def _strike(scenario: Scenario, kind: str, numel: int) -> tuple[str, int]:
    """Do what is wrong; return the call that is then made, "" for none."""
    if scenario.fault == "raise":
        raise OnPurpose
    if scenario.fault == "sleep":
        time.sleep(2.5 * scenario.timeout)
    elif scenario.fault == "skip":
        return "", 0
    elif scenario.fault == "another call":
        return "all_gather", numel
    elif scenario.fault == "another shape":
        return kind, numel + 1
    return kind, numel


def by_threads(scenario: Scenario) -> None:
    """Carry it out by ranks that are threads."""

    def main(group: Group) -> None:
        # What ends a rank's script; the others learn of it as its group is closed.
        with suppress(CollectiveError, OnPurpose):
            play(scenario, group)

    collectives.run_threads(scenario.size, main, timeout=scenario.timeout)


def named(folder: Path) -> list[int]:
    """The ranks that the files name."""
    return [each.rank for each in Analysis(read([str(folder)])).culprits]
