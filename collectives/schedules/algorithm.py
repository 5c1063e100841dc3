"""What the rest of the package knows of an all-reduce algorithm: its record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import reduce
from typing import Any, NamedTuple

from collectives.schedules.schedule import ScatterGather, Schedule, sharded
from collectives.schedules.topology import Topology


class Order(Enum):
    """The expression tree of a reduction whose order is part of its answer, as Adasum's is."""

    BALANCED = "as a balanced tree"
    LINE = "in rank order"

    def tree(self, leaves: Sequence[Any]) -> Any:
        """Return the leaves as nested pairs.

        LINE: ((0, 1), 2), ... BALANCED: with P the largest power of two <= n, the first 2 (n - P)
        leaves pair; then neighbours pair, then neighbouring pairs, and so on.
        """
        if self is Order.LINE:
            return reduce(lambda left, right: (left, right), leaves)
        joined = list(leaves)
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


class RoundRobin(NamedTuple):
    """What an algorithm that places shards on the ranks in turn must know of a call.

    Attributes:
        tensors: How many the buffer holds.
        first: The rank that the first shard goes to, modulo the number of ranks.
    """

    tensors: int = 1
    first: int = 0


ONE_TENSOR = RoundRobin()


class Level(NamedTuple):
    """The ranks that an all-reduce runs over: all of them, those of one node, or one a node.

    Attributes:
        shards: As in `name#shards`.
        topology: Where the ranks are; None where there is one a node.
        one_tree: Whether the operator needs the same expression tree for every element.
        round_robin: For algorithms that place shards on the ranks in turn.
        at_once: Whether the operator needs all ranks' operands in one reduction.
    """

    size: int
    shards: int = 1
    topology: Topology | None = None
    one_tree: bool = False
    round_robin: RoundRobin = ONE_TENSOR
    at_once: bool = False


class Needs(NamedTuple):
    """What an operator needs of the algorithm that carries it.

    Attributes:
        one_tree: One expression tree for all elements of a segment.
        at_once: All ranks' operands at once.
        reads_tree: Nothing more where several operands meet, as it reads their tree.
        ordered: The balanced tree for every element.
    """

    one_tree: bool = False
    at_once: bool = False
    reads_tree: bool = False
    ordered: bool = False


def by_size(make: Callable[[int], Schedule]) -> Callable[[Level], Schedule]:
    """Return what makes the all-reduce of a level, in its shards, where that goes by size."""
    return lambda level: sharded(make(level.size), level.shards)


@dataclass(frozen=True)
class Algorithm:
    """An algorithm of the specification string.

    Attributes:
        name: As in the specification.
        summary: What it does, as in the README's table.
        order: The order of the ranks for an operator that needs one tree; None where the algorithm
            cannot carry such an operator.
        all_at_once: Whether every reduction is of all ranks' operands at once, in rank order, of
            a level that is `at_once`, so that it can carry an operator that needs them so.
        by_tree: Whether more than two operands meet, whose tree a step says: an operator that needs
            one tree must then read trees.
        pairwise: Of one by_tree, the algorithm that reduces the same tree in pairs, for dtypes of
            which the operator reads none.
        schedule: Makes the all-reduce of a level; None for a library's own.
        scatter_gather: Makes the same all-reduce in two parts, where it may stand inside a node.
        outer: Whether it may stand across nodes.
        shards: How many shards it takes.
        on_host: Whether it reduces in host memory.
    """

    name: str
    summary: str
    order: Order | None
    all_at_once: bool = False
    by_tree: bool = False
    pairwise: str | None = None
    schedule: Callable[[Level], Schedule] | None = None
    scatter_gather: Callable[[Level], ScatterGather] | None = None
    outer: bool = True
    shards: Shards = Shards.ANY
    on_host: bool = False

    @property
    def is_library(self) -> bool:
        """Whether it is a library's own all-reduce, whose steps are not known."""
        return self.schedule is None

    @property
    def makes_tree(self) -> bool:
        """Whether every element is the balanced tree, or all operands meet, to be joined by it."""
        return self.order is Order.BALANCED or self.all_at_once

    @property
    def is_round_robin(self) -> bool:
        """Whether it places the shards of all tensors of a call on the ranks in turn."""
        return self.shards is Shards.PER_RANK

    @property
    def inner(self) -> bool:
        """Whether it may stand inside a node: in two parts, or a library's."""
        return self.is_library or self.scatter_gather is not None

    def carries(self, needs: Needs) -> bool:
        """Whether its schedule can carry an operator with such needs over all ranks."""
        whole = self.order is not None and (needs.reads_tree or not self.by_tree)
        return (
            not self.is_library
            and (whole or not needs.one_tree)
            and (self.all_at_once or not needs.at_once)
            and (self.makes_tree or not needs.ordered)
        )

    def most_shards(self, size: int, local_size: int) -> int | None:
        """Return the most shards that it takes, None for any number.

        size: Number of ranks that it runs over. local_size: Ranks of a node of the whole topology.
        """
        if self.shards is Shards.PER_RANK:
            return size
        return local_size if self.shards is Shards.PER_LOCAL_RANK and size > 1 else None

    def check_shards(self, shards: int, size: int, local_size: int) -> None:
        """Raise ValueError for less than 1 shard, or more than `most_shards`."""
        most = self.most_shards(size, local_size)
        if shards < 1:
            raise ValueError(f"{self.name} takes at least 1 shard, got {shards}")
        if most is not None and shards > most:
            raise ValueError(
                f"{self.name} takes 1 to {most} shards, {self.shards.value}, got {shards}"
            )
