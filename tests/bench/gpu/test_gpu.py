"""The first GPU run in one command, as far as it goes without a GPU."""

from __future__ import annotations

import dataclasses
import gc
import re
import runpy
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import processes
from bench.gpu import plan, predictions, stages
from bench.gpu.stages import FAILED, NO_GPU, NO_TIME, OK, OVERRUN, Record, Runner, Stage
from bench.processes import ROOT
from tests.processes.nursery import nursery

FACTS: dict[str, Any] = {"device": "NVIDIA Made-Up 1", "torch": "0", "nccl of cupy": 23004}
NCCL = "/new/libnccl.so.2"
STAGES = {stage.name: stage for stage in plan.stages(FACTS, NCCL)}


def test_stages_that_are_timed_are_alone_and_ranks_share_a_gpu_where_nccl_can() -> None:
    # What is timed has the device for itself.
    timed = {name for name, stage in STAGES.items() if not stage.beside}
    assert timed == {name for name in STAGES if re.match("goals|others|.*-bench|host", name)}
    for name in ("ranks-bench", "ranks-nccl", "ranks-node_memory"):
        assert STAGES[name].environment.items() >= {"LD_PRELOAD": NCCL, **plan.ONE_GPU}.items()
    old = {stage.name: stage for stage in plan.stages(FACTS | {"nccl of cupy": 22803}, None)}
    # What needs no NCCL, or one rank, runs all the same.
    assert "need NCCL 2.30" in old["ranks-bench"].left_out and old["ranks-nccl"].left_out == ""


def _run_module(words: list[str]) -> None:
    """Do as `python -m` does, in a process that has imported torch."""
    # Else libraries report at its end what the nursery has kept from being collected.
    gc.unfreeze()
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.slow
def test_every_kind_of_command_is_accepted_and_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    some = ("tests-others", "answers-gram", "goals-packing", "memcheck")
    some += ("node-bench", "ranks-bench", "host-cost")
    kinds = {name: STAGES[name].command for name in some}
    kinds["whole"] = (sys.executable, "-m", "bench.gpu", "--out", "{out}")
    running = {}
    for name, words in kinds.items():
        # compute-sanitizer is not here: what it runs is.
        words = [word.replace("{out}", str(tmp_path)) for word in words]
        dash, *own = words[words.index(sys.executable) + 1 :]
        assert dash == "-m"
        running[name] = nursery().start(f"{__name__}:_run_module", own, {}, tmp_path / name)
    for name, process in running.items():
        status = process.wait(time.monotonic() + 60.0)
        said = (tmp_path / name).read_text().splitlines()
        assert status == 2, said
        assert said[-1].endswith("torch sees no GPU here"), (name, said)
    # Those that are not run here name files that exist.
    words = {word.removeprefix("--ignore=") for stage in STAGES.values() for word in stage.command}
    assert all((ROOT / word).exists() for word in words if re.match(r"(tests|bench)/", word))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run stages in a folder of results; impatient ends."""
    monkeypatch.setattr(stages, "RESERVE", 0.0)
    ends = [(number, 0.5) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)]
    monkeypatch.setattr(processes, "ENDINGS", ends)

    def run(
        *given: Stage, seconds: float | None = None, source: str = "1", archive: Path | None = None
    ) -> list[Record]:
        def source_of(packages: tuple[str, ...]) -> str:
            return source if "kernels" in packages else "as ever"

        folder = tmp_path / "results"
        return Runner(folder, "a GPU", source_of, seconds, lambda line: None, archive).run(given)

    return run


def stage(name: str, code: str, *arguments: Path, limit: float = 30.0, needs: float = 0.0) -> Stage:
    return Stage(name, [sys.executable, "-c", code, *map(str, arguments)], needs, limit)


def test_stage_done_well_or_not_is_not_run_again_but_on_another_source(
    run: Any, tmp_path: Path
) -> None:
    count = tmp_path / "count"
    code = "import sys; open(sys.argv[1], 'a').write('x'); print('why')"
    given = [stage("good", code, count), stage("bad", code + "; sys.exit(3)", count)]
    once = run(*given)
    assert [(each.status, each.reason) for each in once] == [(OK, ""), (FAILED, "status 3: why")]
    assert run(*given) == once and count.read_text() == "xx"
    run(*given, source="2")
    assert count.read_text() == "xxxx"
    # What reads none of what has changed stays.
    bench = stage("bench", code, count)
    bench = dataclasses.replace(bench, reads=("bench",))
    assert run(bench, source="2") == run(bench, source="3")
    assert count.read_text() == "x" * 5
    gone = stage("tests", "print('torch sees no GPU here'); raise SystemExit(2)")
    assert run(gone)[0].status == NO_GPU
    assert run(stage("tests", ""))[0].status == OK


def test_stage_out_of_time_is_ended_with_all_below_it_and_goes_on_at_the_next_call(
    run: Any, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    # Deaf to requests, in a session of its own; the second call finds what the first one left.
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    code = (
        "import os, subprocess, sys, time\n"
        "if os.path.exists(sys.argv[1]): sys.exit()\n"
        f"one = subprocess.Popen([sys.executable, '-c', {deaf!r}], start_new_session=True)\n"
        "open(sys.argv[1], 'w').write(str(one.pid)); time.sleep(60)\n"
    )
    late = stage("late", code, pids, limit=2.0)
    first, second, third = run(late, stage("next", ""), stage("long", "", needs=99.0), seconds=30.0)
    assert [each.status for each in (first, second, third)] == [OVERRUN, OK, NO_TIME]
    deadline = time.monotonic() + 5.0
    stat = Path(f"/proc/{pids.read_text()}/stat")
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "a process was left behind"
        time.sleep(0.05)
    assert run(late)[0].status == OK


def test_stages_side_by_side_meet_and_are_ended_each_in_its_own_time(
    run: Any, tmp_path: Path
) -> None:
    meet = (
        "import sys, time, pathlib\n"
        "mine, other = map(pathlib.Path, sys.argv[1:]); mine.touch()\n"
        "while not other.exists(): time.sleep(0.01)\n"
    )
    files = tmp_path / "a", tmp_path / "b"
    pair = [stage("a", meet, *files), stage("b", meet, *files[::-1])]
    slow = stage("slow", "import time; time.sleep(60)", limit=3.0)
    found = run(*(dataclasses.replace(one, beside=True) for one in [slow, *pair]), stage("c", ""))
    assert [each.status for each in found] == [OVERRUN, OK, OK, OK]
    assert found[1].seconds < 3.0 <= found[0].seconds < 10.0


def test_archive_has_all_that_was_done_for_a_machine_that_has_nothing(
    run: Any, tmp_path: Path
) -> None:
    archive, count = tmp_path / "state.tar.gz", tmp_path / "count"
    code = "import sys; open(sys.argv[1], 'a').write('x'); print('said')"
    once = run(stage("one", code, count), archive=archive)
    shutil.rmtree(tmp_path / "results")
    assert run(stage("one", code, count), archive=archive) == once
    assert count.read_text() == "x"
    assert (tmp_path / "results" / "stages" / "one" / "log.txt").read_text() == "said\n"


def test_notes_quote_every_prediction() -> None:
    notes = re.sub(r"\s+", " ", (ROOT / "bench" / "NOTES.md").read_text())
    assert [each.text for each in predictions.look([], {}) if each.text not in notes] == []
