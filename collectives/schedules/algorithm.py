"""The record of an all-reduce algorithm, and the check that it can carry an operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import reduce
from typing import Any, NamedTuple, Protocol

from collectives.reducers import Needs
from collectives.schedules.schedule import ScatterGather, Schedule, sharded
from collectives.schedules.topology import Topology

_SPELLED_OUT = 8


class Order(Enum):
    """The expression tree of a reduction whose result depends on the order, such as Adasum."""

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


def tree_text(size: int) -> str:
    """Return the text for the balanced tree over `size` ranks in errors."""
    if size > _SPELLED_OUT:
        pairs = "((0·1)·(2·3))" if size == 1 << (size.bit_length() - 1) else "(0·1)"
        return f"the balanced tree {pairs}·... over {size} ranks"
    return _text(Order.BALANCED.tree(range(size)))


def _text(tree: Any) -> str:
    return str(tree) if isinstance(tree, int) else f"({'·'.join(map(_text, tree))})"


class Shards(Enum):
    """The largest number of shards (`name#k`) of an algorithm."""

    ANY = "any number"
    PER_LOCAL_RANK = "one for each rank of a node"
    PER_RANK = "one for each rank"


class RoundRobin(NamedTuple):
    """The call's properties for algorithms that place shards on the ranks in turn.

    Attributes:
        tensors: The number of tensors in the buffer.
        first: The rank of the first shard, modulo the number of ranks.
    """

    tensors: int = 1
    first: int = 0


ONE_TENSOR = RoundRobin()


class Level(NamedTuple):
    """The ranks that an all-reduce runs over: all ranks, the ranks of one node, or one per node.

    Attributes:
        size: Number of ranks.
        shards: As in `name#shards`.
        topology: The nodes of the ranks; None for one rank per node.
        one_tree: Whether the operator needs the same expression tree for every element.
        round_robin: For algorithms that place shards on the ranks in turn.
    """

    size: int
    shards: int = 1
    topology: Topology | None = None
    one_tree: bool = False
    round_robin: RoundRobin = ONE_TENSOR


def by_size(make: Callable[[int], Schedule]) -> Callable[[Level], Schedule]:
    """Return a function that makes each level's sharded all-reduce from `make(size)`."""
    return lambda level: sharded(make(level.size), level.shards)


ALL = Needs.ONE_TREE | Needs.ALL_OPERANDS | Needs.BALANCED_TREE
"""Needs met by algorithms that reduce all ranks' operands at once, in rank order."""
IN_A_TREE = Needs.ONE_TREE | Needs.BALANCED_TREE
"""Needs met by algorithms that reduce pairs by the balanced tree."""


class Carrier(Protocol):
    """An algorithm or the proof of a schedule: `Algorithm`, `verify.Proof`."""

    @property
    def meets(self) -> Needs:
        """The operators' needs that it meets."""

    @property
    def by_tree(self) -> bool:
        """Whether it hands over more than two operands at once, with their tree."""


def refusal(
    carrier: Carrier, needs: Needs, reads_tree: bool, *, op: str = "it", size: int = 1
) -> str:
    """Return the reason that an algorithm or schedule cannot carry an operator; "" if it can.

    Args:
        carrier: The algorithm or schedule.
        needs: The operator's needs.
        reads_tree: Whether the operator reads trees for the tensors' dtype.
        op: The operator's name in the text; the subject of the sentence is the algorithm.
        size: Number of ranks.
    """
    lacks = needs & ~carrier.meets
    if Needs.ALL_OPERANDS in lacks:
        why = "which needs all ranks' operands at once, in rank order"
    elif Needs.BALANCED_TREE in lacks:
        why = f"which needs every element as {tree_text(size)} (order='tree')"
    elif Needs.ONE_TREE in lacks:
        why = (
            "which needs one expression tree for all elements of a segment, and in each reduction "
            "the group of ranks that hold the whole operands"
        )
    elif Needs.ONE_TREE in needs and carrier.by_tree and not reads_tree:
        why = "which does not read the trees of operands that it hands over"
    else:
        return ""
    return f"cannot carry {op}, {why}"


@dataclass(frozen=True)
class Algorithm:
    """An algorithm of the specification string.

    Attributes:
        name: The name in specifications.
        summary: A short description, as in the README's table.
        order: The order of the ranks for an operator that needs one tree; None if the algorithm
            cannot carry such an operator.
        meets: The operators' needs that it meets.
        by_tree: Whether it hands over more than two operands at once, with their tree; an operator
            that needs one tree must then read it.
        pairwise: If by_tree, the algorithm that reduces the same tree in pairs, for dtypes whose
            trees the operator does not read.
        schedule: Makes the all-reduce of each level; None for a library's own all-reduce.
        scatter_gather: Makes the same all-reduce in two parts, if it can run inside nodes.
        outer: Whether it can run across nodes.
        shards: The largest number of shards.
        on_host: Whether it reduces in host memory.
    """

    name: str
    summary: str
    order: Order | None = None
    meets: Needs = Needs.ANY_ORDER
    by_tree: bool = False
    pairwise: str | None = None
    schedule: Callable[[Level], Schedule] | None = None
    scatter_gather: Callable[[Level], ScatterGather] | None = None
    outer: bool = True
    shards: Shards = Shards.ANY
    on_host: bool = False

    @property
    def is_library(self) -> bool:
        """Whether it is a library's own all-reduce, with unknown steps."""
        return self.schedule is None

    @property
    def is_round_robin(self) -> bool:
        """Whether it places the shards of all of a call's tensors on the ranks in turn."""
        return self.shards is Shards.PER_RANK

    @property
    def inner(self) -> bool:
        """Whether it can run inside nodes: it has two parts, or is a library's."""
        return self.is_library or self.scatter_gather is not None

    def check_shards(self, shards: int, size: int, local_size: int) -> None:
        """Raise ValueError for fewer than 1 shard, or too many.

        size: The number of ranks that it runs over. local_size: Ranks per node of the topology.
        """
        most = {Shards.PER_RANK: size, Shards.PER_LOCAL_RANK: local_size}.get(self.shards)
        if shards < 1:
            raise ValueError(f"{self.name} takes at least 1 shard, got {shards}")
        # With one rank, any number of rings is allowed.
        if most is not None and shards > most and (size > 1 or self.is_round_robin):
            raise ValueError(
                f"{self.name} takes 1 to {most} shards, {self.shards.value}, got {shards}"
            )
