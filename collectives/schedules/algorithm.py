"""The record of an all-reduce algorithm: all that the rest of the package knows of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives.schedules.schedule import ScatterGather, Schedule
from collectives.schedules.topology import Topology

Ints = NDArray[np.int64]


class Order(Enum):
    """The expression tree of a reduction whose order is part of its answer, as Adasum's is."""

    BALANCED = "as a balanced tree"
    LINE = "in rank order"

    def tree(self, leaves: Sequence[Any]) -> Any:
        """The leaves as nested pairs.

        LINE: ((0, 1), 2), ... BALANCED: with P the largest power of two <= n, the first 2 (n - P)
        leaves pair; then neighbours pair, then neighbouring pairs, and so on.
        """
        joined = list(leaves)
        if self is Order.LINE:
            while len(joined) > 1:
                joined[:2] = [(joined[0], joined[1])]
            return joined[0]
        extra = len(joined) - (1 << (len(joined).bit_length() - 1))
        joined[: 2 * extra] = [(joined[2 * i], joined[2 * i + 1]) for i in range(extra)]
        while len(joined) > 1:
            joined = list(zip(joined[::2], joined[1::2], strict=True))
        return joined[0]


class Shards(Enum):
    """How many shards (`name#k`) an algorithm takes at most."""

    ANY = "any number"
    PER_LOCAL_RANK = "one for each rank of a node"
    PER_RANK = "one for each rank"


class Level(NamedTuple):
    """The ranks that an all-reduce runs over: all of them, those of one node, or one a node.

    topology: where the ranks are, None where they are one a node. one_tree: whether the operator
    needs the same expression tree for every element.
    """

    size: int
    shards: int = 1
    topology: Topology | None = None
    one_tree: bool = False


class BulkStep(NamedTuple):
    """The messages of one step, of all ranks at once: a row a message.

    source, target: ranks. share: of the buffer, in each message. ways: how many received messages
    make one reduction with this one (1 where ranks reduce in pairs), 0 for a copy. times: how many
    such steps follow each other. members: the groups of the step's reductions, one a row.
    """

    source: Ints
    target: Ints
    share: float
    ways: Ints | int = 0
    times: int = 1
    members: Ints | None = None

    def sharded(self, shards: int) -> BulkStep:
        """The same with every message in so many pieces."""
        ways = np.tile(self.ways, shards) if isinstance(self.ways, np.ndarray) else self.ways
        source, target = np.tile(self.source, shards), np.tile(self.target, shards)
        return self._replace(source=source, target=target, share=self.share / shards, ways=ways)


class ClosedForm(NamedTuple):
    """A schedule's steps for all ranks at once, for sizes at which walking the ranks takes hours.

    scatter, gather: the steps of a ScatterGather; all steps are in scatter where the algorithm is
    none. owners: of the ScatterGather's regions, in ascending order. gathered: as in a Schedule.
    """

    scatter: Sequence[BulkStep]
    gather: Sequence[BulkStep] = ()
    owners: Ints | None = None
    gathered: bool = False

    def sharded(self, shards: int) -> ClosedForm:
        """The same with every message in so many pieces."""
        scatter, gather = (
            [step.sharded(shards) for step in steps] for steps in (self.scatter, self.gather)
        )
        return self._replace(scatter=scatter, gather=gather)


@dataclass(frozen=True)
class Algorithm:
    """One name of the specification string.

    summary: what it does, as the README's table says. order: of the ranks where the operator needs
    one tree; None where the algorithm cannot carry such an operator. schedule: the all-reduce of a
    level, None for a library's own. closed_form: that schedule's, with about so many steps looked
    at in a long pipeline; the tests hold it to the schedule. scatter_gather: the same all-reduce in
    two parts, where it may stand inside a node. outer: whether it may stand across nodes. shards:
    how many it takes. on_host: whether it reduces in host memory.
    """

    name: str
    summary: str
    order: Order | None
    schedule: Callable[[Level], Schedule] | None = None
    closed_form: Callable[[Level, int], ClosedForm] | None = None
    scatter_gather: Callable[[Level], ScatterGather] | None = None
    outer: bool = True
    shards: Shards = Shards.ANY
    on_host: bool = False

    @property
    def is_library(self) -> bool:
        """Whether it is a library's own all-reduce, whose steps are not known."""
        return self.schedule is None

    @property
    def inner(self) -> bool:
        """Whether it may stand inside a node: in two parts, or a library's."""
        return self.is_library or self.scatter_gather is not None

    def most_shards(self, size: int, local_size: int) -> int | None:
        """The most shards it takes over `size` ranks; None for any number.

        local_size: of a node of the whole topology.
        """
        if self.shards is Shards.PER_RANK:
            return size
        return local_size if self.shards is Shards.PER_LOCAL_RANK and size > 1 else None

    def check_shards(self, shards: int, size: int, local_size: int) -> None:
        """Raise ValueError for more shards than it takes over `size` ranks."""
        most = self.most_shards(size, local_size)
        if shards < 1:
            raise ValueError(f"{self.name} takes at least 1 shard, got {shards}")
        if most is not None and shards > most:
            raise ValueError(
                f"{self.name} takes 1 to {most} shards, {self.shards.value}, got {shards}"
            )


__all__ = ["Algorithm", "BulkStep", "ClosedForm", "Ints", "Level", "Order", "Shards"]
