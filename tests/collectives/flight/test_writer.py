"""What a rank records and writes: its last calls in fixed memory, whatever happens to the file."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import statistics
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import collectives
from collectives import CollectiveMismatchError, Group, recorder
from collectives.tools.flight import writer
from collectives.tools.flight.analysis import Analysis
from collectives.tools.flight.reader import read
from collectives.transport import ThreadWorld

Folder = Callable[[Path | str], None]


def alone() -> Group:
    """A group of one rank."""
    return Group(ThreadWorld(1).transport(0), timeout=5.0, local_rank=0, local_size=1)


def written(group: Group, tmp_path: Path) -> dict[str, Any]:
    """What the rank's file holds."""
    path = writer.write(group._record.recorder, tmp_path / "file.json")
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


def test_call_that_was_started_says_since_when_it_was_queued(tmp_path: Path) -> None:
    group, before = alone(), time.time()
    group.all_reduce(torch.ones(1), async_op=True).wait()
    (call,) = written(group, tmp_path)["calls"]
    assert before <= call["queued"] <= call["begun"]


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
    assert not group._record.recorder.ring
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
    assert writer.write(group._record.recorder, tmp_path / "file.json") is None
    assert json.loads((tmp_path / "file.json").read_text()) == before
    assert [each.name for each in tmp_path.iterdir()] == ["file.json"]


SPECIAL: dict[str, Callable[[Path], object]] = {
    "FIFO": os.mkfifo,
    "link": lambda path: path.symlink_to("elsewhere"),
    "folder": Path.mkdir,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", SPECIAL)
def test_special_file_is_neither_opened_nor_replaced_and_the_error_stays(
    kind: str, tmp_path: Path, flight_folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    flight_folder(tmp_path)

    def main(group: Group) -> str:
        if group.rank == 0:
            SPECIAL[kind](tmp_path / writer.file_name(group._record.recorder))
        return differ(group)

    (said, _) = collectives.run_threads(2, main)
    assert "ranks disagree" in said
    assert [message for message in caplog.messages if "is not a regular file" in message]
    regular = [path for path in tmp_path.iterdir() if path.is_file() and not path.is_symlink()]
    (path,) = regular
    assert path.name.endswith("rank1.json")


def test_any_failure_of_the_tool_leaves_the_error(
    tmp_path: Path, flight_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    flight_folder(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "mkstemp", full)
        assert "ranks disagree" in collectives.run_threads(2, differ)[0]
    monkeypatch.setattr(writer, "call_failed", None)
    assert "ranks disagree" in collectives.run_threads(2, differ)[0]
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("value", [None, ""])
@pytest.mark.parametrize("state", ["another user's", "open to others", "a link", "own"])
def test_default_folder_of_others_is_not_written_to(
    value: str | None, state: str, tmp_path: Path, flight_folder: Folder,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    flight_folder("")
    if value is None:
        monkeypatch.delenv("ADASUM_FLIGHT_FOLDER")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = target = tmp_path / f"adasum-flight-{os.getuid()}"
    if state == "a link":
        target = tmp_path / "target"
        folder.symlink_to(target)
    target.mkdir(mode=0o700)
    if state == "another user's":
        uid = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: uid + 1)
        target.rename(tmp_path / f"adasum-flight-{uid + 1}")
        target = tmp_path / f"adasum-flight-{uid + 1}"
    elif state == "open to others":
        target.chmod(0o777)
    group = alone()
    group.barrier()
    path = writer.write(group._record.recorder)
    if state == "own":
        assert path is not None and Path(path).parent == target
    else:
        assert path is None and not [*target.iterdir()]
        assert "others may write to it: set ADASUM_FLIGHT_FOLDER" in caplog.messages[-1]


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
    assert {rank: dumps[rank].calls[0].name for rank in dumps} == dict.fromkeys(range(3), "loss")
    with pytest.raises(TypeError, match="path must be"):
        collectives.dump_flight_record(3)  # type: ignore[arg-type]


def test_abort_writes_the_record_of_this_rank_with_its_reason(
    tmp_path: Path, flight_folder: Folder
) -> None:
    flight_folder(tmp_path)
    returned = threading.Barrier(3)

    def main(group: Group) -> None:
        part = group.split([1, 2])
        # All ranks have left the call before one aborts, or ends.
        returned.wait(20.0)
        if group.rank == 2:
            group.abort("disk is full")
        elif group.rank == 1:
            assert part is not None
            with pytest.raises(collectives.CollectiveError, match="disk is full"):
                part.barrier()

    collectives.run_threads(3, main, timeout=10.0)
    dumps = read([str(tmp_path)])
    (culprit,) = Analysis(dumps).culprits
    assert (culprit.rank, culprit.why) == (2, "called abort(): disk is full")
    assert all(state.aborted and not state.error for state in dumps[2].groups.values())
    assert not dumps[1].groups["group"].aborted
