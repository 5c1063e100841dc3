"""Profiles from the algorithms' closed forms: the schedules' steps, for all ranks at once.

Walking 65,536 ranks step by step would take hours on a ring; a closed form needs one array
operation a step. The tests compare the closed forms with the schedules step by step, and the
profiles here with those of `walk`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from collectives.cost.profiles import Profile, Profiler, Transfers
from collectives.schedules import recursive_doubling
from collectives.schedules.algorithm import Algorithm, BulkStep, ClosedForm, Ints, Level
from collectives.schedules.registry import (
    algorithm,
    inner_level,
    outer_level,
    whole_level,
)
from collectives.schedules.spec import AllReduceSpec
from collectives.schedules.topology import Topology

# Steps of a pipeline times ranks, beyond which only some steps, evenly spread, stand for all: bytes
# are then right to 1 %.
_PIPELINE_CELLS, _FEWEST_SAMPLES = 1 << 22, 128


def closed(spec: AllReduceSpec, topology: Topology, op: str) -> Profile:
    """Return the profile of an all-reduce by one or two levels.

    Args:
        spec: The algorithms.
        topology: Where the ranks are.
        op: "sum" or "adasum".

    Raises:
        ValueError: A name is unknown, may not stand on its level, takes fewer shards, or has no
            closed form.
    """
    profiler = Profiler(topology)
    samples = max(_FEWEST_SAMPLES, _PIPELINE_CELLS // topology.size)
    one_tree = op == "adasum"
    outer = algorithm(spec.outer)
    if spec.inner is None:
        level = whole_level(outer.name, spec.shards, topology, one_tree=one_tree)
        form = _form(outer, level, samples)
        for step in (*form.scatter, *form.gather):
            _add(profiler, step, lambda ranks: ranks, 1.0, op)
        if form.gathered:
            profiler.reduce_gathered(op)
        return profiler.profile()

    inner, local = algorithm(spec.inner), topology.local_size
    near = _form(inner, inner_level(inner.name, spec.inner_shards, topology), samples)
    far = _form(outer, outer_level(outer.name, spec.shards, topology, one_tree=one_tree), samples)
    assert near.owners is not None
    owners, first = near.owners, np.arange(topology.num_nodes)[:, None] * local

    def inside(ranks: Ints) -> Ints:
        return (first + ranks).reshape(-1)

    def across(nodes: Ints) -> Ints:
        ranks = nodes[..., None] * local + owners
        return ranks.reshape(*nodes.shape[:-1], -1)

    for step in near.scatter:
        _add(profiler, step, inside, 1.0, "sum")
    for step in (*far.scatter, *far.gather):
        _add(profiler, step, across, 1 / len(owners), op)
    for step in near.gather:
        _add(profiler, step, inside, 1.0, "sum")
    return profiler.profile()


def _form(record: Algorithm, level: Level, samples: int) -> ClosedForm:
    if record.closed_form is None:
        raise ValueError(f"{record.name!r} has no closed form, so it cannot be priced at this size")
    return record.closed_form(level, samples)


def _add(
    profiler: Profiler, step: BulkStep, to_ranks: Callable[[Ints], Ints], share: float, op: str
) -> None:
    """Add one level's step; `to_ranks` maps the level's ranks to the topology's."""
    source, target = to_ranks(step.source), to_ranks(step.target)
    ways = step.ways
    if isinstance(ways, np.ndarray):
        ways = np.repeat(ways, len(source) // max(1, len(ways)))
    profiler.add(
        Transfers(source, target, share * step.share, ways), times=step.times, reduction=op
    )
    if op == "adasum" and step.members is not None:
        members = to_ranks(step.members)
        for dots in recursive_doubling.closed_form(members.shape[1]).scatter:
            ends = members[:, dots.source].reshape(-1), members[:, dots.target].reshape(-1)
            profiler.add_dots(Transfers(*ends, 1.0, dots.ways))
