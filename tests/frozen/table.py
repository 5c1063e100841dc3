"""The table: a line for each case with what every rank answered, and what differs from it now."""

from __future__ import annotations

import json
import random
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

import kernels
from tests.frozen import worlds
from tests.frozen.cases import Case
from tests.frozen.errors import ENDS

PATH = Path(__file__).parent / "table.json"
Outcome = str | list[str]
_LISTED = re.compile(r"(?:\w+, )*\b(?:rechd|psgpu|oneshot)\b(?:, \w+)*")


class Table(NamedTuple):
    """What one tree answered.

    Attributes:
        made: With which backend, torch and seed.
        outcomes: By the case's string: what all ranks answered, or a list of each one's.
    """

    made: dict[str, str]
    outcomes: dict[str, Outcome]


def backend() -> str:
    """What computes here: C and torch's functions may take other dot products."""
    return kernels.backend_info().cpu


def by_world(cases: Iterable[Case]) -> list[list[Case]]:
    """The cases that can share ranks, together; the groups that end last."""
    found: dict[object, list[Case]] = {}
    for case in sorted(cases, key=lambda case: case.option in ENDS):
        found.setdefault(case.world, []).append(case)
    return list(found.values())


def run(
    cases: Sequence[Case],
    *,
    minutes: float | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Outcome]:
    """The outcomes of the cases, or of as many as fit into `minutes`."""
    end = time.monotonic() + 60 * minutes if minutes else float("inf")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found: dict[str, Outcome] = {}
    try:
        for chunk in by_world(cases):
            if time.monotonic() > end:
                break
            for case, ranks in worlds.run(chunk).items():
                found[str(case)] = ranks[0] if len(set(ranks)) == 1 else ranks
            say(f"{len(found)} of {len(cases)} cases")
    finally:
        torch.set_num_threads(threads)
    return found


def chosen(table: Table, sample: int | None = None, seed: int = 0) -> list[Case]:
    """The table's cases that can be compared here; `sample` of them, the same for a seed.

    With another backend than the table's dot products may differ.
    """
    cases = [Case.parse(each) for each in table.outcomes]
    if table.made["backend"] != backend():
        cases = [case for case in cases if not case.takes_dot_products]
    if sample is None or sample >= len(cases):
        return cases
    return random.Random(seed).sample(cases, sample)


def differences(table: Table, found: dict[str, Outcome]) -> list[str]:
    """One text a case that is not as in the table, whose errors may list other algorithms."""
    return [
        f"{case}\n  was {table.outcomes[case]}\n  is  {outcome}"
        for case, outcome in found.items()
        if _without_lists(outcome) != _without_lists(table.outcomes[case])
    ]


def _without_lists(outcome: Outcome) -> Outcome:
    """An outcome with NAMES for each list of algorithms: one more algorithm changes no row."""
    if not isinstance(outcome, str):
        return [_LISTED.sub("NAMES", each) for each in outcome]
    return _LISTED.sub("NAMES", outcome)


def read(path: Path = PATH) -> Table:
    held = json.loads(path.read_text())
    return Table(held["made"], held["outcomes"])


def write(table: Table, path: Path = PATH) -> None:
    """A line a case, sorted, so that a difference between two tables reads as one."""
    lines = (f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(table.outcomes.items()))
    made = json.dumps(table.made)
    body = ",\n".join(lines)
    path.write_text(f'{{"made": {made}, "outcomes": {{\n{body}\n}}}}\n')


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
