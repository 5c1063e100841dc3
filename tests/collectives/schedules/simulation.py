"""Schedules of a specification, and ones with another step."""

from __future__ import annotations

from dataclasses import replace

from collectives.schedules.levels import schedule_of
from collectives.schedules.schedule import Schedule, Step
from collectives.schedules.spec import AllReduceSpec
from collectives.schedules.topology import Topology


def one_level(name: str, shards: int, topology: Topology, *, one_tree: bool = False) -> Schedule:
    """The all-reduce of all ranks by `name#shards`."""
    return schedule_of(AllReduceSpec(name, shards, -1), topology, one_tree=one_tree)


def two_levels(
    inner: str,
    inner_shards: int,
    outer: str,
    outer_shards: int,
    topology: Topology,
    *,
    one_tree: bool = False,
) -> Schedule:
    """The all-reduce by `inner#inner_shards/outer#outer_shards`."""
    spec = AllReduceSpec(f"{inner}/{outer}", outer_shards, -1, inner_shards)
    return schedule_of(spec, topology, one_tree=one_tree)


def with_step(schedule: Schedule, rank: int, number: int, step: Step) -> Schedule:
    """The schedule with one step of one rank replaced."""

    def steps(r: int) -> list[Step]:
        result = list(schedule.steps(r))
        if r == rank:
            result[number] = step
        return result

    return replace(schedule, steps=steps)
