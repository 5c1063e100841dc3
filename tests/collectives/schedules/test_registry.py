"""One record an algorithm: names, the guide and schedules follow from it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from adasum import Adasum
from collectives import order_of
from collectives.schedules.algorithm import Order
from collectives.schedules.registry import ALGORITHMS, LIBRARIES, ORDERED, SCHEDULES
from collectives.schedules.spec import INNER, ONE_LEVEL, OUTER, parse_all_reduce_spec

GUIDE = Path(__file__).parents[3] / "docs" / "collectives.md"


def _table() -> dict[str, list[str]]:
    """The cells behind each name of the guide's table of algorithms."""
    _, _, rest = GUIDE.read_text().partition("| name | what it does | carries Adasum |\n")
    lines = rest.partition("\n\n")[0].splitlines()[1:]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {row[0].strip("`").removesuffix("#k"): row[1:] for row in rows}


def test_table_is_the_registry() -> None:
    table = _table()
    assert list(table) == ["auto", *ALGORITHMS, "inner/outer"]
    for name, record in ALGORITHMS.items():
        carries = "no" if record.order is None else record.order.value
        assert table[name] == [record.summary, carries]
    inner, outer = (re.findall("`([^`]+)`", cell) for cell in table["inner/outer"])
    assert inner == [name for name, record in ALGORITHMS.items() if record.inner]
    assert outer == [name for name in ORDERED if ALGORITHMS[name].outer]


def test_names_of_the_specification_are_the_records() -> None:
    assert set(ONE_LEVEL) == {"auto", *ALGORITHMS}
    for name, record in ALGORITHMS.items():
        assert name == record.name
        assert parse_all_reduce_spec(name)[0].alg == name
        assert (name in INNER, name in OUTER) == (record.inner, record.outer)
        assert record.is_library == (record.schedule is None)
        assert not (record.is_library and record.order)
    assert {*SCHEDULES, *LIBRARIES} == {*ALGORITHMS}


@pytest.mark.parametrize("name", ORDERED)
def test_order_of_the_record_is_the_tree_of_the_schedule(name: str) -> None:
    order = ALGORITHMS[name].order
    assert order is not None
    for size in (*range(1, 10), 12, 17):
        for spec in (name, f"{name}#{min(size, 3)}"):
            assert order_of(spec, size, Adasum) == order.tree(range(size))


def test_orders_are_the_trees_promised() -> None:
    assert Order.LINE.tree(range(4)) == (((0, 1), 2), 3)
    assert Order.BALANCED.tree(range(4)) == ((0, 1), (2, 3))
    # The first ranks beyond a power of two pair first.
    assert Order.BALANCED.tree(range(6)) == (((0, 1), (2, 3)), (4, 5))
    assert Order.BALANCED.tree(range(5)) == (((0, 1), 2), (3, 4))
    assert Order.LINE.tree("a") == Order.BALANCED.tree("a") == "a"
