"""Schedules: a collective as plain data, one step after the other for every rank.

A schedule runs in lockstep: what rank a sends to rank b in its step t, rank b receives in its own
step t. All messages of a step are posted together, so a schedule whose sends and receives match
step by step cannot deadlock. `verify` proves that, and that the answer is right, for all ranks at
once by running the schedule on symbols instead of numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import NamedTuple


class Action(Enum):
    """What a receiver does with a message; the side says which operand the message is."""

    COPY = "copy"
    REDUCE_LEFT = "reduce_left"
    REDUCE_RIGHT = "reduce_right"


class Collective(Enum):
    """What a schedule must leave behind. Piece i of reduce_scatter and all_gather is chunk i."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    BROADCAST = "broadcast"


class Transfer(NamedTuple):
    """Chunks [start, stop) to or from `peer`. `action` concerns receives only."""

    peer: int
    start: int
    stop: int
    action: Action = Action.COPY


class Step(NamedTuple):
    """The messages one rank exchanges at once.

    `group` names, in ascending order, the ranks whose reductions of this step together cover both
    whole operands; empty when the operands are not one pair of vectors (a ring reduces another
    pair in every chunk), in which case reducers that need whole-vector sums cannot use the step.
    """

    sends: tuple[Transfer, ...] = ()
    recvs: tuple[Transfer, ...] = ()
    group: tuple[int, ...] = ()


IDLE = Step()


@dataclass(frozen=True)
class Schedule:
    """A collective over `size` ranks on a buffer of `chunks` nearly equal pieces.

    `steps(rank)` yields the same number of steps for every rank.
    """

    name: str
    size: int
    chunks: int
    collective: Collective
    steps: Callable[[int], Iterable[Step]] = field(repr=False)
    root: int = 0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size must be at least 1, got {self.size}")
        if not 0 <= self.root < self.size:
            raise ValueError(f"root must be a rank from 0 to {self.size - 1}, got {self.root}")


@lru_cache(maxsize=256)
def steps_of(schedule: Schedule, rank: int) -> tuple[Step, ...]:
    """The steps of one rank, made once."""
    return tuple(schedule.steps(rank))


class ScheduleError(AssertionError):
    """A schedule that does not do what it says."""


@dataclass(frozen=True)
class Proof:
    """What `verify` found: how many steps, and whether reductions pair whole vectors."""

    steps: int
    uniform: bool


class _Expressions:
    """Interned expression trees over the ranks' inputs; a node is an int."""

    def __init__(self, size: int) -> None:
        self.ranks = [1 << rank for rank in range(size)]
        self.pairs: dict[tuple[int, int], int] = {}

    def reduce(self, left: int, right: int, where: str) -> int:
        if self.ranks[left] & self.ranks[right]:
            raise ScheduleError(f"{where}: a rank's contribution is counted twice")
        node = self.pairs.get((left, right))
        if node is None:
            node = self.pairs[left, right] = len(self.ranks)
            self.ranks.append(self.ranks[left] | self.ranks[right])
        return node


def verify(schedule: Schedule) -> Proof:
    """Prove `schedule` for every rank, or raise ScheduleError naming the rank and the step.

    Proved: every send has its receive in the same step and of the same chunks, and the reverse;
    no chunk is read before it is written, nor received into while it is being sent; every rank
    ends with every contribution exactly once where the collective says so; all ranks hold the same
    expression tree for a chunk; and every non-empty `group` holds one pair of operands, each chunk
    once. `Proof.uniform` says that all reductions have such a group and all chunks one tree.
    """
    size, chunks = schedule.size, schedule.chunks
    expressions = _Expressions(size)
    state = _initial(schedule)
    uniform = True
    programs = [iter(schedule.steps(rank)) for rank in range(size)]
    count = 0
    while True:
        steps = [next(program, None) for program in programs]
        if all(step is None for step in steps):
            break
        where = f"{schedule.name} of {size}, step {count}"
        present = [step for step in steps if step is not None]
        if len(present) != size:
            raise ScheduleError(f"{where}: rank {steps.index(None)} has no step while others do")
        operands = _run_step(present, state, expressions, chunks, where)
        uniform &= _check_groups(present, operands, chunks, where)
        count += 1
    trees = _check_final(schedule, state, expressions)
    return Proof(count, uniform and len(trees) <= 1)


def _initial(schedule: Schedule) -> list[list[int | None]]:
    size, chunks = schedule.size, schedule.chunks
    if schedule.collective is Collective.ALL_GATHER:
        if chunks != size:
            raise ScheduleError(f"{schedule.name}: an all_gather has one chunk a rank")
        return [[c if c == rank else None for c in range(chunks)] for rank in range(size)]
    if schedule.collective is Collective.BROADCAST:
        root = schedule.root
        return [[root if rank == root else None] * chunks for rank in range(size)]
    return [[rank] * chunks for rank in range(size)]


_Operands = dict[int, tuple[int, int]]


def _run_step(
    steps: list[Step],
    state: list[list[int | None]],
    expressions: _Expressions,
    chunks: int,
    where: str,
) -> list[_Operands]:
    """Advance all ranks by one step; return what each rank reduced, chunk -> (left, right)."""
    mail: dict[tuple[int, int], list[tuple[int, int, list[int | None]]]] = {}
    for rank, step in enumerate(steps):
        for peer, start, stop, _ in step.sends:
            _check_transfer(rank, peer, start, stop, len(steps), chunks, where)
            values = state[rank][start:stop]
            if None in values:
                raise ScheduleError(f"{where}: rank {rank} sends a chunk it does not have yet")
            mail.setdefault((rank, peer), []).append((start, stop, values))
        for recv in step.recvs:
            if recv.action is Action.COPY and any(
                send.start < recv.stop and recv.start < send.stop for send in step.sends
            ):
                raise ScheduleError(f"{where}: rank {rank} receives into chunks it is sending")
    operands: list[_Operands] = [{} for _ in steps]
    for rank, step in enumerate(steps):
        written: set[int] = set()
        for peer, start, stop, action in step.recvs:
            _check_transfer(rank, peer, start, stop, len(steps), chunks, where)
            queue = mail.get((peer, rank))
            if not queue:
                raise ScheduleError(f"{where}: rank {rank} waits for rank {peer}, which sends none")
            sent_start, sent_stop, values = queue.pop(0)
            if (sent_start, sent_stop) != (start, stop):
                raise ScheduleError(
                    f"{where}: rank {peer} sends chunks [{sent_start}, {sent_stop}), "
                    f"rank {rank} expects [{start}, {stop})"
                )
            for chunk, value in enumerate(values, start):
                assert value is not None
                if chunk in written:
                    raise ScheduleError(f"{where}: rank {rank} writes chunk {chunk} twice")
                written.add(chunk)
                if action is Action.COPY:
                    state[rank][chunk] = value
                    continue
                mine = state[rank][chunk]
                if mine is None:
                    raise ScheduleError(f"{where}: rank {rank} reduces a chunk it does not have")
                pair = (value, mine) if action is Action.REDUCE_LEFT else (mine, value)
                operands[rank][chunk] = pair
                state[rank][chunk] = expressions.reduce(*pair, where)
    for (source, peer), queue in mail.items():
        if queue:
            raise ScheduleError(f"{where}: rank {source} sends to rank {peer}, which receives none")
    return operands


def _check_transfer(
    rank: int, peer: int, start: int, stop: int, size: int, chunks: int, where: str
) -> None:
    if not 0 <= peer < size or peer == rank:
        raise ScheduleError(f"{where}: rank {rank} names rank {peer} as its peer")
    if not 0 <= start < stop <= chunks:
        raise ScheduleError(f"{where}: rank {rank} names chunks [{start}, {stop}) of {chunks}")


def _check_groups(steps: list[Step], operands: list[_Operands], chunks: int, where: str) -> bool:
    """Check every group of a step; say whether every reduction has one."""
    complete = True
    seen: set[tuple[int, ...]] = set()
    for rank, step in enumerate(steps):
        group = step.group
        if not group:
            complete &= not operands[rank]
            continue
        if rank not in group:
            raise ScheduleError(f"{where}: rank {rank} names a group it is not in: {group}")
        if group in seen:
            continue
        seen.add(group)
        if list(group) != sorted(set(group)):
            raise ScheduleError(f"{where}: group {group} is not in ascending order")
        pairs: set[tuple[int, int]] = set()
        covered = 0
        for member in group:
            if steps[member].group != group:
                raise ScheduleError(f"{where}: ranks {rank} and {member} name different groups")
            pairs.update(operands[member].values())
            covered += len(operands[member])
        chunk_set = {chunk for member in group for chunk in operands[member]}
        if covered != chunks or len(chunk_set) != chunks or len(pairs) != 1:
            raise ScheduleError(f"{where}: group {group} does not hold one pair of whole vectors")
    return complete


def _check_final(
    schedule: Schedule, state: list[list[int | None]], expressions: _Expressions
) -> set[int]:
    """Check what every rank ends with; return the distinct trees of the reduced chunks."""
    size, chunks = schedule.size, schedule.chunks
    everyone = (1 << size) - 1
    trees: set[int] = set()
    if schedule.collective is Collective.REDUCE_SCATTER and chunks != size:
        raise ScheduleError(f"{schedule.name}: a reduce_scatter has one chunk a rank")
    for rank in range(size):
        wanted: Iterator[int] | range = range(chunks)
        if schedule.collective is Collective.REDUCE_SCATTER:
            wanted = range(rank, rank + 1)
        for chunk in wanted:
            value = state[rank][chunk]
            where = f"{schedule.name} of {size}: rank {rank} chunk {chunk}"
            if value is None:
                raise ScheduleError(f"{where} is never written")
            if schedule.collective is Collective.ALL_GATHER:
                if value != chunk:
                    raise ScheduleError(f"{where} is not rank {chunk}'s contribution")
            elif schedule.collective is Collective.BROADCAST:
                if value != schedule.root:
                    raise ScheduleError(f"{where} is not the root's")
            else:
                if expressions.ranks[value] != everyone:
                    raise ScheduleError(f"{where} misses a rank's contribution")
                trees.add(value)
                if schedule.collective is Collective.ALL_REDUCE and value != state[0][chunk]:
                    raise ScheduleError(f"{where} was computed in another order than on rank 0")
    return trees
