"""A collective as plain data: the steps of every rank.

A schedule runs in lockstep: what rank a sends to rank b in its step t, rank b receives in its own
step t. All messages of a step are posted together, so a schedule whose sends and receives match
step by step cannot deadlock. `verify.verify` proves that, and that the result is right.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from collectives import validation

# A run keeps a boundary for each chunk.
MAX_CHUNKS = 1 << 20

Tree = tuple[tuple[int, int, int, int], ...]
"""How the operands of a reduction are joined, as `Operands.tree`; empty: from left to right."""


class Action(Enum):
    """What a receiver does with a message; LEFT and RIGHT say which operand the message is.

    Several REDUCE receives of one range in one step are one n-way reduction. Its operands are the
    LEFT messages in the order listed, the receiver's own value, and the RIGHT messages.

    Examples:
        >>> collectives.Transfer(1, 0, 2, action=collectives.Action.REDUCE_LEFT).action
        <Action.REDUCE_LEFT: 'reduce_left'>
    """

    COPY = "copy"
    REDUCE_LEFT = "reduce_left"
    REDUCE_RIGHT = "reduce_right"


class Collective(Enum):
    """What a schedule computes. Rank i's piece in REDUCE_SCATTER and ALL_GATHER is chunk i.

    REDUCE leaves the result on the root; the other ranks' buffers hold partial results.

    Examples:
        >>> collectives.schedule("rd", 4).collective
        <Collective.ALL_REDUCE: 'all_reduce'>
    """

    ALL_REDUCE = "all_reduce"
    REDUCE = "reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    BROADCAST = "broadcast"


class Transfer(NamedTuple):
    """Chunks [start, stop) to or from `peer`.

    Attributes:
        peer: The other rank.
        start: The first chunk.
        stop: One more than the last chunk.
        action: For a receive.
        leaves: For a REDUCE receive: how many ranks stand behind the receiver's own value before
            the step, and how many behind the message, by which Adasum weighs both. None if the
            schedule does not say; `verify.with_leaves` finds out.

    Examples:
        >>> collectives.Transfer(peer=1, start=0, stop=2)
        Transfer(peer=1, start=0, stop=2, action=<Action.COPY: 'copy'>, leaves=None)
    """

    peer: int
    start: int
    stop: int
    action: Action = Action.COPY
    leaves: tuple[int, int] | None = None


class Step(NamedTuple):
    """The messages that one rank exchanges at once.

    Attributes:
        sends: The messages that it sends.
        recvs: The messages that it receives.
        group: The ranks, in ascending order, whose reductions of this step together cover the whole
            operands, so that a reducer can sum over all of both vectors (Adasum's dot products). A
            rank that holds whole vectors, or whole segments of them, is a group by itself. Empty if
            the operands are not whole vectors (a ring reduces another pair in every chunk):
            operators that need such sums cannot use the step. A rank with a group reduces one
            range, in ascending order if it comes in pieces.
        phase: Which of the run's reducers the REDUCE receives use. A two-level Adasum sums inside a
            node in phase 0 and runs Adasum across nodes in phase 1.
        tree: How the operands of each of the step's reductions are joined, for operators that read
            trees; others join any number of operands from left to right. Ranks of a group have
            their operands in one order.

    Examples:
        >>> step = next(collectives.schedule("rd", 2).steps(0))
        >>> step.sends[0].peer, step.recvs[0].action
        (1, <Action.REDUCE_RIGHT: 'reduce_right'>)
    """

    sends: tuple[Transfer, ...] = ()
    recvs: tuple[Transfer, ...] = ()
    group: tuple[int, ...] = ()
    phase: int = 0
    tree: Tree = ()


IDLE = Step()


def back(steps: Iterable[Step]) -> Iterator[Step]:
    """Yield the steps with every message the other way, the last first: what takes results back."""
    for step in reversed(list(steps)):
        yield Step(tuple(Transfer(*recv[:3]) for recv in step.recvs), step.sends)


@dataclass(frozen=True)
class Schedule:
    """A collective over `size` ranks on a buffer of `chunks` nearly equal pieces.

    What its fields mean is said where users get it, at `collectives.Schedule` (tools/lab.py).
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
        """Number of chunks of one vector; each is 1 / parts of the buffer."""
        return self.chunks // self.size if self.gathered else self.chunks

    def __post_init__(self) -> None:
        for name in ("size", "chunks", "replicas"):
            validation.integer(name, getattr(self, name), 1)
        if self.chunks > MAX_CHUNKS:
            raise ValueError(
                f"chunks must be at most {MAX_CHUNKS}, {self.name} has {self.chunks}: use fewer "
                "shards, or larger chunks"
            )
        validation.rank("root", self.root, self.size)
        validation.instance("collective", self.collective, Collective, "a Collective")
        if self.size % self.replicas:
            raise ValueError(f"replicas must divide size {self.size}, got {self.replicas}")
        if self.replicas > 1 and self.collective is not Collective.ALL_REDUCE:
            raise ValueError(f"replicas are for an all_reduce, not for a {self.collective.value}")
        plain = self.collective is Collective.ALL_REDUCE and self.replicas == 1
        if self.gathered and (self.chunks % self.size or self.whole_segments or not plain):
            raise ValueError(
                "gathered is for an all_reduce of equally many chunks a rank, without replicas or "
                f"whole_segments, got {self}"
            )


@lru_cache(maxsize=256)
def steps_of(schedule: Schedule, rank: int) -> tuple[Step, ...]:
    """Return the steps of one rank, kept for the latest schedules."""
    return tuple(schedule.steps(rank))


@dataclass(frozen=True)
class ScatterGather:
    """An all-reduce of `size` ranks as a reduce-scatter and an all-gather.

    The reduce-scatter leaves every region of the buffer reduced on its owner; the all-gather sends
    it from there to the others. A two-level all-reduce runs another all-reduce between them.

    Attributes:
        name: The algorithm's.
        size: Number of ranks.
        owners: The rank that owns each region; no rank owns two, and some may own none.
        width: Chunks of a region, equally many in each.
        scatter: Generates a rank's steps of the reduce-scatter, equally many for every rank.
        gather: The same of the all-gather.
    """

    name: str
    size: int
    owners: tuple[int, ...]
    width: int
    scatter: Callable[[int], Iterable[Step]]
    gather: Callable[[int], Iterable[Step]]

    @property
    def chunks(self) -> int:
        """Number of pieces of the whole buffer."""
        return len(self.owners) * self.width

    def all_reduce(self) -> Schedule:
        """Return the schedule of one part after the other."""

        def steps(rank: int) -> Iterator[Step]:
            yield from self.scatter(rank)
            yield from self.gather(rank)

        return Schedule(self.name, self.size, self.chunks, Collective.ALL_REDUCE, steps)

    def reduce(self, root: int) -> Schedule:
        """Return the reduction to one rank: the reduce-scatter, and a step in which owners send it.

        Each sends `root` its region: of those that other ranks own it receives every byte once.
        """

        def steps(rank: int) -> Iterator[Step]:
            yield from self.scatter(rank)
            regions = {
                owner: Transfer(owner if rank == root else root, start, start + self.width)
                for start, owner in zip(range(0, self.chunks, self.width), self.owners, strict=True)
                if owner != root
            }
            if rank == root:
                yield Step(recvs=tuple(regions.values()))
            else:
                yield Step(sends=(regions[rank],) if rank in regions else ())

        name = f"{self.name} reduce"
        return Schedule(name, self.size, self.chunks, Collective.REDUCE, steps, root=root)

    def sharded(self, shards: int) -> ScatterGather:
        """Return both parts with every message in `shards` pieces, as `sharded` does."""
        if _is_one(shards):
            return self
        return replace(
            self,
            name=f"{self.name}#{shards}",
            width=self.width * shards,
            scatter=lambda rank: _split(self.scatter(rank), shards),
            gather=lambda rank: _split(self.gather(rank), shards),
        )


def sharded(schedule: Schedule, shards: int) -> Schedule:
    """Return the schedule on `shards` times the chunks, with every message in `shards` pieces.

    All pieces of a message are sent at once, so that a transport can use several channels to a
    peer. A schedule of exactly one chunk per rank is a ValueError.
    """
    if _is_one(shards):
        return schedule
    if schedule.collective in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER):
        raise ValueError(f"{schedule.name} has one chunk a rank: it cannot be sharded")
    return replace(
        schedule,
        name=f"{schedule.name}#{shards}",
        chunks=schedule.chunks * shards,
        steps=lambda rank: _split(schedule.steps(rank), shards),
    )


def _is_one(shards: int) -> bool:
    validation.integer("shards", shards, 1)
    return shards == 1


def _split(steps: Iterable[Step], shards: int) -> Iterator[Step]:
    def pieces(transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
        return tuple(
            one._replace(
                start=one.start * shards + i * width, stop=one.start * shards + (i + 1) * width
            )
            for one in transfers
            for width in [one.stop - one.start]
            for i in range(shards)
        )

    for step in steps:
        yield step._replace(sends=pieces(step.sends), recvs=pieces(step.recvs))


def split_bounds(numel: int, pieces: int) -> list[int]:
    """Return the `pieces + 1` boundaries of consecutive pieces of `numel` elements.

    Sizes differ by at most one, the larger pieces come first, and pieces may be empty.

    Raises:
        TypeError: An argument is not an int.
        ValueError: `numel` is negative, or `pieces` less than 1.

    Examples:
        >>> collectives.split_bounds(10, 4)
        [0, 3, 6, 8, 10]
    """
    validation.integer("numel", numel, 0)
    validation.integer("pieces", pieces, 1)
    base, longer = divmod(numel, pieces)
    return [i * base + min(i, longer) for i in range(pieces + 1)]


def piece_bounds(numel: int, pieces: int, index: int) -> tuple[int, int]:
    """Return the boundaries of one piece of `split_bounds`; the arguments are not checked."""
    base, longer = divmod(numel, pieces)
    start = index * base + min(index, longer)
    return start, start + base + (index < longer)


def segment_bounds(segments: Sequence[int], pieces: int) -> list[int]:
    """Return the boundaries of `split_bounds`, each moved to the nearest boundary of a segment.

    segments: Element boundaries (0, ..., numel), not descending. Pieces may be empty.
    """
    bounds = []
    for ideal in split_bounds(segments[-1], pieces):
        above = bisect_left(segments, ideal)
        below = max(above - 1, 0)
        nearer = ideal - segments[below] < segments[above] - ideal
        bounds.append(segments[below if nearer else above])
    return bounds
