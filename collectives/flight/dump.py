"""Write a rank's record to a file: JSON, at once and whole, and never an error of its own."""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

from collectives.errors import CollectiveError, CollectiveMismatchError
from collectives.flight.ranks import runs
from collectives.flight.recorder import (
    BEGUN,
    CHARACTERS,
    CODE,
    ENDED,
    ERROR,
    GROUP,
    KIND,
    NAME,
    NEGOTIATED,
    NUMBER,
    QUEUED,
    SHAPES,
    UNRECORDED,
    GroupRecord,
    Record,
    Recorder,
    folder,
    of_process,
    recorders,
)

__all__ = ["FORMAT", "dump_flight_record"]

_logger = logging.getLogger(__name__)
# Of the files; another one where their meaning changes.
FORMAT = 1
_ERROR_CHARACTERS, _ENDED = 600, 4
# What a file has at the most, so that its size is bounded.
_GROUPS, _QUEUED, _STACK, _LATE_CHARACTERS = 64, 16, 30, 10_000
# The variables that are the same on all ranks of a job, and seldom those of another job.
_JOB = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
_started = time.time()


def dump_flight_record(path: str | os.PathLike[str] | None = None) -> list[str]:
    """Write what this process's ranks did last, as after a collective's error; return the files.

    A file has the last 256 calls of a rank: what was called, by which name, shapes, dtypes, times
    and errors, and for which ranks it waits. `python -m collectives.flight FILES` joins the files
    of all ranks. Nothing is sent, and nobody is waited for: it may be called at any time, in any
    thread. It never raises for a file that cannot be written; a WARNING says why.

    Args:
        path: The file, which is overwritten. In it "{rank}" stands for the rank's number, where
            ranks are threads of this process. Unless given, a file in the folder that the
            environment variable ADASUM_FLIGHT_FOLDER names.

    Returns:
        The files that were written: one for each rank, so one in a process that is a rank. None
        with ADASUM_FLIGHT_FOLDER=0, which switches the recorder off, and before there is a group.

    Raises:
        TypeError: `path` is not a path.
    """
    if path is not None and not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must be a str, a path or None, got {type(path).__name__}")
    return dump_all("a call of dump_flight_record", path)


def dump_all(
    why: str, path: str | os.PathLike[str] | None = None, stack: Sequence[str] = ()
) -> list[str]:
    """Write the files of all ranks of this process; return them."""
    # Ranks that are threads are gone with their groups. The latest last: its file stays, where an
    # earlier one that nobody has closed has the same name.
    ranks = [each for each in list(recorders) if each.is_in_use() or each is of_process]
    ranks = sorted((each for each in ranks if each.groups), key=lambda each: each.made)
    written = [write(each, why, path, stack) for each in ranks]
    return sorted({each for each in written if each})


def failed(
    group: GroupRecord, record: Record, error: BaseException, code: Callable[[], int]
) -> None:
    """Note a call's error and write the rank's file; never raises.

    record: The call's. code: Returns a hash of what ranks compare of the call.
    """
    if not group.on:
        return
    said = _said(error)
    ends = not isinstance(error, CollectiveMismatchError)
    if ends:
        group.error = group.error or said
    if record is not UNRECORDED:
        record[ERROR] = said
        with suppress(Exception):
            record[CODE] = code()
    path = write(group.recorder, "an error")
    # After a mismatch the program may go on, and the error itself says what it was.
    if path and ends:
        _logger.warning(
            "rank %s failed in a collective, and wrote what it did last to %s: "
            "python -m collectives.flight %s names the rank at fault, once all have",
            group.recorder.rank,
            path,
            os.path.join(os.path.dirname(path), "*.json"),
        )


def _said(error: BaseException) -> str:
    """Return an error's class and, of ours, the text: ranks, shapes and names.

    Behind the first colon of another error than a mismatch is the reason of a peer, in any words:
    of it the ranks are kept that have ended.
    """
    said, text = type(error).__name__, str(error)
    if not isinstance(error, CollectiveError):
        return said
    if not isinstance(error, CollectiveMismatchError):
        clause, *reasons = text.split(": ")
        ended = dict.fromkeys(re.findall(r"rank \d+ has ended", ": ".join(reasons)))
        text = "; ".join([clause, *list(ended)[:_ENDED]])
    return f"{said}: {text}"[:_ERROR_CHARACTERS]


def write(
    recorder: Recorder,
    why: str,
    path: str | os.PathLike[str] | None = None,
    stack: Sequence[str] = (),
) -> str | None:
    """Write a rank's file; return its name, or None where that failed or nothing is recorded."""
    into = folder()
    if into is None:
        return None
    try:
        if path is None:
            target = os.path.join(_own(into), _file_name(recorder))
        else:
            target = os.path.abspath(os.fsdecode(path).replace("{rank}", str(recorder.rank)))
        _put(target, json.dumps(content(recorder, why, stack), separators=(",", ":")))
    except Exception as error:  # noqa: BLE001 - an error of the recorder must not hide the job's
        _logger.warning("rank %s cannot write its flight record: %s", recorder.rank, error)
        return None
    return target


def _put(target: str, text: str) -> None:
    """Write a file at once, or not at all; only its user may read it."""
    if os.path.exists(target) and not os.path.isfile(target):
        # A pipe or a device, which must not be replaced.
        with open(target, "w") as file:
            file.write(text)
        return
    # Beside it, so that `replace` is atomic, and by another name in each thread.
    descriptor, beside = tempfile.mkstemp(dir=os.path.dirname(target), prefix=".flight-")
    try:
        with open(descriptor, "w") as file:
            file.write(text)
        os.replace(beside, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(beside)
        raise


def set_aside(recorder: Recorder) -> None:
    """Rename the file of an earlier job that had the same address and port, if there is one."""
    into = folder()
    if into is not None:
        with suppress(OSError):
            old = os.path.join(into, _file_name(recorder))
            os.replace(old, old.replace(".json", ".previous"))


def job() -> str:
    """Return what the files of one job have in common."""
    return f"{zlib.crc32(repr([os.environ.get(name) for name in _JOB]).encode()):08x}"


def _file_name(recorder: Recorder) -> str:
    thread = f"-thread-{os.getpid()}" if recorder is not of_process else ""
    return f"flight-{job()}{thread}-rank{recorder.rank}.json"


def _own(path: str) -> str:
    """Make the folder; refuse one in a shared place that another user has put there."""
    os.makedirs(path, mode=0o700, exist_ok=True)
    if "ADASUM_FLIGHT_FOLDER" not in os.environ:
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise PermissionError(f"{path} is another user's: set ADASUM_FLIGHT_FOLDER")
    return path


def content(recorder: Recorder, why: str, stack: Sequence[str] = ()) -> dict[str, Any]:
    """Return what a rank's file holds."""
    # Times are the wall clock's, as far as the hosts' clocks agree.
    clock = time.time() - time.perf_counter_ns() / 1e9
    groups = sorted([*recorder.groups], key=lambda each: each.last[BEGUN] or 0)[-_GROUPS:]
    return {
        "flight": FORMAT,
        "job": job(),
        "rank": recorder.rank,
        "host": os.uname().nodename,
        "process": os.getpid(),
        "why": why,
        "written": time.time(),
        "started": _started,
        "groups": [_group(each, clock) for each in groups],
        "calls": [_call(each, clock) for each in recorder.calls()],
        "stack": list(stack)[:_STACK],
    }


def _group(group: GroupRecord, clock: float) -> dict[str, Any]:
    queue, last = group.queue(), group.last
    said: dict[str, Any] = {
        "name": group.name,
        "ranks": runs(group.ranks),
        "hosts": [[host, len(list(same))] for host, same in groupby(group.hosts)],
        "closed": queue is None,
        "error": group.error,
        "last": None if last is UNRECORDED else _call(last, clock),
    }
    if queue is None:
        return said
    queued = queue.queued()
    said["queued"] = [
        {"kind": kind, "name": name and name[:CHARACTERS], "since": clock + since / 1e9}
        for kind, name, since in queued[:_QUEUED]
    ]
    said["queued_count"] = len(queued)
    wait = queue.wait()
    # One of an earlier call that failed may be there still.
    unfinished = last is not UNRECORDED and (not last[ENDED] or last[ERROR])
    age = (time.perf_counter_ns() - last[BEGUN]) / 1e9 if unfinished else 0.0
    if unfinished and wait is not None and time.monotonic() - wait.since <= age:
        late = {int(name) for name in re.findall(r"\d+", wait.late[:_LATE_CHARACTERS])}
        both = zip(group.ranks, group.names, strict=True)
        ranks = [rank for rank, name in both if name in late]
        said["waits"] = {"step": wait.step[:CHARACTERS], "for": ranks}
    return said


def _call(call: Record, clock: float) -> dict[str, Any]:
    # A copy, since the rank goes on meanwhile.
    call = list(call)
    times = ("queued", QUEUED), ("begun", BEGUN), ("negotiated", NEGOTIATED), ("ended", ENDED)
    said = {
        "group": call[GROUP],
        "number": call[NUMBER],
        "kind": call[KIND],
        "name": call[NAME],
        "tensors": [str(each)[:CHARACTERS] for each in call[SHAPES]],
        "error": call[ERROR],
        "code": call[CODE],
        "state": state(call),
    }
    return {**said, **{name: round(clock + call[at] / 1e9, 6) for name, at in times if call[at]}}


def state(call: Record) -> str:
    """Return "waiting" for the other ranks, "running", "done" or "failed"."""
    if call[ERROR]:
        return "failed"
    if call[ENDED]:
        return "done"
    return "running" if call[NEGOTIATED] else "waiting"
