"""What a rank records and writes: its last calls in fixed memory, whatever happens to the file."""

from __future__ import annotations

import gc
import json
import logging
import os
import statistics
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import collectives
from collectives import CollectiveMismatchError, Group
from collectives.flight import dump, recorder
from collectives.flight.files import read
from collectives.reducers import SumReducer
from collectives.transport import ThreadWorld

Folder = Callable[[Path | str], None]


def alone() -> Group:
    """A group of one rank."""
    return Group(ThreadWorld(1).transport(0), timeout=5.0, local_rank=0, local_size=1)


def written(group: Group, tmp_path: Path) -> dict[str, Any]:
    """What the rank's file holds."""
    path = dump.write(group._record.recorder, "a test", tmp_path / "file.json")
    assert path == str(tmp_path / "file.json")
    said: dict[str, Any] = json.loads(Path(path).read_text())
    return said


def test_file_has_what_was_called_by_which_name_on_what_and_when(tmp_path: Path) -> None:
    group, before = alone(), time.time()
    group.all_reduce(torch.ones(2, 3), name="loss")
    group.grouped_all_reduce([torch.ones(i) for i in range(9)])
    group.barrier()
    group.close()
    said = written(group, tmp_path)
    first, second, third = said["calls"]
    assert (first["kind"], first["name"], first["number"]) == ("all_reduce", "loss", 0)
    assert first["tensors"] == ["shape (2, 3) torch.float32 cpu"]
    assert second["tensors"][-1] == "and 5 more" and len(second["tensors"]) == 5
    assert (third["kind"], third["tensors"], third["number"]) == ("barrier", [], 2)
    for call in said["calls"]:
        assert call["state"] == "done" and call["group"] == "group"
        assert before <= call["begun"] <= call["negotiated"] <= call["ended"] <= time.time()
    assert said["groups"][0]["last"] == third and said["groups"][0]["closed"]


def test_calls_beyond_the_last_256_are_forgotten_in_fixed_memory(tmp_path: Path) -> None:
    group = alone()
    tensor = torch.ones(3)
    died = weakref.ref(tensor)
    group.all_reduce(tensor, name="x" * 1000)
    del tensor
    gc.collect()
    assert died() is None
    for _ in range(recorder.CALLS + 44):
        group.grouped_all_reduce([torch.ones(1)] * 1 + [torch.ones(2) for _ in range(30)])
    said = written(group, tmp_path)
    assert [each["number"] for each in said["calls"]] == [*range(45, recorder.CALLS + 45)]
    ring = group._record.recorder.ring
    assert len(ring) == recorder.CALLS
    assert all(each and len(each[recorder.SHAPES]) <= recorder.TENSORS + 1 for each in ring)
    assert (tmp_path / "file.json").stat().st_size < 1000 * recorder.CALLS


def test_long_names_and_errors_are_cut(tmp_path: Path) -> None:
    group = alone()
    group.barrier("y" * 10_000)
    call = written(group, tmp_path)["calls"][0]
    assert call["name"] == "y" * recorder.CHARACTERS


def test_recording_takes_little_time() -> None:
    """A microsecond where nothing else runs; here also with other tests on the same cores."""
    group = alone()

    def seconds(on: bool) -> float:
        group._record.on = on
        start = time.thread_time()
        for _ in range(300):
            group.barrier()
        return (time.thread_time() - start) / 300

    pairs = [seconds(True) - seconds(False) for _ in range(21)]
    assert statistics.median(pairs) < 10e-6


def test_queued_calls_are_listed(tmp_path: Path) -> None:
    started, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        started.set()
        assert go_on.wait(20.0)

    group = alone()
    held = group.all_reduce(torch.ones(1), async_op=True)
    held.wait()
    group._calls.queue._worker.submit(hold)
    assert started.wait(20.0)
    works = [group.all_reduce(torch.ones(1), name=f"queued {i}", async_op=True) for i in range(40)]
    said = written(group, tmp_path)["groups"][0]
    go_on.set()
    for work in works:
        work.wait()
    assert said["queued_count"] == 40 and len(said["queued"]) == 16
    assert said["queued"][0]["name"] == "queued 0"
    assert written(group, tmp_path)["groups"][0]["queued_count"] == 0
    assert written(group, tmp_path)["calls"][-1]["queued"] > 0


def differ(group: Group) -> str:
    """Make another call than the other ranks, and then the same."""
    with pytest.raises(CollectiveMismatchError) as raised:
        group.all_reduce(torch.ones(2 + group.rank), name="loss")
    group.barrier()
    return str(raised.value)


def test_mismatch_is_written_by_every_rank(tmp_path: Path, flight_folder: Folder) -> None:
    flight_folder(tmp_path)
    (said, _) = collectives.run_threads(2, differ)
    dumps = read([str(tmp_path)])
    assert sorted(dumps) == [0, 1]
    for dumped in dumps.values():
        (call,) = dumped.calls
        assert call.error == f"CollectiveMismatchError: {said}"
    assert dumps[0].calls[0].code != dumps[1].calls[0].code
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())


def test_switched_off_nothing_is_recorded_or_written(
    tmp_path: Path, flight_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flight_folder("0")
    collectives.run_threads(2, differ)
    group = alone()
    group.barrier()
    assert group._record.recorder.calls() == []
    assert collectives.dump_flight_record(tmp_path / "file.json") == []
    assert not list(tmp_path.iterdir())


def test_file_that_cannot_be_written_is_a_warning_and_the_error_stays(
    tmp_path: Path, flight_folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    flight_folder(tmp_path / "file" / "folder")
    (said, _) = collectives.run_threads(2, differ)
    assert "ranks disagree" in said
    assert [each.levelno for each in caplog.records] == [logging.WARNING] * 2
    assert "cannot write its flight record" in caplog.messages[0]


def test_file_is_replaced_as_a_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = alone()
    group.barrier()
    before = written(group, tmp_path)

    def refuse(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(os, "replace", refuse)
    group.barrier()
    assert dump.write(group._record.recorder, "a test", tmp_path / "file.json") is None
    assert json.loads((tmp_path / "file.json").read_text()) == before
    assert [each.name for each in tmp_path.iterdir()] == ["file.json"]


def test_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    group, pipe = alone(), tmp_path / "pipe"
    group.barrier()
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert dump.write(group._record.recorder, "a test", pipe) == str(pipe)
    assert json.loads(os.read(reader, 1 << 16))["calls"][0]["kind"] == "barrier"
    os.close(reader)
    assert pipe.is_fifo()


def test_record_is_written_on_demand_for_each_rank_of_the_process(tmp_path: Path) -> None:
    def main(group: Group) -> list[str]:
        group.all_reduce(torch.ones(1), name="loss")
        group.barrier()
        written = (
            collectives.dump_flight_record(tmp_path / "{rank}.json") if group.rank == 0 else []
        )
        group.barrier()
        return written

    (paths, *_) = collectives.run_threads(3, main)
    assert {str(tmp_path / f"{rank}.json") for rank in range(3)} <= {*paths}
    dumps = read([str(tmp_path / f"{rank}.json") for rank in range(3)])
    assert {rank: dumps[rank].calls[0].title for rank in dumps} == dict.fromkeys(
        range(3), "all_reduce 'loss'"
    )
    with pytest.raises(TypeError, match="path must be"):
        collectives.dump_flight_record(3)  # type: ignore[arg-type]


def test_text_of_another_librarys_error_is_not_kept(tmp_path: Path, flight_folder: Folder) -> None:
    class Secret(SumReducer):
        reduces_in_shared_memory = False

        def reduce(self, operands: Any) -> None:
            # On one rank: the other one gets it as the reason why that has ended.
            if threading.current_thread().name == "rank-0":
                raise ValueError("a user's data")
            super().reduce(operands)

    def main(group: Group) -> None:
        with pytest.raises((ValueError, collectives.CollectiveError), match="a user's data"):
            group.all_reduce(torch.ones(3), Secret(), algorithm="xring")

    flight_folder(tmp_path)
    collectives.run_threads(2, main, timeout=5.0)
    texts = [path.read_text() for path in tmp_path.iterdir()]
    assert texts and not any("a user's data" in text for text in texts)


def test_groups_of_a_part_have_names_that_are_the_same_on_all_ranks(tmp_path: Path) -> None:
    def main(group: Group) -> list[tuple[str, tuple[int, ...]]]:
        parts = [group.split([2, 1]), group.split([0, 2]), group.split([2, 1])]
        inner = parts[0].split([0]) if parts[0] else None
        groups = [each for each in (*parts, inner) if each]
        return [(each._record.name, each._record.ranks) for each in groups]

    names = collectives.run_threads(3, main)
    assert names == [
        [("group/1", (0, 2))],
        [("group/0", (2, 1)), ("group/2", (2, 1))],
        [("group/0", (2, 1)), ("group/1", (0, 2)), ("group/2", (2, 1)), ("group/0/0", (2,))],
    ]


def test_closed_groups_are_forgotten_but_the_latest() -> None:
    group = alone()
    for _ in range(40):
        part = group.split([0])
        assert part is not None
        part.close()
    assert len(group._record.recorder.groups) < 15
