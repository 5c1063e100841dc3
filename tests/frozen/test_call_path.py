"""A call is short, and goes the way that docs/architecture.md says."""

from __future__ import annotations

import re

import pytest

from tests.frozen.call_path import ROOT, Hop, all_reduce

# Python calls of kernels/, collectives/ and adasum/ in an all_reduce of 1 MiB; who makes the call
# shorter lowers the limit. Python up to 3.11 has a frame for each comprehension.
LIMITS = {"gloo": 94, "shm": 70}


@pytest.mark.parametrize("transport", LIMITS)
def test_call_is_no_longer_than_its_limit(transport: str) -> None:
    calls = all_reduce(transport)
    assert 0 < len(calls) <= LIMITS[transport], calls


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


@pytest.mark.parametrize("transport", LIMITS)
def test_table_of_a_call_names_what_the_trace_meets_in_its_order(transport: str) -> None:
    assert len(rows(transport)) >= 5
    calls = iter(all_reduce(transport))
    for row in rows(transport):
        assert any(same(row, hop) for hop in calls), f"{row} is not called after the row above"
