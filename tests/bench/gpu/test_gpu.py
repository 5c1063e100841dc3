"""The first GPU run in one command, as far as it goes without a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import __main__ as command
from bench.gpu import machine, page, plan, sanitized
from bench.gpu.predictions import MISSED, PREDICTIONS, Measured
from bench.gpu.stages import FAILED, NO_TIME, OK, ROOT, Record, Stage
from bench.kernels import report
from bench.kernels.judging import MET, NOT_MEASURED
from tests.bench.kernels.test_report import row_of

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
FACTS: dict[str, Any] = {
    "device": "NVIDIA Made-Up 1",
    "torch": "0",
    "nccl of cupy": 23004,
    "why no nccl of cupy": "",
}


def by_name(facts: dict[str, Any], nccl: str | None = None) -> dict[str, Stage]:
    return {stage.name: stage for stage in plan.stages(facts, nccl)}


def test_stages_come_in_the_order_of_their_worth() -> None:
    assert [*by_name(FACTS)] == [
        "smoke",
        *("tests-projection", "tests-reduction", "tests-others"),
        *("goals-projection", "goals-packing", "goals-reduction"),
        *("ranks-bench", "ranks-tests"),
        *("others-projection", "others-packing", "others-reduction"),
        *("memcheck", "racecheck"),
    ]


def test_ranks_share_a_gpu_by_the_library_that_was_given() -> None:
    stages = by_name(FACTS, "/new/libnccl.so.2")
    for name in ("ranks-bench", "ranks-tests"):
        environment = stages[name].environment
        assert environment["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
        assert environment["NCCL_MAX_CTAS"] == "4"
        assert environment["LD_PRELOAD"] == "/new/libnccl.so.2"
    assert "LD_PRELOAD" not in by_name(FACTS)["ranks-bench"].environment


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"nccl of cupy": 22803}, "NCCL 2.30 or newer, this is code 22803: give --nccl"),
        ({"nccl of cupy": 0, "why no nccl of cupy": "no cupy"}, "no cupy"),
    ],
)
def test_ranks_do_not_share_a_gpu_where_nccl_is_older_or_missing(
    facts: dict[str, Any], reason: str
) -> None:
    stages = by_name(FACTS | facts)
    assert stages["ranks-bench"].left_out.endswith(reason)
    # What needs no NCCL, or one rank, runs all the same.
    assert stages["ranks-tests"].left_out == ""


def test_sanitizer_that_is_not_installed_leaves_its_stages_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    if not Path("/usr/local/cuda/bin/compute-sanitizer").exists():
        assert by_name(FACTS)["memcheck"].left_out == "compute-sanitizer is not installed"
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.write_text("")
    tool.chmod(0o755)
    stage = by_name(FACTS)["memcheck"]
    assert stage.left_out == "" and stage.command[0] == str(tool)


@NO_GPU
def test_without_a_gpu_the_command_says_so_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu", "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "bench.gpu: torch sees no GPU here\n"
    assert [*tmp_path.iterdir()] == []


@NO_GPU
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in by_name(FACTS) if name != "smoke"])
def test_command_of_a_stage_without_a_gpu_says_so(name: str, tmp_path: Path) -> None:
    stage = by_name(FACTS)[name]
    arguments = [part.replace("{out}", str(tmp_path)) for part in stage.command]
    # compute-sanitizer is not here: what it runs is.
    arguments = arguments[arguments.index(sys.executable) :]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    assert len(said) == 1 and "torch sees no GPU here" in said[0]


@NO_GPU
@pytest.mark.slow
def test_command_of_the_smoke_stage_without_a_gpu_says_so() -> None:
    done = subprocess.run(
        by_name(FACTS)["smoke"].command, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1] == "smoke test of the GPU: left out, torch sees no GPU here"


def test_program_for_the_sanitizer_runs_every_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert sanitized.main("cpu", (1, 100, 1001)) == 0
    assert len(capsys.readouterr().out.splitlines()) == 8


def test_source_differs_where_a_file_does(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    file = tmp_path / "kernels" / "a.py"
    file.write_text("1")
    before = machine.source_of(tmp_path)
    (tmp_path / "notes.md").write_text("no source")
    assert machine.source_of(tmp_path) == before
    file.write_text("2")
    assert machine.source_of(tmp_path) != before


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Stage]:
    """Pretend facts and stages; the stages are the list's, and results go to tmp_path."""
    stages: list[Stage] = []
    monkeypatch.setattr(command, "facts", lambda environment: FACTS)
    monkeypatch.setattr(command, "source_of", lambda: "1")
    monkeypatch.setattr(command, "stages", lambda facts, nccl: stages)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    return stages


def test_status_says_whether_all_is_done_and_right(on_a_gpu: list[Stage], tmp_path: Path) -> None:
    out = ["--out", str(tmp_path)]
    good = Stage("good", [sys.executable, "-c", ""], 0.0, 20.0)
    long = Stage("long", [sys.executable, "-c", ""], 1000.0, 20.0)
    bad = Stage("bad", [sys.executable, "-c", "raise SystemExit('not right')"], 0.0, 20.0)
    on_a_gpu[:] = [good]
    assert command.main(out) == 0
    on_a_gpu[:] = [good, long]
    assert command.main([*out, "--minutes", "2"]) == 3
    on_a_gpu[:] = [good, long, bad]
    assert command.main([*out, "--minutes", "2"]) == 1
    assert command.main([*out, "--minutes", "2", "--only", "long"]) == 3
    text = (tmp_path / "page.md").read_text()
    assert "| long " in text and NO_TIME in text


@pytest.mark.slow
def test_command_that_is_terminated_ends_its_stage(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    script = tmp_path / "command.py"
    script.write_text(
        "import sys\n"
        "from bench.gpu import __main__ as command\n"
        "from bench.gpu.stages import Stage\n"
        f"command.facts = lambda environment: {FACTS!r}\n"
        f"stage = Stage('one', [sys.executable, '-c', {code!r}], 0.0, 60.0)\n"
        "command.stages = lambda facts, nccl: [stage]\n"
        f"command.main(['--out', {str(tmp_path / 'out')!r}])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, str(script)], env=environment)
    deadline = time.monotonic() + 60.0
    while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    assert process.wait(60.0) == 143
    assert not Path(f"/proc/{pid.read_text()}").exists()


def test_fresh_runs_what_is_done(on_a_gpu: list[Stage], tmp_path: Path) -> None:
    count = tmp_path / "count"
    code = f"open({str(count)!r}, 'a').write('x')"
    on_a_gpu[:] = [Stage("one", [sys.executable, "-c", code], 0.0, 20.0)]
    out = ["--out", str(tmp_path / "out")]
    for _ in range(2):
        command.main(out)
    assert count.read_text() == "x"
    command.main([*out, "--fresh"])
    assert count.read_text() == "xx"


def test_library_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--nccl", "/no/libnccl.so.2"])
    assert "there is no file /no/libnccl.so.2" in capsys.readouterr().err


def records() -> list[Record]:
    common = {"device": "d", "source": "s", "command": [], "began": "now"}
    return [
        Record("smoke", OK, 12.0, "", **common),
        Record("tests-kernels", FAILED, 30.0, "status 1: 1 failed", **common),
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder: one stage of rows that ended, one that was killed, tests, ranks."""
    stages = tmp_path / "stages"
    for name in ("smoke", "tests-kernels", "ranks-bench"):
        (stages / name).mkdir(parents=True)
    (stages / "smoke" / "log.txt").write_text("ok       adasum      1.0 s\n")
    (stages / "tests-kernels" / "junit.xml").write_text(
        '<testsuites><testsuite><testcase classname="t" name="good"/>'
        '<testcase classname="t" name="bad"><failure message="not\nright"/></testcase>'
        '<testcase classname="t" name="none"><skipped/></testcase></testsuite></testsuites>'
    )
    meta = {"device": "d", "kind": "cuda", "torch": "0", "date": "never"}
    report.write([row_of()], meta, stages / "goals-packing" / "made-up" / "partial")
    killed = row_of(kernel="unpack", ours=100e-6)
    report.append(killed, stages / "goals-reduction" / "made-up", first=True)
    ranks = [
        {"algorithm": name, "ranks": 2, "size": 1 << 26, "median": seconds, "wrong": 0}
        for name, seconds in (("nccl", 1e-3), ("vhdd", 1.2e-3))
    ]
    (stages / "ranks-bench" / "ranks.json").write_text(json.dumps({"results": ranks}))
    return tmp_path


def test_page_has_stages_predictions_tests_and_rows(folder: Path) -> None:
    meta = {**FACTS, "commit": "abc", "date": "never"}
    written = page.write(folder, records(), meta)
    names = {path.name for path in written}
    assert {"page.md", "page.json", "results.json", "tables.md"} <= names
    text = (folder / "page.md").read_text()
    for part in (
        "# NVIDIA Made-Up 1",
        "| tests-kernels | failed | 30 | status 1: 1 failed |",
        "ok       adasum      1.0 s",
        "1 passed, 1 failed, 1 skipped.",
        "- `t::bad`: not right",
        "64 MiB | 1200 |",
    ):
        assert part in text, part
    # The rows of both stages, though one was killed.
    rows = json.loads((folder / "results.json").read_text())["rows"]
    assert {row["kernel"] for row in rows} == {"pack", "unpack"}
    found = json.loads((folder / "page.json").read_text())["predictions"]
    assert {each["status"] for each in found.values()} == {MET, MISSED, NOT_MEASURED}


def test_page_of_a_run_without_results_measures_nothing(tmp_path: Path) -> None:
    page.write(tmp_path, [], {**FACTS, "commit": "abc", "date": "never"})
    found = json.loads((tmp_path / "page.json").read_text())["predictions"]
    assert {each["status"] for each in found.values()} == {NOT_MEASURED}
    assert not (tmp_path / "tables.md").exists()


@pytest.mark.parametrize(
    ("seconds", "wrong", "status"), [(1.25e-3, 0, MET), (1.26e-3, 0, MISSED), (1e-3, 1, MISSED)]
)
def test_adasum_between_ranks_is_held_against_nccls_sum(
    seconds: float, wrong: int, status: str
) -> None:
    (prediction,) = (each for each in PREDICTIONS if "vhdd" in each.text)
    ranks = {"nccl": {"median": 1e-3, "wrong": 0}, "vhdd": {"median": seconds, "wrong": wrong}}
    assert prediction.look(Measured([], ranks)).status == status


def test_prediction_of_a_goal_is_met_or_missed_by_its_own_bound() -> None:
    (prediction,) = (each for each in PREDICTIONS if "chain of additions" in each.text)
    for chain, status in ((380e-6, MISSED), (390e-6, MET)):
        row = row_of(kernel="sum_n", **{"chain of adds": chain})
        row = type(row)(**{**vars(row), "tensors": 8, "peers": ["chain of adds"]})
        assert prediction.look(Measured([row], {})).status == status
    assert prediction.bound == 3.0


def test_notes_quote_every_prediction() -> None:
    notes = re.sub(r"\s+", " ", (ROOT / "bench" / "NOTES.md").read_text())
    assert [each.text for each in PREDICTIONS if each.text not in notes] == []
