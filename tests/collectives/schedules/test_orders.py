"""The expression tree of an all-reduce, as `order_of` reads it off the schedule."""

from __future__ import annotations

import pytest

from collectives import order_of
from collectives.reducers import Sum
from collectives.schedules.algorithm import Order, tree_text
from collectives.schedules.topology import Topology


@pytest.mark.parametrize(("nodes", "size"), [(2, 8), (3, 12), (4, 16), (5, 10), (1, 4), (4, 4)])
def test_two_levels_on_nodes_of_a_power_of_two_are_proved_to(nodes: int, size: int) -> None:
    assert Topology(size, size // nodes).local_size in (1, 2, 4)
    for spec in ("rechd/rd", "direct/rechd", "psgpu/direct"):
        got = order_of(spec, size, order="tree", nodes=nodes)
        assert got == Order.BALANCED.tree(range(size)), spec


def test_order_of_says_how_the_operator_joins_several() -> None:
    assert order_of("rd", 4) == ((0, 1), (2, 3))
    assert order_of("psgpu", 4) == (((0, 1), 2), 3)
    assert order_of("direct", 4, Sum) == (((0, 1), 2), 3)
    assert order_of("direct", 4, order="tree") == ((0, 1), (2, 3))
    assert order_of("rechd/rd", 6, nodes=2) == (((0, 1), 2), ((3, 4), 5))


def test_tree_is_spelled_out_while_it_fits() -> None:
    assert tree_text(1) == "0"
    assert tree_text(3) == "((0·1)·2)"
    assert tree_text(8) == "(((0·1)·(2·3))·((4·5)·(6·7)))"
    assert tree_text(9) == "the balanced tree (0·1)·... over 9 ranks"
