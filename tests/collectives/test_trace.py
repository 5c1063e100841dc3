"""Ranges of reductions in torch.profiler's timelines, and Horovod's names for such a timeline."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import adasum as hvd
from collectives import Group, run_threads
from collectives.recorder import recording


def _names(path: Path) -> list[str]:
    """The names of all ranges in a file."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return [each["name"] for each in events if each["ph"] == "X"]


def test_timeline_names_what_the_caller_queued_and_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "timeline.{rank}.json"

    def job(group: Group) -> None:
        if group.rank:
            group.all_reduce(torch.ones(600_000), name="gradient", async_op=True).wait()
            return
        hvd.start_timeline(path, mark_cycles=True)
        # So large that the communication thread runs it.
        group.all_reduce(torch.ones(600_000), name="gradient", async_op=True).wait()
        hvd.stop_timeline()
        hvd.stop_timeline()

    run_threads(2, job)
    names = _names(tmp_path / "timeline.0.json")
    assert "wait all_reduce 'gradient'" in names
    assert [each.name for each in tmp_path.iterdir()] == ["timeline.0.json"]


def test_timeline_has_the_reduction_if_the_caller_runs_it(tmp_path: Path) -> None:
    def job(group: Group) -> None:
        group.all_reduce(torch.ones(2), name="before")
        if group.rank == 0:
            hvd.start_timeline(tmp_path / "timeline.json")
        group.all_reduce(torch.ones(600), name="gradient")
        if group.rank == 0:
            hvd.stop_timeline()

    run_threads(2, job)
    names = _names(tmp_path / "timeline.json")
    (reduction,) = {name for name in names if name.startswith("all_reduce 'gradient': Sum, ")}
    assert reduction.endswith(", 2400 B")
    assert "negotiate all_reduce 'gradient'" in names
    assert not any("before" in name for name in names)


def test_second_start_and_wrong_arguments_raise_and_other_ranks_write_nothing(
    tmp_path: Path,
) -> None:
    def job(group: Group) -> None:
        if group.rank == 1:
            hvd.start_timeline(tmp_path / "none.json")
            assert not recording()
        group.barrier()
        if group.rank == 0:
            with pytest.raises(TypeError, match="file_path must be of type str or PathLike"):
                hvd.start_timeline(3)  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="mark_cycles must be of type bool"):
                hvd.start_timeline("x", mark_cycles=1)  # type: ignore[arg-type]
            with pytest.raises(FileNotFoundError):
                hvd.start_timeline(tmp_path / "no" / "folder.json")
            hvd.start_timeline(str(tmp_path / "one.json"))
            with pytest.raises(ValueError, match=r"one\.json: call stop_timeline\(\) first"):
                hvd.start_timeline(tmp_path / "two.json")
            with ThreadPoolExecutor() as pool:
                stopped = pool.submit(hvd.stop_timeline)
            with pytest.raises(RuntimeError, match="in the thread that called start_timeline"):
                stopped.result()
            hvd.stop_timeline()

    run_threads(2, job)
    assert [each.name for each in tmp_path.iterdir()] == ["one.json"]
    _names(tmp_path / "one.json")
    with pytest.raises(RuntimeError, match=r"call adasum.init\(\)"):
        hvd.start_timeline(tmp_path / "two.json")


def test_timeline_beside_another_profiler_is_an_error_that_leaves_it_alone(tmp_path: Path) -> None:
    def job(group: Group) -> set[str]:
        with torch.profiler.profile() as profiler:
            with pytest.raises(ValueError, match=r"a torch\.profiler is running"):
                hvd.start_timeline(tmp_path / "timeline.json")
            with torch.profiler.record_function("of the user"):
                group.barrier()
        hvd.stop_timeline()
        return {each.key for each in profiler.key_averages()}

    assert "of the user" in run_threads(1, job)[0]
