"""The bench as a user starts it: one small row, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_a_selection_is_written_beside_a_full_run_and_not_over_it(tmp_path):
    results, own = tmp_path / "results", tmp_path / "own.json"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "bench/bench_reduction.py::test_reduction[sum_n n=2 64 KiB]",
    ]
    command += ["-p", "no:cacheprovider", "--benchmark-quiet", f"--benchmark-json={own}"]
    # Not as a worker of the pytest that runs this test: benchmarks are not timed in those.
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_XDIST")}
    run = subprocess.run(
        [*command, f"--bench-results={results}"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "## sum_n" in run.stdout and "## Goals" in run.stdout
    (found,) = results.glob("*/partial/results.json")
    assert not list(results.glob("*/results.json"))
    (row,) = json.loads(found.read_text())["rows"]
    assert (row["kernel"], row["label"]) == ("sum_n", "n=2 64 KiB")
    # The benchmark fixture has got the rounds that were measured, not the time of replaying them.
    (benchmark,) = json.loads(own.read_text())["benchmarks"]
    assert benchmark["stats"]["rounds"] == row["times"]["ours"]["rounds"]
    assert benchmark["stats"]["median"] == pytest.approx(row["times"]["ours"]["median"], rel=1e-4)
    assert benchmark["extra_info"]["best_peer"] in row["rivals"]
