"""The bench of a step's gradients runs, is right, and says what it ran on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.processes.harness import run_ranks


def job(rank: int, op: str, out: str) -> int:
    from bench.collectives import gradients

    return gradients.main(["--models", "lenet", "--op", op, "-n", "3", "-J", out])


@pytest.mark.parametrize("op", ["sum", "adasum"])
def test_every_way_is_right(tmp_path: Path, op: str) -> None:
    out = tmp_path / "out.json"
    assert run_ranks(2, job, op, str(out)) == [0, 0]
    answer = json.loads(out.read_text())
    assert answer["environment"]["ranks"] == 2
    rows = answer["rows"]
    assert [row["way"] for row in rows] == [
        "one by one",
        "small packed",
        "fused",
        "in place",
        "torch, one by one",
        "torch, flat buckets",
    ]
    assert all(row["right"] and row["ms"] > 0 for row in rows)
    assert {row["bytes"] for row in rows} == {4 * 6058}
    assert rows[0]["speedup"] == 1.0
