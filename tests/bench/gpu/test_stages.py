"""The runner of stages, with small stages: done, failed, too long, out of time, interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from bench.gpu import stages
from bench.gpu.stages import (
    FAILED,
    LEFT_OUT,
    NO_GPU,
    NO_TIME,
    OK,
    OVERRUN,
    RUNNING,
    Record,
    Runner,
    Stage,
)

PYTHON = sys.executable
# Counts its runs in a file that is not its own.
COUNTING = "import sys; open(sys.argv[1], 'a').write('x')"


def stage(name: str, code: str, *arguments: object, **options: object) -> Stage:
    given = {"estimate": 0.0, "limit": 30.0} | options
    return Stage(name, [PYTHON, "-c", code, *map(str, arguments)], **given)  # type: ignore[arg-type]


class Bench:
    """Runs stages in a folder, again and again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []

    def run(
        self, *given: Stage, seconds: float | None = None, device: str = "a GPU", source: str = "1"
    ) -> list[Record]:
        runner = Runner(self.folder, device, source, seconds, self.said.append)
        return runner.run(given)

    def on_disk(self, name: str) -> dict[str, object]:
        return json.loads((self.folder / "stages" / f"{name}.json").read_text())


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "results")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "RESERVE", 0.0)
    endings = ((signal.SIGINT, 1.0), (signal.SIGTERM, 1.0), (signal.SIGKILL, 1.0))
    monkeypatch.setattr(stages, "_ENDINGS", endings)


def test_stage_that_fails_is_recorded_and_the_next_one_runs(bench: Bench) -> None:
    wrong = stage("wrong", "import sys; print('why'); sys.exit(3)")
    first, second = bench.run(wrong, stage("next", "print('fine')"))
    assert (first.status, first.reason) == (FAILED, "status 3: why")
    assert (second.status, second.reason) == (OK, "")
    assert bench.on_disk("wrong")["status"] == FAILED
    assert (bench.folder / "stages" / "next" / "log.txt").read_text() == "fine\n"
    assert [line.split()[:2] for line in bench.said] == [["wrong", "failed"], ["next", "ok"]]


def test_stage_that_saw_no_gpu_is_no_result_and_runs_again(bench: Bench) -> None:
    gone = stage("tests", "print('torch sees no GPU here'); raise SystemExit(2)")
    assert bench.run(gone)[0].status == NO_GPU
    assert bench.run(stage("tests", ""))[0].status == OK
    # Status 2 alone is as good a failure as any.
    assert bench.run(stage("other", "import sys; sys.exit(2)"))[0].status == FAILED


def test_stage_whose_command_is_missing_fails(bench: Bench) -> None:
    (record,) = bench.run(Stage("gone", ["/no/such/program"], 0.0, 1.0))
    assert record.status == FAILED and "/no/such/program" in record.reason


def test_record_is_on_disk_before_the_next_stage_begins(bench: Bench) -> None:
    look = "import sys, json; assert json.load(open(sys.argv[1]))['status'] == 'ok'"
    path = bench.folder / "stages" / "first.json"
    assert [r.status for r in bench.run(stage("first", ""), stage("second", look, path))] == [
        OK,
        OK,
    ]


def test_second_call_skips_what_is_done_well_or_not(bench: Bench, tmp_path: Path) -> None:
    count = tmp_path / "count"
    given = [
        stage("good", COUNTING, count),
        stage("bad", COUNTING + "; sys.exit(1)", count),
    ]
    once, again = bench.run(*given), bench.run(*given)
    assert count.read_text() == "xx"
    assert once == again


@pytest.mark.parametrize("change", [{"device": "another GPU"}, {"source": "2"}])
def test_other_device_or_source_runs_it_again_in_an_empty_folder(
    bench: Bench, tmp_path: Path, change: dict[str, str]
) -> None:
    given = stage("one", COUNTING, tmp_path / "count")
    bench.run(given)
    left = bench.folder / "stages" / "one" / "rows.jsonl"
    left.write_text("of the other")
    bench.run(given, **change)
    assert (tmp_path / "count").read_text() == "xx"
    assert not left.exists()


def test_stage_that_takes_too_long_is_ended_with_all_below_it(bench: Bench, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    # One of its group, one in a session of its own, and all deaf to requests.
    code = textwrap.dedent(
        """
        import os, signal, subprocess, sys, time
        deaf = (
            "import signal, time\\n"
            "signal.signal(signal.SIGINT, signal.SIG_IGN)\\n"
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\\n"
            "time.sleep(60)"
        )
        made = [
            subprocess.Popen([sys.executable, "-c", deaf], start_new_session=own)
            for own in (False, True)
        ]
        with open(sys.argv[1] + ".tmp", "w") as file:
            file.write(" ".join(str(each.pid) for each in made))
        os.rename(sys.argv[1] + ".tmp", sys.argv[1])
        exec(deaf)
        """
    )
    late = stage("late", code, pids, limit=2.0)
    begin = time.monotonic()
    first, second = bench.run(late, stage("next", ""))
    assert (first.status, second.status) == (OVERRUN, OK)
    assert first.reason == "after 2 s"
    assert time.monotonic() - begin < 20.0
    deadline = time.monotonic() + 5.0
    for pid in map(int, pids.read_text().split()):
        while _lives(pid):
            assert time.monotonic() < deadline, f"process {pid} was left behind"
            time.sleep(0.05)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_stage_that_took_too_long_runs_again_and_finds_what_it_wrote(bench: Bench) -> None:
    code = (
        "import os, sys, time\n"
        "path = os.path.join(sys.argv[1], 'rows')\n"
        "found = os.path.exists(path)\n"
        "open(path, 'w').close()\n"
        "time.sleep(0 if found else 60)"
    )
    given = stage("rows", code, "{out}", limit=2.0)
    assert [bench.run(given)[0].status for _ in range(2)] == [OVERRUN, OK]


def test_stage_is_not_begun_where_its_estimate_does_not_fit(bench: Bench, tmp_path: Path) -> None:
    count = tmp_path / "count"
    long = stage("long", COUNTING, count, estimate=100.0)
    short = stage("short", COUNTING, count, estimate=1.0)
    first, second = bench.run(long, short, seconds=30.0)
    assert (first.status, second.status) == (NO_TIME, OK)
    assert first.reason == "100 s are needed, 30 are left"
    assert count.read_text() == "x"
    assert [r.status for r in bench.run(long, short)] == [OK, OK]
    assert count.read_text() == "xx"


def test_stage_is_ended_when_the_whole_time_has_passed(bench: Bench) -> None:
    begin = time.monotonic()
    (record,) = bench.run(stage("long", "import time; time.sleep(60)"), seconds=1.5)
    assert record.status == OVERRUN
    assert time.monotonic() - begin < 15.0


def test_stage_that_had_no_time_again_keeps_its_earlier_record(bench: Bench) -> None:
    given = stage("rows", "import time; time.sleep(60)", limit=1.0, estimate=5.0)
    bench.run(given)
    assert bench.run(given, seconds=2.0)[0].status == NO_TIME
    assert bench.on_disk("rows")["status"] == OVERRUN


def test_stage_that_cannot_run_here_is_left_out_with_its_reason(bench: Bench) -> None:
    (record,) = bench.run(stage("mpi", "", left_out="no such library"))
    assert (record.status, record.reason) == (LEFT_OUT, "no such library")


def test_runner_that_is_killed_leaves_a_record_that_runs_again(
    bench: Bench, tmp_path: Path
) -> None:
    script = tmp_path / "runner.py"
    script.write_text(
        "import signal, sys\n"
        "from pathlib import Path\n"
        "from bench.gpu.stages import Runner, Stage\n"
        # A shell that starts tests in the background ignores it, and so would the runner.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "command = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "Runner(Path(sys.argv[1]), 'a GPU', '1', None, print)"
        ".run([Stage('one', command, 0.0, 60.0)])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(stages.ROOT)}
    runner = subprocess.Popen([PYTHON, str(script), str(bench.folder)], env=environment)
    path = bench.folder / "stages" / "one.json"
    deadline = time.monotonic() + 20.0
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    # Ctrl-C reaches the runner alone; the stage must end with it.
    runner.send_signal(signal.SIGINT)
    runner.wait(30.0)
    assert bench.on_disk("one")["status"] == RUNNING
    assert bench.run(stage("one", ""))[0].status == OK
