"""Every closed form is its algorithm's schedule, for every size from 1 to 64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from collectives.schedules.algorithm import Algorithm, BulkStep, Level
from collectives.schedules.registry import ALGORITHMS
from collectives.schedules.schedule import Action, Schedule, Step
from collectives.schedules.topology import Topology

CLOSED = [name for name, record in ALGORITHMS.items() if record.closed_form is not None]
ALL_STEPS = 1 << 40
"""More samples than any pipeline has steps."""

Messages = Counter[tuple[Any, ...]]


def levels(record: Algorithm, size: int) -> Iterator[Level]:
    """One shard for every size; for small ones every count allowed, up to three."""
    most = record.most_shards(size, size) or 3
    for shards in range(1, min(most, 3 if size <= 12 else 1) + 1):
        for one_tree in (False, True):
            for local in {size, *(d for d in (2, 4, 8) if size % d == 0 and shards == 1)}:
                yield Level(size, shards, Topology(size, local), one_tree)
            if record.outer:
                yield Level(size, shards, None, one_tree)


# Those of many ranks take long.
QUICK = (*range(1, 25), 31, 32, 33, 64)


@pytest.mark.parametrize(
    "sizes",
    [QUICK, pytest.param(sorted({*range(1, 65)} - {*QUICK}), marks=pytest.mark.slow)],
    ids=["quick", "rest"],
)
@pytest.mark.parametrize("name", CLOSED)
def test_closed_form_for_every_size_has_the_steps_of_the_schedule(
    name: str, sizes: Sequence[int]
) -> None:
    """The ring's line for Adasum, whose steps grow with n², to 12 ranks."""
    for size in sizes:
        compare_all(name, size, lines=size <= 12)


@pytest.mark.slow
def test_closed_form_of_the_line_for_every_size_has_the_steps_of_the_schedule() -> None:
    for size in range(13, 65):
        compare_all("xring", size, lines=True)


def compare_all(name: str, size: int, *, lines: bool) -> None:
    """Compare every level of `size` ranks; lines: with a ring for operators that need one tree."""
    record = ALGORITHMS[name]
    assert record.schedule is not None and record.closed_form is not None
    seen = set()
    for level in levels(record, size):
        schedule = record.schedule(level)
        if schedule in seen or (name == "xring" and level.one_tree and not lines):
            continue
        seen.add(schedule)
        scatter, gather = record.closed_form(level, ALL_STEPS)
        compare(schedule, (*scatter, *gather))


@pytest.mark.parametrize("name", [n for n in CLOSED if ALGORITHMS[n].scatter_gather])
def test_closed_scatter_gather_for_every_size_has_both_parts(name: str) -> None:
    """Where the reduce-scatter ends is where a two-level all-reduce puts the outer one."""
    record = ALGORITHMS[name]
    assert record.scatter_gather is not None and record.closed_form is not None
    for size in range(1, 65):
        for shards in {1, min(2, record.most_shards(size, size) or 2)}:
            level = Level(size, shards, Topology(size, size))
            both = record.scatter_gather(level)
            scatter, gather = record.closed_form(level, ALL_STEPS)
            assert sum(step.times for step in scatter) == len(list(both.scatter(0)))
            assert sum(step.times for step in gather) == len(list(both.gather(0)))


def compare(schedule: Schedule, bulk: Sequence[BulkStep]) -> None:
    """Step by step: who sends how much to whom, what is reduced with it, and in which groups."""
    expected = [step for step in bulk for _ in range(step.times)]
    programs = zip(*(schedule.steps(rank) for rank in range(schedule.size)), strict=True)
    cached: dict[int, Messages] = {}
    number = -1
    for number, steps in enumerate(programs):
        form = expected[number]
        if id(form) not in cached:
            cached[id(form)] = closed_messages(form)
        found = messages(steps, schedule)
        assert found == cached[id(form)], f"{schedule.name} of {schedule.size}, step {number}"
        # Of groups that need tables of each other.
        groups = {tuple(row.tolist()) for rows in form.groups for row in rows}
        assert groups == {step.group for step in steps if len(step.group) > 1}
        assert all(bool(step.tree) == form.by_tree for step in steps if step.recvs)
        assert {step.digits for step in steps if step.tree} <= {form.digits}
    assert number + 1 == len(expected)


def messages(steps: Sequence[Step], schedule: Schedule) -> Messages:
    """Chunks of a vector by sender, receiver and ways, over all messages between the two."""
    found: Messages = Counter()
    for rank, step in enumerate(steps):
        ways = Counter((r.start, r.stop) for r in step.recvs if r.action is not Action.COPY)
        for peer, start, stop, action, _ in step.recvs:
            count = ways[start, stop] if action is not Action.COPY else 0
            found[peer, rank, count] += (stop - start) / schedule.parts
    return rounded(found)


def closed_messages(step: BulkStep) -> Messages:
    found: Messages = Counter()
    for source, target, share, ways in zip(*np.broadcast_arrays(*step[:4]), strict=True):
        found[int(source), int(target), int(ways)] += float(share)
    return rounded(found)


def rounded(found: Messages) -> Messages:
    """Shares in 2^-40ths: equal ones are added in another order."""
    return Counter({key: round(share * 2**40) for key, share in found.items()})
