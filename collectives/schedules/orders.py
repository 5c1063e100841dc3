"""In which order an all-reduce adds: the expression tree of its elements."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from collectives import validation
from collectives.reducers import Needs, Reducer, Sum
from collectives.schedules.levels import schedule_of
from collectives.schedules.spec import AllReduceSpec, parse_all_reduce_spec
from collectives.schedules.symbolic_step import Joins
from collectives.schedules.topology import Topology, topology_of
from collectives.schedules.verify import verify
from collectives.tree_order import in_order


def order_of(
    algorithm: str, size: int, op: Reducer = Sum, *, order: str | None = None, nodes: int = 1
) -> Any:
    """Return the expression tree of every element of an all-reduce.

    A rank is its number, and a reduction of two operands a pair. It is read off the schedule, which
    `verify` runs for all ranks on symbols: for up to some hundred of them.

    Args:
        algorithm: One range of a specification, such as "rd", "xring#2" or "rechd/rd".
        size: Number of ranks.
        op: The operator, which may join more than two operands at once.
        order: As in `Group.all_reduce`.
        nodes: Over how many nodes the ranks are spread evenly.

    Raises:
        TypeError: An argument has another type.
        ValueError: It is no such algorithm, or its elements are reduced in different orders, as in
            a ring.

    Examples:
        >>> collectives.order_of("rd", 4)
        ((0, 1), (2, 3))
    """
    validation.reducer("op", op)
    op = in_order(op, order)
    topology = topology_of(size, nodes)
    specs = parse_all_reduce_spec(algorithm)
    if len(specs) > 1 or specs[0].outer == "auto":
        raise ValueError(f"algorithm must be one algorithm, such as 'rd', got {algorithm!r}")
    return tree_of(specs[0], topology, joins_of(op), Needs.ONE_TREE in op.needs)


def joins_of(op: Reducer) -> Joins:
    """Return how an operator joins more than two operands at once."""
    if Needs.BALANCED_TREE in op.needs:
        return "tree"
    return "said" if op.reads_tree else "list"


@lru_cache(maxsize=64)
def tree_of(spec: AllReduceSpec, topology: Topology, joins: Joins, one_tree: bool = False) -> Any:
    """Return the tree of `order_of` of an algorithm on a topology; ValueError as there."""
    schedule = schedule_of(spec, topology, one_tree=one_tree)
    tree = verify(schedule, joins=joins).tree
    if tree is None:
        raise ValueError(
            f"algorithm {str(spec)!r} of {topology.size} ranks reduces its elements in different "
            "orders: use one with one order, such as 'rd'"
        )
    return tree
