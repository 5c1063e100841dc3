"""The bench as a user starts it, in a process of its own, and the choice of rows."""

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
ROWS = [f"bench/kernels/bench_reduction.py::test_reduction[sum_n n=2 {n} KiB]" for n in (64, 256)]


def bench(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run pytest, not as a worker of this pytest: workers do not time benchmarks."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_XDIST")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=env | variables, capture_output=True, text=True)


@pytest.mark.slow
def test_killed_run_is_resumed_with_what_is_left_and_reports_all(tmp_path: Path) -> None:
    killer = "import os\ndef pytest_runtest_setup(item):\n    '256' in item.name and os._exit(7)\n"
    (tmp_path / "killer.py").write_text(killer)
    own = tmp_path / "own.json"
    options = [*ROWS, "--benchmark-quiet", "--bench-resume", f"--bench-results={tmp_path}"]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    assert bench("-p", "killer", *options, PYTHONPATH=path).returncode == 7
    (left,) = tmp_path.glob("*/rows.jsonl")
    first = json.loads(left.read_text())
    done = bench(*options, f"--benchmark-json={own}")
    assert done.returncode == 0, done.stdout
    assert "## sum_n" in done.stdout and "## Goals" in done.stdout
    # A run of some rows is written beside a full one, not over it.
    (found,) = tmp_path.glob("*/partial/results.json")
    rows = json.loads(found.read_text())["rows"]
    assert [row["label"] for row in rows] == ["n=2 64 KiB", "n=2 256 KiB"] and rows[0] == first
    # The benchmark fixture has got the rounds that were measured, not the time of replaying them.
    (benchmark,) = json.loads(own.read_text())["benchmarks"]
    assert benchmark["stats"]["rounds"] == rows[1]["times"]["ours"]["rounds"]
    median = pytest.approx(rows[1]["times"]["ours"]["median"], rel=1e-4)
    assert benchmark["stats"]["median"] == median


def test_rows_are_chosen_by_name_and_by_goals() -> None:
    def collected(named: str = "", part: str | None = None) -> list[str]:
        given = {"bench_rows": named, "bench_part": part, "bench_resume": False}
        hook = SimpleNamespace(pytest_deselected=lambda items: None)
        items = [SimpleNamespace(name=f"test[{name}]") for name in conftest.POSITIONS]
        config = SimpleNamespace(getoption=given.__getitem__, hook=hook)
        conftest.pytest_collection_modifyitems(config, items)  # type: ignore[arg-type]
        return [item.name[5:-1] for item in items]

    assert collected("sum_n n=5 16 MiB") == ["sum_n n=5 16 MiB"]
    goals, others = collected(part="goals"), collected(part="others")
    assert sorted(goals + others) == sorted(conftest.POSITIONS)
    assert "adasum fp32 64 KiB" in goals and "pack aligned 64 KiB" in others
