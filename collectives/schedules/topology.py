"""The topology: equal nodes of consecutive ranks, and the orders in which rings visit them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from collectives import validation
from collectives.errors import compact

# Beyond the largest machines; a topology holds and errors name each rank.
_MOST_RANKS = 2**24


@dataclass(frozen=True)
class Topology:
    """`size` ranks on nodes of `local_size` each; node w holds [w·local_size, (w+1)·local_size).

    Attributes:
        size: Number of ranks.
        local_size: Ranks per node.
        local_order: The order in which rings visit the local ranks: the fastest links should join
            neighbours. By default 0, 1, 2, ....
        uneven: The ranks of each real node, if these are not equal runs of consecutive ranks:
            algorithms then see one rank per node, and two levels are an error.

    Raises:
        TypeError: A field has another type; the error names it.
        ValueError: The ranks do not fill equal nodes, or local_order is not a permutation.

    Examples:
        >>> topology = collectives.Topology(size=6, local_size=3)
        >>> topology.local_order
        (0, 1, 2)
    """

    size: int
    local_size: int
    local_order: tuple[int, ...] = ()
    uneven: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        validation.integer("size", self.size, 1)
        if self.size > _MOST_RANKS:
            raise ValueError(f"size must be at most {_MOST_RANKS} ranks, got {self.size}")
        validation.integer("local_size", self.local_size, 1)
        if self.size % self.local_size:
            raise ValueError(
                f"local_size {self.local_size} does not divide size {self.size}: "
                "every node must hold the same number of ranks"
            )
        order = _order(self.local_order) or tuple(range(self.local_size))
        _require_order(order, self.local_size)
        object.__setattr__(self, "local_order", order)

    def require_even(self, algorithm: str) -> None:
        """Raise ValueError for an algorithm of two levels if nodes are uneven; it names them."""
        if self.uneven:
            nodes = ", ".join(f"node {w} has {_text(own)}" for w, own in enumerate(self.uneven))
            raise ValueError(
                f"algorithm {algorithm!r} reduces on two levels, for which every node must hold "
                f"equally many consecutive ranks: {nodes}; start equally many ranks on every node, "
                "numbered node by node, or use one level"
            )

    @property
    def num_nodes(self) -> int:
        """The number of nodes that algorithms see."""
        return self.size // self.local_size

    def node_of(self, rank: int) -> int:
        """Return the rank's node."""
        validation.rank("rank", rank, self.size)
        return rank // self.local_size

    def local_rank_of(self, rank: int) -> int:
        """Return the rank's number on its node, from 0."""
        validation.rank("rank", rank, self.size)
        return rank % self.local_size

    def ranks_of(self, node: int) -> range:
        """Return the node's ranks."""
        if not 0 <= node < self.num_nodes:
            raise ValueError(f"node must be from 0 to {self.num_nodes - 1}, got {node}")
        return range(node * self.local_size, (node + 1) * self.local_size)

    def node(self) -> Topology:
        """Return the topology of one node."""
        return Topology(self.local_size, self.local_size, self.local_order)

    def ring_orders(self, shards: int = 1) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each of `shards` rings in order; see `ring_permutations`."""
        return _ring_orders(self.num_nodes, shards, self.local_order)


def topology_of(size: int, nodes: int) -> Topology:
    """Return `size` ranks on equal nodes; raise ValueError if they do not fill them."""
    validation.integer("size", size, 1)
    validation.integer("nodes", nodes, 1)
    if size % nodes:
        raise ValueError(f"nodes must divide size {size}, got {nodes}")
    return Topology(size, size // nodes)


def ring_permutations(
    num_nodes: int, shards: int, local_order: Sequence[int]
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the rings of `shards` shards over `num_nodes` nodes.

    Node w contributes w·n + i for i in `local_order`, rotated left by shard · max(1, n // shards),
    so that shards cross from node to node at different local ranks.

    Args:
        num_nodes: Nodes of n ranks each.
        shards: The number of rings, at most n unless there is only one rank.
        local_order: A permutation of 0, ..., n - 1.

    Returns:
        (pred, rank), both indexed [shard][global rank]: the rank before this one on the shard's
        ring, and this rank's position on it.

    Raises:
        TypeError: A number is not an int.
        ValueError: local_order is not a permutation, or there are more shards than n.

    Examples:
        >>> collectives.ring_permutations(num_nodes=2, shards=1, local_order=[0, 1, 2])
        ([[5, 0, 1, 2, 3, 4]], [[0, 1, 2, 3, 4, 5]])
    """
    orders = _ring_orders(num_nodes, shards, _order(local_order))
    pred = [[0] * len(order) for order in orders]
    position = [[0] * len(order) for order in orders]
    for shard, order in enumerate(orders):
        for at, rank in enumerate(order):
            pred[shard][rank] = order[at - 1]
            position[shard][rank] = at
    return pred, position


def _ring_orders(
    num_nodes: int, shards: int, local_order: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    validation.integer("num_nodes", num_nodes, 1)
    validation.integer("shards", shards, 0)
    local_size = len(local_order)
    _require_order(local_order, local_size)
    # Each ring starts at another local rank.
    if shards > local_size and num_nodes * local_size > 1:
        raise ValueError(
            f"{shards} ring shards need as many ranks on every node, which has {local_size}: "
            f"use at most {local_size}"
        )
    turn = max(1, local_size // max(1, shards))
    orders = []
    for shard in range(shards):
        first = shard * turn % max(1, local_size)
        rotated = local_order[first:] + local_order[:first]
        orders.append(tuple(w * local_size + i for w in range(num_nodes) for i in rotated))
    return tuple(orders)


def _text(ranks: Sequence[int]) -> str:
    """Return a text for ranks in errors, in ascending order, with runs as ranges."""
    return f"rank{'s' if len(ranks) > 1 else ''} {compact(ranks)}"


def _order(order: Any) -> tuple[int, ...]:
    if isinstance(order, torch.Tensor):
        raise TypeError("local_order must be a list of ranks, got Tensor: pass its tolist()")
    validation.instance("local_order", order, Iterable, "a list of ranks")
    return tuple(order)


def _require_order(order: tuple[int, ...], size: int) -> None:
    for i in order:
        validation.integer("local_order's members", i, 0)
    if sorted(order) != list(range(size)):
        raise ValueError(f"local_order must be a permutation of 0 to {size - 1}, got {order}")
