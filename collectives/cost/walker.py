"""The profile of an all-reduce, from the steps of all its ranks in lockstep."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, zip_longest
from typing import Any

import numpy as np

from collectives.cost.profiles import DOTS_BYTES, Profile, Profiler, Round
from collectives.schedules import recursive_doubling
from collectives.schedules.algorithm import (
    Algorithm,
    BulkStep,
    Floats,
    Ints,
    Level,
    Parts,
    RoundRobin,
)
from collectives.schedules.digits import tables_by
from collectives.schedules.levels import levels_of
from collectives.schedules.registry import algorithm
from collectives.schedules.schedule import Action, Schedule, Step
from collectives.schedules.spec import AllReduceSpec
from collectives.schedules.topology import Topology

# Steps of a pipeline times ranks, beyond which only some steps, evenly spread, stand for all: bytes
# are then right to 1 %.
_PIPELINE_CELLS, _FEWEST_SAMPLES = 1 << 21, 128

# What a rank launches: to add up tables that others go on with, and to look whether its own is
# precise enough and make coefficients of all.
_SUM_LAUNCHES, _COEFFICIENTS_LAUNCHES = 9, 2


def walk(schedule: Schedule, topology: Topology, reductions: Sequence[str] = ("sum",)) -> Profile:
    """Return the profile of `schedule`, of as many ranks as `topology`, walking every rank.

    reductions: "sum" or "adasum" by phase of the steps; the last is for all later phases.
    """
    if schedule.size != topology.size:
        raise ValueError(f"schedule is for {schedule.size} ranks, topology has {topology.size}")
    return _walk(schedule, Profiler(topology), reductions)


def rounds_of(
    schedule: Schedule, topology: Topology, reductions: Sequence[str] = ("sum",)
) -> list[tuple[int, Round]]:
    """Return what `walk` adds up, one after the other, with the number of its step."""
    rounds: list[tuple[int, Round]] = []
    _walk(schedule, Profiler(topology, rounds), reductions)
    return rounds


def _walk(schedule: Schedule, profiler: Profiler, reductions: Sequence[str]) -> Profile:
    for step in _steps_of(schedule):
        _add(profiler, step, reductions[min(step.phase, len(reductions) - 1)])
    if schedule.gathered:
        profiler.reduce_gathered(reductions[-1])
    return profiler.profile()


def walk_levels(spec: AllReduceSpec, topology: Topology, op: str, tensors: int = 1) -> Profile:
    """Return the profile of an all-reduce by one or two levels, walking each level by itself.

    That is what `walk` finds of the whole schedule, many times as fast: all nodes do the same.
    op: "sum" or "adasum". tensors: How many lie in the buffer. ValueError as of `levels_of`.
    """
    profiler, samples = Profiler(topology), max(_FEWEST_SAMPLES, _PIPELINE_CELLS // topology.size)
    near, far = levels_of(spec, topology, one_tree=op == "adasum", round_robin=RoundRobin(tensors))
    outer, gathered = _whole(algorithm(spec.outer), far, samples)
    if near is None or spec.inner is None:
        for step in outer:
            _add(profiler, step, op)
        if gathered:
            profiler.reduce_gathered(op)
        return profiler.profile()

    inner = algorithm(spec.inner)
    assert inner.scatter_gather is not None
    owners = np.array(sorted(inner.scatter_gather(near).owners))
    firsts = np.arange(topology.num_nodes) * topology.local_size
    scatter, gather = _halves(inner, near, samples)
    for step in scatter:
        _add(profiler, _placed(step, 1, firsts, 1.0), "sum")
    for step in outer:
        _add(profiler, _placed(step, topology.local_size, owners, 1 / len(owners)), op)
    for step in gather:
        _add(profiler, _placed(step, 1, firsts, 1.0), "sum")
    return profiler.profile()


@lru_cache(maxsize=16)
def _whole(record: Algorithm, level: Level, samples: int) -> tuple[Sequence[BulkStep], bool]:
    """Return the steps of a level's all-reduce, and whether they gather whole vectors.

    Of a long pipeline it is about as many steps as `samples` says. They are the schedule's, which
    need not be those of the two parts: for an operator that needs one tree a ring is a line.
    """
    if record.closed_form is not None:
        return tuple(chain(*record.closed_form(level, samples))), False
    assert record.schedule is not None
    schedule = record.schedule(level)
    return tuple(_steps_of(schedule)), schedule.gathered


@lru_cache(maxsize=16)
def _halves(record: Algorithm, level: Level, samples: int) -> Parts:
    """Return the steps of both parts of a level's all-reduce; samples: as for `_whole`."""
    if record.closed_form is not None:
        return record.closed_form(level, samples)
    assert record.scatter_gather is not None
    both = record.scatter_gather(level)
    scatter, gather = (
        tuple(_in_lockstep(part, level.size, both.chunks)) for part in (both.scatter, both.gather)
    )
    return scatter, gather


def _steps_of(schedule: Schedule) -> Iterator[BulkStep]:
    for step in _in_lockstep(schedule.steps, schedule.size, schedule.parts):
        # Each rank holds whole segments by itself.
        yield step._replace(groups=()) if schedule.whole_segments else step


def _in_lockstep(
    steps_of: Callable[[int], Iterable[Step]], size: int, parts: int
) -> Iterator[BulkStep]:
    """Yield the steps of all ranks, each at once."""
    rows: dict[int, array[float]] = defaultdict(lambda: array("d"))
    groups: dict[int, dict[int, list[tuple[int, ...]]]] = defaultdict(lambda: defaultdict(list))
    phases: dict[int, int] = defaultdict(int)
    by_tree: dict[int, tuple[int, ...]] = {}
    # Rank after rank, so that no more than one rank's steps are held.
    for rank in range(size):
        for number, step in enumerate(steps_of(rank)):
            phases[number] = max(phases[number], step.phase)
            if step.tree:
                by_tree[number] = step.digits
            if step.group and step.group[0] == rank:
                groups[number][len(step.group)].append(step.group)
            spans = [recv[1:3] for recv in step.recvs if recv.action is not Action.COPY]
            ways = Counter(spans) if len(spans) > 1 else dict.fromkeys(spans, 1)
            for peer, start, stop, action, _ in step.recvs:
                reduced = 0 if action is Action.COPY else ways[start, stop]
                rows[number].extend((peer, rank, (stop - start) / parts, reduced))
    for number, phase in phases.items():
        source, target, share, found = np.array(rows[number]).reshape(-1, 4).T
        yield BulkStep(
            source.astype(np.int64),
            target.astype(np.int64),
            share,
            found.astype(np.int64),
            groups=[np.array(each) for each in groups[number].values()],
            phase=phase,
            by_tree=number in by_tree,
            digits=by_tree.get(number, ()),
        )


def _placed(step: BulkStep, stride: int, offsets: Ints, share: float) -> BulkStep:
    """Return a level's step on all ranks: rank r of the level stands for r · stride + offsets."""

    def ranks(of: Ints) -> Ints:
        return (of * stride + offsets[:, None]).reshape(-1)

    def messages(values: Ints | Floats | float) -> Any:
        return np.tile(values, len(offsets)) if isinstance(values, np.ndarray) else values

    return step._replace(
        source=ranks(step.source),
        target=ranks(step.target),
        share=share * messages(step.share),
        ways=messages(step.ways),
        groups=[
            (each[..., None] * stride + offsets).reshape(len(each), -1) for each in step.groups
        ],
        digits=_tables_by(step, len(offsets)),
    )


def _tables_by(step: BulkStep, offsets: int) -> tuple[int, ...]:
    """Return the digits of a level's tables, where each of its ranks stands for several."""
    if not step.by_tree:
        return ()
    return tables_by((offsets, *(step.digits or (step.groups[0].shape[1],))))


def _add(profiler: Profiler, step: BulkStep, reduction: str) -> None:
    """Add a step, and the sums of Adasum's partial products, which all groups make at once.

    They travel as the executor sends them: by recursive doubling in each group, or of a tree from
    every rank to every other.
    """
    profiler.add(step, reduction)
    if reduction != "adasum":
        return
    if step.by_tree:
        for groups in step.groups:
            if groups.shape[1] > 1:
                _add_tables(profiler, groups, int(np.max(step.ways)) + 1, step.digits)
        return
    for together in zip_longest(*([*_dots(groups)] for groups in step.groups)):
        rows = [each for each in together if each is not None]
        source, target, ways = map(np.concatenate, zip(*rows, strict=True))
        profiler.add(BulkStep(source, target, 1.0, ways), "sum", dots=True)


def _add_tables(profiler: Profiler, groups: Ints, operands: int, digits: Sequence[int]) -> None:
    """Add what gathers the Gram matrices of groups, a group a row, and makes coefficients of them.

    They travel by one exchange, or one for each digit.
    """
    *sums, _ = radices = digits or (groups.shape[1],)
    stride = 1
    for number, radix in enumerate(radices):
        rows = groups.reshape(-1, radix, stride).swapaxes(1, 2).reshape(-1, radix)
        pairs = [(one, other) for one in range(radix) for other in range(radix) if one != other]
        source, target = (rows[:, ends].reshape(-1) for ends in np.array(pairs).T)
        launches = _SUM_LAUNCHES if number < len(sums) else _COEFFICIENTS_LAUNCHES
        # Two float64 numbers an entry.
        share = operands**2 * 16 / DOTS_BYTES
        step = BulkStep(source, target, share, (radix - 1) / launches)
        profiler.add(step, "sum", dots=True)
        stride *= radix


def _dots(groups: Ints) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Yield source, target and ways of each step in groups of one length, a group a row."""
    for step in _doubling(groups.shape[1]):
        ends = groups[:, step.source].reshape(-1), groups[:, step.target].reshape(-1)
        yield *ends, np.tile(step.ways, len(groups))


@lru_cache(maxsize=32)
def _doubling(size: int) -> tuple[BulkStep, ...]:
    return tuple(_steps_of(recursive_doubling.all_reduce(size)))
