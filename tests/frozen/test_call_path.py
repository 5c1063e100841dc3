"""A call is short: frames and files to the wire, and Python calls in all, against limits.

The figures are of functions in kernels/, collectives/ and adasum/ alone. What torch puts between
them, and the wrapper that has torch.compile leave a function alone, are in the path that the trace
prints.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

import pytest

from tests.frozen.call_path import ROOT, Hop, Trace, all_reduce, gradient_hook


class Limit(NamedTuple):
    """What a figure may be, and what it is to become: who makes the call shorter lowers the limit.

    Python up to 3.11 has a frame for each comprehension; later ones have fewer.
    """

    limit: int
    goal: int


# 1 MiB of float32, Sum, 2 ranks; and a gradient's hook to the start of its bucket's request.
LIMITS: dict[str, dict[str, Limit]] = {
    "gloo": {
        "frames": Limit(10, 10),
        "files": Limit(5, 5),
        "calls": Limit(94, 92),
    },
    "shm": {"calls": Limit(70, 69)},
    "gradient": {"frames": Limit(8, 8), "files": Limit(5, 5)},
}
TRACES: dict[str, Callable[[], Trace]] = {
    "gloo": lambda: all_reduce("gloo"),
    "shm": lambda: all_reduce("shm"),
    "gradient": gradient_hook,
}


@pytest.mark.parametrize("name", LIMITS)
def test_call_is_no_longer_than_its_limits(name: str) -> None:
    trace = TRACES[name]()
    figures = trace.figures()
    over = {
        figure: (figures[figure], limit)
        for figure, (limit, _) in LIMITS[name].items()
        if not 0 < figures[figure] <= limit
    }
    assert not over, f"(found, limit): {over} on {trace.ours}"


def rows(transport: str) -> list[Hop]:
    """The files and functions of architecture.md, of a call over gloo or in shared memory."""
    text = (ROOT / "docs" / "architecture.md").read_text().split("## A call, file by file")[1]
    tables = [each for each in text.split("\n\n") if each.startswith("| file |")]
    table = tables[("gloo", "shm").index(transport)]
    return [Hop(*row) for row in re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", table, re.MULTILINE)]


def same(row: Hop, hop: Hop) -> bool:
    """Before Python 3.11 a trace has no classes' names."""
    named = row.function if "." in hop.function else row.function.rpartition(".")[2]
    return (row.file, named) == hop


def first_not_met(table: Iterable[Hop], order: Iterable[Hop]) -> Hop | None:
    """The first row that no call follows the one before it with."""
    calls = iter(order)
    return next((row for row in table if not any(same(row, hop) for hop in calls)), None)


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_table_of_a_call_names_what_the_trace_meets_in_its_order(transport: str) -> None:
    assert len(rows(transport)) >= 5
    assert first_not_met(rows(transport), all_reduce(transport).order) is None


def test_table_of_a_call_has_every_file_on_the_way_to_the_wire() -> None:
    missing = {hop.file for hop in all_reduce("gloo").ours} - {row.file for row in rows("gloo")}
    assert not missing


def test_table_in_another_order_and_with_another_name_is_seen() -> None:
    a, b, c = Hop("kernels/a.py", "A.f"), Hop("kernels/b.py", "g"), Hop("kernels/c.py", "h")
    assert first_not_met([a, c], [a, b, c]) is None
    assert first_not_met([c, a], [a, b, c]) == a
    assert first_not_met([a, b._replace(function="f")], [a, b, c]) == b._replace(function="f")
    assert first_not_met([a], [a._replace(function="f")]) is None
