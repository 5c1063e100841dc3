"""Ranks that call different things: one group for all cases, over shared memory and over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import mismatches
from tests.faults.cases import Case
from tests.faults.ranks import Report, carry_out
from tests.processes.nursery import nursery


@pytest.fixture(scope="module", params=["shm", "gloo"])
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Report:
    directory: Path = tmp_path_factory.mktemp("mismatches")
    case = Case("mismatch", "call", "", request.param, victim=-1, timeout=20.0, errors=())
    return carry_out(case, nursery(), directory)


def test_ranks_that_differed_end_well(report: Report) -> None:
    assert report.statuses == [0] * 3, report.said
    assert not report.left


@pytest.mark.parametrize("name", mismatches.CASES)
def test_ranks_that_differ_get_one_error(report: Report, name: str) -> None:
    lines = []
    for rank in range(3):
        found = [line for line in report.entries(rank, "mismatch") if line["case"] == name]
        assert len(found) == 1, report.said[rank]
        lines += found
    assert [line["kind"] for line in lines] == ["CollectiveMismatchError"] * 3, lines
    assert len({line["text"] for line in lines}) == 1, lines
    text = lines[0]["text"]
    # Both sides: the lowest rank's, and the first one's that differs.
    assert "ranks disagree: rank 0 " in text and f"rank {mismatches.ODD} " in text
    assert all(line["untouched"] for line in lines)
    assert all(line["after"] == [6.0] * 5 for line in lines)
