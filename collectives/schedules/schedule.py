"""A collective as plain data: the steps of every rank.

Schedules run in lockstep: if rank r sends a message to rank q in its step t, rank q receives it in
its own step t. All messages of one step are posted together, so a schedule whose sends and receives
match step by step cannot deadlock. `verify.verify` proves that, and the result.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from collectives import validation

# Each run keeps one boundary per chunk.
MAX_CHUNKS = 1 << 20

Tree = tuple[tuple[int, int, int, int], ...]
"""The joins of a reduction's operands, like `Operands.tree`; empty: from left to right."""


class Action(Enum):
    """The receiver's use of a message; LEFT and RIGHT say which operand the message is.

    Several REDUCE receives of one range in one step form one n-way reduction. Its operands are the
    LEFT messages in the order listed, the receiver's own value, and the RIGHT messages.

    Examples:
        >>> collectives.Transfer(1, 0, 2, action=collectives.Action.REDUCE_LEFT).action
        <Action.REDUCE_LEFT: 'reduce_left'>
    """

    COPY = "copy"
    REDUCE_LEFT = "reduce_left"
    REDUCE_RIGHT = "reduce_right"


class Collective(Enum):
    """The collective that a schedule computes.

    In REDUCE_SCATTER and ALL_GATHER, chunk i is rank i's piece.

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
        leaves: For a REDUCE receive: the numbers of ranks that the receiver's own value and the
            message combine before the step; Adasum weighs both by them. None if the schedule does
            not say; `verify.with_leaves` finds out.

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
        sends: The messages to send.
        recvs: The messages to receive.
        group: The ranks, in ascending order, whose reductions of this step together cover the whole
            operands, so that a reducer can sum over all of both vectors (Adasum's dot products).
            Only this rank if it holds whole vectors, or whole segments of them. Empty if the
            operands are not whole vectors (a ring reduces another pair in every chunk): operators
            that need such sums cannot use the step. With a group, the step reduces one range, in
            ascending order if it comes in pieces.
        phase: The index of the reducer for the REDUCE receives. A two-level Adasum sums inside
            nodes in phase 0 and runs Adasum across nodes in phase 1.
        tree: The joins of the operands in each of the step's reductions, for operators that read
            trees; others join any number of operands from left to right. All ranks of the group
            have their operands in the same order.

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
    """Yield the steps in reverse order with reversed messages, to copy results back."""
    for step in reversed(list(steps)):
        yield Step(tuple(Transfer(*recv[:3]) for recv in step.recvs), step.sends)


@dataclass(frozen=True)
class Schedule:
    """A collective over `size` ranks on a buffer of `chunks` nearly equal pieces.

    `collectives.Schedule` (tools/lab.py) documents the fields for users.
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
        """The number of chunks per vector; each is 1 / parts of the buffer."""
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
    """Return the steps of one rank; cached for the latest schedules."""
    return tuple(schedule.steps(rank))


@dataclass(frozen=True)
class ScatterGather:
    """An all-reduce of `size` ranks as a reduce-scatter and an all-gather.

    The reduce-scatter reduces every region of the buffer to its owner; the all-gather sends it from
    the owner to the others. A two-level all-reduce runs another all-reduce between them.

    Attributes:
        name: The name of the algorithm.
        size: Number of ranks.
        owners: The owner of each region; ranks own at most one region.
        width: The number of chunks in each region.
        scatter: Generates the steps of the reduce-scatter for one rank, equally many for every
            rank.
        gather: The same for the all-gather.
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
        """Return the schedule of both parts, one after the other."""

        def steps(rank: int) -> Iterator[Step]:
            yield from self.scatter(rank)
            yield from self.gather(rank)

        return Schedule(self.name, self.size, self.chunks, Collective.ALL_REDUCE, steps)

    def reduce(self, root: int) -> Schedule:
        """Return the reduction to one rank: the reduce-scatter, then each owner sends its region.

        So `root` receives every byte of the other owners' results once.
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
        """Return both parts with every message in `shards` pieces, like `sharded`."""
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

    All pieces of each message are sent at once, so that a transport can use several channels to a
    peer. Raises ValueError for reduce-scatters and all-gathers, whose chunks are the ranks'.
    """
    if _is_one(shards):
        return schedule
    if schedule.collective in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER):
        raise ValueError(f"{schedule.name} has one chunk per rank: it cannot be sharded")
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
    """Return the boundaries of one piece of `split_bounds`; arguments are not checked."""
    base, longer = divmod(numel, pieces)
    start = index * base + min(index, longer)
    return start, start + base + (index < longer)


def segment_bounds(segments: Sequence[int], pieces: int) -> list[int]:
    """Return the boundaries of `split_bounds`, each moved to the nearest segment boundary.

    segments: Element boundaries (0, ..., numel), not descending. Pieces may be empty.
    """
    bounds = []
    for ideal in split_bounds(segments[-1], pieces):
        above = bisect_left(segments, ideal)
        below = max(above - 1, 0)
        nearer = ideal - segments[below] < segments[above] - ideal
        bounds.append(segments[below if nearer else above])
    return bounds
