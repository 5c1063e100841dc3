"""Verification of a schedule, for all ranks at once, by running it on symbols."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise, zip_longest
from typing import Any

from collectives import validation
from collectives.reducers import Needs
from collectives.schedules.algorithm import Order
from collectives.schedules.schedule import Action, Collective, Schedule, Step
from collectives.schedules.symbolic_step import (
    Expressions,
    Joins,
    Leaves,
    Reductions,
    ScheduleError,
    State,
    run_step,
)

# For all ranks together; each value needs some bytes, and part of a microsecond in every step.
_MAX_VALUES = 1 << 24

LeafWeights = tuple[tuple[tuple[Leaves, ...], ...], ...]
"""The Leaves of every receive: by rank, by step, in the order of the step's receives."""


@dataclass(frozen=True)
class Proof:
    """The result of `verify`; `print` shows it in words.

    Attributes:
        steps: Number of steps.
        phases: Number of reducers for a run, 0 if nothing is reduced.
        meets: The operators' needs (`Needs`) that the last phase meets. ONE_TREE: all chunks end
            with one expression tree, whose leaves are the results of earlier phases in any order;
            every reduction names a group that holds its whole operands, or whole segments of them;
            and all chunks of each message combine equally many ranks.
        by_tree: Whether some step of the last phase has a tree for its operands; an operator that
            needs one tree must then read it.
        leaves: The numbers of ranks in both operands of every REDUCE receive: for the receive
            `schedule.steps(rank)[step].recvs[i]` entry [rank][step][i] is (p, q): the receiver's
            own value combines p ranks before the step, the message q ranks.
        tree: The expression of every element, nested pairs of ranks (of nodes, with replicas); None
            if elements have different ones, or nothing is reduced.
    """

    steps: int
    phases: int
    meets: Needs
    by_tree: bool = False
    leaves: LeafWeights = field(default=(), repr=False, compare=False)
    tree: Any = field(default=None, repr=False, compare=False)

    @property
    def carries_adasum(self) -> bool:
        """Whether Adasum can run on the schedule."""
        return Needs.ONE_TREE in self.meets

    def __str__(self) -> str:
        """Return what is proved, in words."""
        return (
            f"proved: {self.steps} steps; every message is received, nothing can deadlock, and "
            "every result has each contribution exactly once.\n"
            f"It reduces in {self.phases} phase{'' if self.phases == 1 else 's'}; Adasum can"
            f"{'' if self.carries_adasum else 'not'} run on these steps."
        )


def verify(schedule: Schedule, *, joins: Joins = "said") -> Proof:
    """Prove `schedule` for every rank.

    Proved: every send has its receive in the same step and of the same chunks, and the reverse;
    no chunk is read before it is written, nor received into while it is being sent; every rank
    ends with every contribution exactly once, as the collective requires; all ranks hold the same
    expression tree for each chunk; no phase reduces the result of a later one; the ranges that each
    rank reduces in one step are equal or disjoint; and every non-empty `group` holds the same whole
    operands in one order, each chunk once, with each rank's part in one range: a pair of operands,
    or any number if the group is one rank or the step has a tree for them. Each tree joins every
    operand once. With whole_segments each group is one rank, which holds whole segments. A gathered
    schedule only copies, and ends with every rank's vector on every rank. If receives or trees
    state how many ranks their operands combine, these numbers are checked.

    Args:
        schedule: The schedule.
        joins: The order in which an operator joins more than two operands of one step. "said": by
            the step's tree, or from left to right without a tree. "list": always from left to
            right. "tree": by the balanced tree, as with order="tree".

    Raises:
        ScheduleError: One of these does not hold; the error names the rank and the step.
        TypeError: `schedule` is not a Schedule.
        ValueError: `joins` has another value.

    Examples:
        >>> proof = collectives.verify(collectives.schedule("rechd", 6))
        >>> proof.steps
        6
    """
    _check_arguments(schedule, joins)
    size, chunks = schedule.size, schedule.chunks
    expressions = Expressions(size // schedule.replicas)
    state = _initial(schedule)
    grouped: dict[int, bool] = {}
    trees: set[int] = set()
    leaves: list[list[tuple[Leaves, ...]]] = [[] for _ in range(size)]
    count = 0
    for count, steps in enumerate(zip_longest(*map(schedule.steps, range(size))), 1):
        where = f"{schedule.name} of {size}, step {count - 1}"
        if None in steps:
            raise ScheduleError(f"{where}: rank {steps.index(None)} has no step while others do")
        for rank, step in enumerate(steps):
            if not isinstance(step, Step):
                kind = type(step).__name__
                raise ScheduleError(f"{where}: rank {rank} must yield a Step, got {kind}")
        reductions = run_step(steps, state, expressions, chunks, leaves, where, joins)
        _check_ranges(steps, where)
        _check_groups(steps, reductions, schedule, where)
        for step, reduced, counted in zip(steps, reductions, leaves, strict=True):
            if reduced:
                carried = bool(step.group) and not _is_uneven(step, counted[-1])
                grouped[step.phase] = grouped.get(step.phase, True) and carried
                if step.tree:
                    trees.add(step.phase)
    results = _results(schedule, state, expressions)
    if schedule.gathered and grouped:
        raise ScheduleError(f"{schedule.name}: a gathered schedule reduces in a step")
    last, balanced = max(grouped, default=-1), Order.BALANCED.tree(range(size // schedule.replicas))
    tree = expressions.tree(results.pop()) if len(results) == 1 else None
    one_tree = len({expressions.shape(each, last) for each in results}) < 2
    meets = Needs.ANY_ORDER
    if one_tree and grouped.get(last, True):
        meets |= Needs.ONE_TREE
    if expressions.all_at_once:
        meets |= Needs.ALL_OPERANDS | Needs.BALANCED_TREE
    if schedule.gathered:
        # All vectors are reduced at once, at the end.
        last = 0 if size > 1 else -1
        tree = balanced if joins == "tree" else Order.LINE.tree(range(size))
    if tree == balanced:
        meets |= Needs.BALANCED_TREE
    return Proof(count, last + 1, meets, last in trees, tuple(map(tuple, leaves)), tree)


def _check_arguments(schedule: Schedule, joins: str) -> None:
    validation.instance("schedule", schedule, Schedule, "a Schedule of collectives.schedule()")
    if joins not in ("said", "list", "tree"):
        raise ValueError(f"joins must be 'said', 'list' or 'tree', got {joins!r}")
    size, chunks = schedule.size, schedule.chunks
    if size * chunks > _MAX_VALUES:
        raise ScheduleError(
            f"{schedule.name} of {size}: {chunks} chunks on each of {size} ranks are too many to "
            f"be verified: {_MAX_VALUES // size} are the most"
        )


@lru_cache(maxsize=256)
def with_leaves(schedule: Schedule) -> Schedule:
    """Return the schedule with the `leaves` of every REDUCE receive."""
    found = verify(schedule).leaves

    def steps(rank: int) -> Iterator[Step]:
        for step, leaves in zip(schedule.steps(rank), found[rank], strict=True):
            recvs = zip(step.recvs, leaves, strict=True)
            yield step._replace(recvs=tuple(recv._replace(leaves=each) for recv, each in recvs))

    return replace(schedule, steps=steps)


def _initial(schedule: Schedule) -> State:
    owners = [_owner(schedule, chunk) for chunk in range(schedule.chunks)]
    state: State = []
    for rank in range(schedule.size):
        mine = rank // schedule.replicas
        state.append([mine if owner in (None, rank) else None for owner in owners])
    return state


def _owner(schedule: Schedule, chunk: int) -> int | None:
    """Return the rank whose chunk is copied to every rank; None if the chunk is reduced."""
    if schedule.collective is Collective.BROADCAST:
        return schedule.root
    if schedule.gathered:
        return chunk // schedule.parts
    return chunk if schedule.collective is Collective.ALL_GATHER else None


def _is_uneven(step: Step, leaves: Sequence[Leaves]) -> bool:
    """Return whether the leaves differ between the chunks of any REDUCE receive."""
    recvs = zip(step.recvs, leaves, strict=True)
    return any(found is None and recv.action is not Action.COPY for recv, found in recvs)


def _check_ranges(steps: Sequence[Step], where: str) -> None:
    """Check that each rank reduces equal or disjoint ranges, and only one if it has a group."""
    for rank, step in enumerate(steps):
        recvs = [r for r in step.recvs if r.action is not Action.COPY]
        ranges = list(dict.fromkeys(recv[1:3] for recv in recvs))
        if any(b[0] < a[1] for a, b in pairwise(sorted(ranges))):
            raise ScheduleError(f"{where}: rank {rank} reduces ranges that overlap: {ranges}")
        if step.group and any(b[0] != a[1] for a, b in pairwise(ranges)):
            raise ScheduleError(f"{where}: rank {rank} has a group but not one range: {ranges}")


def _check_groups(
    steps: Sequence[Step], reductions: Sequence[Reductions], schedule: Schedule, where: str
) -> None:
    """Check that every group holds the same whole operands, each chunk once."""
    seen: set[tuple[int, ...]] = set()
    for rank, step in enumerate(steps):
        group = step.group
        if not group:
            continue
        if rank not in group:
            raise ScheduleError(f"{where}: rank {rank} names a group it is not in: {group}")
        if group in seen:
            continue
        seen.add(group)
        if list(group) != sorted(set(group)) or not 0 <= group[0] <= group[-1] < len(steps):
            raise ScheduleError(f"{where}: group {group} must have its ranks in ascending order")
        for member in group:
            other = steps[member]
            if (other.group, other.phase) != (group, step.phase):
                raise ScheduleError(f"{where}: ranks {rank} and {member} name different groups")
            if other.tree != step.tree:
                raise ScheduleError(f"{where}: ranks {rank} and {member} name different trees")
        if schedule.whole_segments:
            if len(group) > 1:
                raise ScheduleError(f"{where}: group {group} has more ranks than hold a segment")
            continue
        held = [reduced for member in group for reduced in reductions[member].items()]
        operands = {each for _, each in held}
        covered = {chunk for chunk, _ in held}
        whole = len(held) == len(covered) == schedule.chunks and len(operands) == 1
        if not whole or (len(group) > 1 and len(operands.pop()) > 2 and not step.tree):
            raise ScheduleError(
                f"{where}: group {group} does not hold one pair of whole vectors, nor is it one "
                "rank that holds several, nor does it say their tree"
            )


def _results(schedule: Schedule, state: State, expressions: Expressions) -> set[int]:
    """Check every rank's final chunks; return the distinct expressions of the reduced ones."""
    size, chunks, collective = schedule.size, schedule.chunks, schedule.collective
    results: set[int] = set()
    if collective in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER) and chunks != size:
        raise ScheduleError(f"{schedule.name}: {collective.value} has one chunk per rank")
    for rank in [schedule.root] if collective is Collective.REDUCE else range(size):
        wanted = range(chunks)
        if collective is Collective.REDUCE_SCATTER:
            wanted = range(rank, rank + 1)
        for chunk in wanted:
            value = state[rank][chunk]
            where = f"{schedule.name} of {size}: rank {rank} chunk {chunk}"
            if value is None:
                raise ScheduleError(f"{where} is never written")
            owner = _owner(schedule, chunk)
            if owner is not None:
                if value != owner:
                    raise ScheduleError(f"{where} is not rank {owner}'s")
                continue
            if missing := expressions.missing(value):
                raise ScheduleError(f"{where} misses the contribution of {missing}")
            results.add(value)
            if collective is Collective.ALL_REDUCE and value != state[0][chunk]:
                raise ScheduleError(f"{where} was computed in another order than on rank 0")
    return results
