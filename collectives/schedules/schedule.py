"""Schedules: a collective as plain data, one step after the other for every rank.

A schedule runs in lockstep: what rank a sends to rank b in its step t, rank b receives in its own
step t. All messages of a step are posted together, so a schedule whose sends and receives match
step by step cannot deadlock. `proof.verify` proves that, and that the answer is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
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
    whole operands; empty when the operands are not one pair of vectors (a ring reduces another
    pair in every chunk), in which case reducers that need whole-vector sums cannot use the step.
    What a rank with a group reduces is one range, in ascending order where it comes in pieces.
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
    boundaries, so that every reduction holds whole segments and needs no group. replicas: each run
    of so many consecutive ranks starts with one and the same contribution (its node's).
    """

    name: str
    size: int
    chunks: int
    collective: Collective
    steps: Callable[[int], Iterable[Step]] = field(repr=False)
    root: int = 0
    whole_segments: bool = False
    replicas: int = 1

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


@lru_cache(maxsize=256)
def steps_of(schedule: Schedule, rank: int) -> tuple[Step, ...]:
    """The steps of one rank, made once."""
    return tuple(schedule.steps(rank))
