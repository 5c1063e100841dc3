"""What the algorithms are put together from: two halves of an all-reduce, and messages in shards.

The first half of an all-reduce leaves every region of the buffer reduced on one rank, its owner;
the second sends it from there to the others. A two-level all-reduce runs another between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from collectives.schedules.schedule import Collective, Schedule, Step, Transfer


@dataclass(frozen=True)
class Halves:
    """An all-reduce of `size` ranks as reduce-scatter and all-gather.

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
        """One half after the other."""

        def steps(rank: int) -> Iterator[Step]:
            yield from self.scatter(rank)
            yield from self.gather(rank)

        return Schedule(self.name, self.size, self.chunks, Collective.ALL_REDUCE, steps)

    def sharded(self, shards: int) -> Halves:
        """As `sharded`, for both halves."""
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
