"""The timeline of our own: what is in it, beside a profiler, after a fork and at a full disk."""

from __future__ import annotations

import json
import logging
import multiprocessing
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import adasum as hvd
from collectives import Group, calls, run_threads, timeline
from collectives.trace import span


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    yield
    timeline.stop()


def _ranges(path: Path) -> list[dict[str, Any]]:
    return [each for each in json.loads(path.read_text(encoding="utf-8")) if each["ph"] == "X"]


def test_timeline_names_what_every_call_waited_for_and_took_by_thread(tmp_path: Path) -> None:
    path = tmp_path / "timeline.{rank}.json"

    def job(group: Group) -> None:
        if group.rank == 0:
            hvd.start_timeline(path, mark_cycles=True)
        group.barrier("started")
        # So large that the communication thread runs it.
        tensor = torch.ones(600_000)
        work = group.all_reduce(tensor, name="gradient", async_op=True)
        if group.rank:
            time.sleep(0.05)
        work.wait()
        group.all_gather(tensor, name="rows")
        group.barrier("ended")

    before = time.time() * 1e6
    run_threads(2, job)
    hvd.stop_timeline()
    hvd.stop_timeline()
    found = _ranges(tmp_path / "timeline.0.json")
    names = {each["name"] for each in found}
    for what in ("enqueue ", "negotiate ", "wait "):
        assert f"{what}all_reduce 'gradient'" in names
    assert {"negotiate all_gather 'rows'", "all_gather 'rows'"} <= names
    (reduction,) = {name for name in names if name.startswith("all_reduce 'gradient': Sum, ")}
    assert reduction.endswith(", 2400000 B")
    for each in found:
        assert before <= each["ts"] and each["ts"] + each["dur"] <= time.time() * 1e6
    # The caller waits while another thread runs the call, in ranges that lie in each other.
    threads = json.loads((tmp_path / "timeline.0.json").read_text())
    labels = {each["args"]["name"] for each in threads if each["name"] == "thread_name"}
    assert {"rank-0", "rank-1", "collectives-0", "collectives-1"} <= labels
    assert threads[0]["args"] == {"name": "rank 0"}
    # Else viewers show rank 10 before rank 2.
    assert (threads[1]["name"], threads[1]["args"]) == ("process_sort_index", {"sort_index": 0})


def test_timeline_of_a_rank_that_has_joined_names_the_calls_it_takes_part_in(
    tmp_path: Path,
) -> None:
    path = tmp_path / "timeline.json"

    def job(group: Group) -> None:
        if group.rank == 0:
            hvd.start_timeline(path)
            group.join()
            hvd.stop_timeline()
            return
        # The ranges of this rank's own calls would be in the timeline, too.
        with pytest.MonkeyPatch.context() as others:
            others.setattr(calls, "recording", lambda: False)
            group.all_gather(torch.ones(2), name="rows")
            group.join()

    run_threads(2, job)
    assert "all_gather 'rows'" in {each["name"] for each in _ranges(path)}


def test_callers_ranges_appear_in_a_running_profiler_which_the_timeline_leaves_alone(
    tmp_path: Path,
) -> None:
    def job(group: Group) -> None:
        if group.rank:
            group.all_reduce(torch.ones(10), name="gradient", async_op=True).wait()
            return
        hvd.start_timeline(tmp_path / "timeline.json")
        with torch.profiler.profile() as profiler:
            with torch.profiler.record_function("of the user"):
                group.all_reduce(torch.ones(10), name="gradient", async_op=True).wait()
            hvd.stop_timeline()
        names = {each.key for each in profiler.key_averages()}
        assert {"of the user", "enqueue all_reduce 'gradient'"} <= names
        assert "wait all_reduce 'gradient'" in names

    run_threads(2, job)
    assert _ranges(tmp_path / "timeline.json")


def test_without_a_timeline_and_a_profiler_nothing_is_named() -> None:
    def name() -> str:
        raise AssertionError("named")

    with span(name):
        pass
    assert span(name) is span(name)


def test_second_start_and_wrong_arguments_raise_and_other_ranks_write_nothing(
    tmp_path: Path,
) -> None:
    def job(group: Group) -> None:
        if group.rank == 1:
            hvd.start_timeline(tmp_path / "none.json")
            assert timeline.current is None
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

    run_threads(2, job)
    hvd.stop_timeline()
    assert [each.name for each in tmp_path.iterdir()] == ["one.json"]
    assert _ranges(tmp_path / "one.json") == []
    with pytest.raises(RuntimeError, match=r"call init\(\) first"):
        hvd.start_timeline(tmp_path / "two.json")


def _in_child() -> None:
    with span(lambda: "child"):
        pass
    timeline.stop()


def test_a_forked_process_adds_nothing_and_ends_nothing(tmp_path: Path) -> None:
    timeline.start(str(tmp_path / "timeline.json"), 0)
    with span(lambda: "before"):
        pass
    child = multiprocessing.get_context("fork").Process(target=_in_child)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    with span(lambda: "after"):
        pass
    timeline.stop()
    assert [each["name"] for each in _ranges(tmp_path / "timeline.json")] == ["before", "after"]


def test_a_full_disk_ends_the_timeline_with_a_warning_and_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    timeline.start("/dev/full", 0)
    with caplog.at_level(logging.WARNING, logger="collectives"):
        for _ in range(2000):
            with span(lambda: "range"):
                pass
        timeline.stop()
    (said,) = caplog.messages
    assert said.startswith("the timeline /dev/full ends here: ")


def test_names_are_written_in_their_own_letters(tmp_path: Path) -> None:
    """Perfetto shows JSON's escapes of them as they stand. A surrogate has no other form."""
    path = tmp_path / "timeline.json"
    timeline.start(str(path), 0)
    for name in ("Größe", "\udcff"):
        with span(lambda: name):  # noqa: B023 - called at once
            pass
    timeline.stop()
    assert '"Größe"' in path.read_text(encoding="utf-8")
    assert [each["name"] for each in _ranges(path)] == ["Größe", "\udcff"]


def _until_the_disk_is_full(path: str) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    timeline.start(path, 0)
    for _ in range(2000):
        with span(lambda: "range"):
            pass
    timeline.stop()


def test_a_disk_that_fills_leaves_whole_events(tmp_path: Path) -> None:
    """Without its end viewers read the array; Chrome's reads none with half an event."""
    path = tmp_path / "timeline.json"
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_until_the_disk_is_full, args=(str(path),))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    # What one flush writes, and not the second.
    assert len(json.loads(path.read_text() + "]")) > 400


def test_ranges_of_many_threads_are_all_written_once(tmp_path: Path) -> None:
    timeline.start(str(tmp_path / "timeline.json"), 3)

    def record(number: int) -> None:
        for i in range(500):
            with span(lambda: f"{number} {i}"):  # noqa: B023 - called at once
                pass

    threads = [threading.Thread(target=record, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    timeline.stop()
    names = [each["name"] for each in _ranges(tmp_path / "timeline.json")]
    assert sorted(names) == sorted(f"{a} {b}" for a in range(4) for b in range(500))
