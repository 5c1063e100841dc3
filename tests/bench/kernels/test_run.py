"""The bench as a user starts it: one small row in its own process, and the choice of rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.kernels import conftest

ROOT = Path(__file__).resolve().parents[3]
SMALL = "bench/kernels/bench_reduction.py::test_reduction[sum_n n=2 64 KiB]"
LARGER = "bench/kernels/bench_reduction.py::test_reduction[sum_n n=2 256 KiB]"


def bench(*arguments: object, **variables: object) -> subprocess.CompletedProcess[str]:
    """Run pytest, not as a worker of this pytest: workers do not time benchmarks."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_XDIST")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *map(str, arguments)],
        cwd=ROOT,
        env=env | {key: str(value) for key, value in variables.items()},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_selection_of_rows_is_written_beside_a_full_run_and_not_over_it(tmp_path):
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
    assert benchmark["extra_info"]["best_peer"] in row["peers"]


@pytest.mark.slow
def test_comparison_asked_for_is_shown_although_make_bench_is_quiet(tmp_path):
    own = tmp_path / "own.json"
    assert bench(SMALL, "--benchmark-quiet", f"--benchmark-json={own}").returncode == 0
    run = bench(SMALL, "--benchmark-quiet", f"--benchmark-compare={own}")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "test_reduction[sum_n n=2 64 KiB] (NOW)" in run.stdout


@pytest.mark.slow
def test_killed_run_leaves_the_rows_it_has_measured(tmp_path):
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


@pytest.mark.slow
def test_resumed_run_measures_only_what_is_left_and_reports_all(tmp_path):
    (tmp_path / "killer.py").write_text(
        "import os\n"
        "def pytest_runtest_setup(item):\n"
        "    if '256' in item.name:\n"
        "        os._exit(7)\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    options = [SMALL, LARGER, "--benchmark-quiet", "--bench-resume", f"--bench-results={tmp_path}"]
    assert bench("-p", "killer", *options, PYTHONPATH=path).returncode == 7
    (left,) = tmp_path.glob("*/rows.jsonl")
    first = left.read_text()
    left.write_text(first + '{"kernel": "sum')
    assert bench(*options).returncode == 0
    (found,) = tmp_path.glob("*/partial/results.json")
    rows = json.loads(found.read_text())["rows"]
    assert [row["label"] for row in rows] == ["n=2 64 KiB", "n=2 256 KiB"]
    assert rows[0] == json.loads(first)
    # Killed after its last row, it has nothing left to measure and reports it.
    left.write_text(first)
    done = bench(SMALL, *options[2:])
    assert done.returncode == 0, done.stdout


def collected(*names: str, **options: object) -> list[str]:
    """Return the names of rows in the order in which they are run with these options."""
    items = [SimpleNamespace(name=f"test_reduction[{name}]") for name in names]
    given = {
        "bench_rows": "",
        "bench_seconds": None,
        "bench_part": None,
        "bench_resume": False,
    } | options
    config = SimpleNamespace(
        getoption=given.__getitem__,
        hook=SimpleNamespace(pytest_deselected=lambda items: None),
    )
    conftest.pytest_collection_modifyitems(config, items)  # type: ignore[arg-type]
    return [item.name.partition("[")[2].removesuffix("]") for item in items]


def test_rows_named_as_in_the_tables_are_the_only_ones_collected():
    names = list(conftest.POSITIONS)
    assert collected(*names, bench_rows="sum_n n=5 16 MiB") == ["sum_n n=5 16 MiB"]
    assert set(collected(*names, bench_rows="16 MiB")) == {n for n in names if "16 MiB" in n}


def test_rows_of_goals_and_the_others_are_all_rows():
    names = list(conftest.POSITIONS)
    parts = [collected(*names, bench_part=part) for part in ("goals", "others")]
    assert sorted(parts[0] + parts[1]) == sorted(names)
    assert "adasum fp32 64 KiB" in parts[0] and "pack aligned 64 KiB" in parts[1]


def test_rows_with_little_time_begin_with_those_that_goals_single_out():
    names = list(conftest.POSITIONS)
    assert collected(*names) == names
    position = {name: i for i, name in enumerate(collected(*names, bench_seconds=1.0))}
    assert set(position) == set(names) and len(names) > 50
    rest = position["pack aligned 64 KiB"]
    assert position["unpack 1,000 x 1 KiB"] < position["adasum fp32 64 KiB"] < rest
    assert rest < position["sum_n n=2 64 KiB"]
