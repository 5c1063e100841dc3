"""Schedules: a collective as plain data, one step after the other for every rank.

A schedule runs in lockstep: what rank a sends to rank b in its step t, rank b receives in its own
step t. All messages of a step are posted together, so a schedule whose sends and receives match
step by step cannot deadlock. `proof.verify` proves that, and that the answer is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from typing import NamedTuple


class Action(Enum):
    """What a receiver does with a message; the side says which operand the message is.

    Several REDUCE receives of one range in one step are one n-way reduction, left to right: those
    LEFT in the order listed, the receiver's own value, those RIGHT in the order listed.
    """

    COPY = "copy"
    REDUCE_LEFT = "reduce_left"
    REDUCE_RIGHT = "reduce_right"


class Collective(Enum):
    """What a schedule must leave behind. Piece i of reduce_scatter and all_gather is chunk i.

    REDUCE leaves the answer on the root; the other ranks' buffers hold partial results.
    """

    ALL_REDUCE = "all_reduce"
    REDUCE = "reduce"
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
    whole operands; a rank that holds all of several vectors is a group by itself. It is empty when
    the operands are no whole vectors (a ring reduces another pair in every chunk): reducers that
    need whole-vector sums cannot use such a step. Where chunks are whole segments, every rank that
    reduces is a group by itself. What a rank with a group reduces is one range, in ascending order
    where it comes in pieces.
    `phase` says which of the run's reducers the REDUCE receives use: a two-level Adasum sums within
    a node in phase 0 and projects across nodes in phase 1.
    """

    sends: tuple[Transfer, ...] = ()
    recvs: tuple[Transfer, ...] = ()
    group: tuple[int, ...] = ()
    phase: int = 0


IDLE = Step()


@dataclass(frozen=True)
class Schedule:
    """A collective over `size` ranks on a buffer of `chunks` nearly equal pieces.

    `steps(rank)` yields the same number of steps for every rank. root: the rank that a broadcast
    comes from and a reduce goes to. whole_segments: chunk boundaries must lie on segment
    boundaries, so that whoever reduces a chunk holds whole segments. replicas: each run
    of so many consecutive ranks starts with one and the same contribution (its node's).
    gathered: an all-reduce whose steps copy every rank's whole vector to every rank, where in the
    end all of them are reduced in one n-way pass in rank order. Chunks are then those of all
    vectors, rank 0's first; each rank starts with its own.
    """

    name: str
    size: int
    chunks: int
    collective: Collective
    steps: Callable[[int], Iterable[Step]] = field(repr=False)
    root: int = 0
    whole_segments: bool = False
    replicas: int = 1
    gathered: bool = False

    @property
    def parts(self) -> int:
        """Chunks of one vector: each is 1 / parts of the buffer."""
        return self.chunks // self.size if self.gathered else self.chunks

    def __post_init__(self) -> None:
        kinds = dict.fromkeys(("size", "chunks", "root", "replicas"), int)
        for name, kind in {**kinds, "collective": Collective}.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise TypeError(f"{name} must be {kind.__name__}, got {type(value).__name__}")
        if self.size < 1:
            raise ValueError(f"size must be at least 1, got {self.size}")
        if self.chunks < 1:
            raise ValueError(f"chunks must be at least 1, got {self.chunks}")
        if not 0 <= self.root < self.size:
            raise ValueError(f"root must be a rank from 0 to {self.size - 1}, got {self.root}")
        if self.replicas < 1 or self.size % self.replicas:
            raise ValueError(f"replicas must divide size {self.size}, got {self.replicas}")
        if self.replicas > 1 and self.collective is not Collective.ALL_REDUCE:
            raise ValueError(f"replicas are for an all_reduce, not for a {self.collective.value}")
        if self.gathered and (
            self.collective is not Collective.ALL_REDUCE
            or self.chunks % self.size
            or self.replicas > 1
            or self.whole_segments
        ):
            raise ValueError(
                "gathered is for an all_reduce of equally many chunks a rank, without replicas or "
                f"whole_segments, got {self}"
            )


@lru_cache(maxsize=256)
def steps_of(schedule: Schedule, rank: int) -> tuple[Step, ...]:
    """The steps of one rank, made once."""
    return tuple(schedule.steps(rank))


@dataclass(frozen=True)
class ScatterGather:
    """An all-reduce of `size` ranks as a reduce-scatter and an all-gather.

    The reduce-scatter leaves every region of the buffer reduced on one rank, its owner; the
    all-gather sends it from there to the others. A two-level all-reduce runs another between them.

    owners: the rank that owns each region, no rank twice; ranks in none own nothing. Regions are
    equally wide, `width` chunks each. scatter, gather: the steps of a rank; each yields the same
    number for every rank.
    """

    name: str
    size: int
    owners: tuple[int, ...]
    width: int
    scatter: Callable[[int], Iterable[Step]]
    gather: Callable[[int], Iterable[Step]]

    @property
    def chunks(self) -> int:
        """Pieces of the whole buffer."""
        return len(self.owners) * self.width

    def all_reduce(self) -> Schedule:
        """One part after the other."""

        def steps(rank: int) -> Iterator[Step]:
            yield from self.scatter(rank)
            yield from self.gather(rank)

        return Schedule(self.name, self.size, self.chunks, Collective.ALL_REDUCE, steps)

    def sharded(self, shards: int) -> ScatterGather:
        """As `sharded`, for both parts."""
        if _is_one("shards", shards):
            return self
        return replace(
            self,
            name=f"{self.name}#{shards}",
            width=self.width * shards,
            scatter=lambda rank: _split(self.scatter(rank), shards),
            gather=lambda rank: _split(self.gather(rank), shards),
        )


def sharded(schedule: Schedule, shards: int) -> Schedule:
    """The same schedule on `shards` times the chunks, with every message in `shards` pieces.

    The pieces of a message are all in flight at once, so that a transport with several channels
    to a peer can use them; bytes, steps and memory are those of `schedule`, latency is paid for
    `shards` times the messages. What a rank reduces in a step stays one range.
    """
    if _is_one("shards", shards):
        return schedule
    if schedule.collective in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER):
        raise ValueError(f"{schedule.name} has one chunk a rank: it cannot be sharded")
    return replace(
        schedule,
        name=f"{schedule.name}#{shards}",
        chunks=schedule.chunks * shards,
        steps=lambda rank: _split(schedule.steps(rank), shards),
    )


def _is_one(argument: str, value: int) -> bool:
    if value < 1:
        raise ValueError(f"{argument} must be at least 1, got {value}")
    return value == 1


def _split(steps: Iterable[Step], shards: int) -> Iterator[Step]:
    def pieces(transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
        return tuple(
            Transfer(peer, start * shards + i * width, start * shards + (i + 1) * width, action)
            for peer, start, stop, action in transfers
            for width in [stop - start]
            for i in range(shards)
        )

    for step in steps:
        yield step._replace(sends=pieces(step.sends), recvs=pieces(step.recvs))
