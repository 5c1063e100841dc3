"""The profile of any schedule, from the steps of all its ranks in lockstep."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from collectives.cost.profiles import Profile, Profiler, Transfers
from collectives.schedules import recursive_doubling
from collectives.schedules.schedule import Action, Schedule, Step
from collectives.schedules.topology import Topology


def walk(schedule: Schedule, topology: Topology, reductions: Sequence[str] = ("sum",)) -> Profile:
    """Return the profile of `schedule` on `topology`, walking every rank.

    Adasum's partial products travel as the executor sends them: by recursive doubling in the step's
    group, before the reduction.

    Args:
        schedule: Any, of as many ranks as the topology has.
        topology: Where the ranks are.
        reductions: "sum" or "adasum" by phase of the steps; the last is for all later phases.

    Raises:
        ValueError: The schedule is for another number of ranks.
    """
    if schedule.size != topology.size:
        raise ValueError(f"schedule is for {schedule.size} ranks, topology has {topology.size}")
    profiler = Profiler(topology)
    for steps in zip(*(schedule.steps(rank) for rank in range(schedule.size)), strict=True):
        phase = max(step.phase for step in steps)
        reduction = reductions[min(phase, len(reductions) - 1)]
        profiler.add(_transfers(steps, schedule.parts), reduction=reduction)
        if reduction == "adasum":
            _add_dots(profiler, {step.group for step in steps if len(step.group) > 1})
    if schedule.gathered:
        profiler.reduce_gathered(reductions[-1])
    return profiler.profile()


def _transfers(steps: Sequence[Step], parts: int) -> Transfers:
    rows: list[tuple[int, int, float, int]] = []
    for rank, step in enumerate(steps):
        ways: dict[tuple[int, int], int] = {}
        for recv in step.recvs:
            if recv.action is not Action.COPY:
                ways[recv.start, recv.stop] = ways.get((recv.start, recv.stop), 0) + 1
        for recv in step.recvs:
            share = (recv.stop - recv.start) / parts
            reduced = recv.action is not Action.COPY
            rows.append((recv.peer, rank, share, ways[recv.start, recv.stop] if reduced else 0))
    source, target, shares, counts = zip(*rows, strict=True) if rows else ((), (), (), ())
    return Transfers(
        np.array(source, dtype=np.int64),
        np.array(target, dtype=np.int64),
        np.array(shares, dtype=np.float64),
        np.array(counts, dtype=np.int64),
    )


def _add_dots(profiler: Profiler, groups: set[tuple[int, ...]]) -> None:
    """Add the sums of partial products, which all groups make at the same time."""
    schedules = {group: recursive_doubling.all_reduce(len(group)) for group in groups}
    programs = [
        (group, tuple(tuple(schedule.steps(i)) for i in range(len(group))))
        for group, schedule in schedules.items()
    ]
    for number in range(max((len(steps[0]) for _, steps in programs), default=0)):
        rows = [
            (group[recv.peer], group[i], int(recv.action is not Action.COPY))
            for group, members in programs
            for i, steps in enumerate(members)
            if number < len(steps)
            for recv in steps[number].recvs
        ]
        source, target, ways = (
            np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)
        )
        profiler.add_dots(Transfers(source, target, 1.0, ways))
