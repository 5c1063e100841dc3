"""The bench as a user starts it: one small row, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SMALL = "bench/kernels/bench_reduction.py::test_reduction[sum_n n=2 64 KiB]"
LARGER = "bench/kernels/bench_reduction.py::test_reduction[sum_n n=2 256 KiB]"


def bench(*arguments: object, **variables: object) -> subprocess.CompletedProcess[str]:
    """Not as a worker of the pytest that runs this test: benchmarks are not timed in those."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_XDIST")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *map(str, arguments)],
        cwd=ROOT,
        env=env | {key: str(value) for key, value in variables.items()},
        capture_output=True,
        text=True,
    )


def test_a_selection_is_written_beside_a_full_run_and_not_over_it(tmp_path):
    results, own = tmp_path / "results", tmp_path / "own.json"
    run = bench(SMALL, "--benchmark-quiet", f"--benchmark-json={own}", f"--bench-results={results}")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "## sum_n" in run.stdout and "## Goals" in run.stdout
    (found,) = results.glob("*/partial/results.json")
    assert not list(results.glob("*/results.json"))
    assert not list(results.glob("*/rows.jsonl"))
    (row,) = json.loads(found.read_text())["rows"]
    assert (row["kernel"], row["label"]) == ("sum_n", "n=2 64 KiB")
    # The benchmark fixture has got the rounds that were measured, not the time of replaying them.
    (benchmark,) = json.loads(own.read_text())["benchmarks"]
    assert benchmark["stats"]["rounds"] == row["times"]["ours"]["rounds"]
    assert benchmark["stats"]["median"] == pytest.approx(row["times"]["ours"]["median"], rel=1e-4)
    assert benchmark["extra_info"]["best_peer"] in row["rivals"]


def test_a_comparison_that_was_asked_for_is_shown_also_by_make_bench(tmp_path):
    own = tmp_path / "own.json"
    assert bench(SMALL, "--benchmark-quiet", f"--benchmark-json={own}").returncode == 0
    run = bench(SMALL, "--benchmark-quiet", f"--benchmark-compare={own}")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "test_reduction[sum_n n=2 64 KiB] (NOW)" in run.stdout


def test_what_a_killed_run_has_measured_is_left(tmp_path):
    (tmp_path / "killer.py").write_text(
        "import os\n"
        "def pytest_runtest_setup(item):\n"
        "    if '256' in item.name:\n"
        "        os._exit(7)\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    options = ["-p", "killer", f"--bench-results={tmp_path}"]
    assert bench(SMALL, LARGER, *options, PYTHONPATH=path).returncode == 7
    (found,) = tmp_path.glob("*/rows.jsonl")
    (row,) = map(json.loads, found.read_text().splitlines())
    assert row["label"] == "n=2 64 KiB" and row["times"]["ours"]["median"] > 0


def test_one_row_is_chosen_by_the_name_that_tables_have():
    """With -k it cannot be: its expressions take neither spaces nor equals signs."""
    run = bench("bench/kernels", "--collect-only", "-q", "--bench-rows=sum_n n=5 16 MiB")
    rows = [line for line in run.stdout.splitlines() if "[" in line]
    assert rows == ["bench/kernels/bench_reduction.py::test_reduction[sum_n n=5 16 MiB]"], (
        run.stdout
    )


def test_with_little_time_the_rows_that_goals_single_out_come_first():
    names = [
        line.partition("[")[2]
        for line in bench(
            "bench/kernels", "--collect-only", "-q", "--bench-seconds=1"
        ).stdout.splitlines()
        if "[" in line
    ]
    place = {name.removesuffix("]"): i for i, name in enumerate(names)}
    assert len(place) > 50
    rest = place["pack aligned 64 KiB"]
    assert place["unpack 1,000 x 1 KiB"] < place["adasum fp32 64 KiB"] < rest
    assert rest < place["sum_n n=2 64 KiB"]
