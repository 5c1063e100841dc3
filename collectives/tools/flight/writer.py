"""Write each rank's record to a JSON file, whole or not at all, without raising errors.

SIGUSR1 and SIGTERM write it too, even while the rank waits in C code such as gloo's. No Python
handler would run before that wait ends, so the handler is faulthandler's, which immediately writes
the stack of the signalled thread to a pipe. A thread reads the pipe and writes the file; for
SIGTERM it then restores the former handler and sends the signal again.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import json
import logging
import os
import re
import select
import signal
import stat
import tempfile
import threading
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from collectives import recorder
from collectives.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    compact,
)
from collectives.recorder import FOLDER_VARIABLE, UNRECORDED, GroupRecord, Record, Recorder
from collectives.tools.flight import alarm

__all__ = ["dump_flight_record"]

_logger = logging.getLogger("collectives.flight")
# The version of the format, to be increased if a field's meaning changes.
FORMAT = 1
# Limits that bound the file's size.
_GROUPS, _STACK, _CHARACTERS = 64, 200, 600
# These variables are the same on all ranks of a job, and rarely the same in another job.
_JOB = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
# The only parts to keep of a peer's reason, which may be any text of the program.
_OF_RANKS = re.compile(r"rank \d+ (?:has ended|called abort\(\))")
_Path = str | os.PathLike[str] | None
# Stacks come in many small writes, and are complete after a pause.
_PAUSE_SECONDS, _MAX_STACK_BYTES = 0.05, 1 << 16
_handled: set[int] = set()


def dump_flight_record(path: str | os.PathLike[str] | None = None) -> list[str]:
    """Write flight records of this process's ranks, as after a collective's error; return files.

    Each file has the last 256 calls of one rank: names, shapes, dtypes, times and errors.
    `python -m collectives.flight FILES` joins the files of all ranks. Nothing is sent: any thread
    may call this at any time. If a file cannot be written, a WARNING is logged.

    Args:
        path: The file to overwrite; "{rank}" in it becomes the rank's number, if ranks are threads.
            By default a file in the folder ADASUM_FLIGHT_FOLDER.

    Returns:
        The files that were written, one for each rank of this process that has a group; empty with
        ADASUM_FLIGHT_FOLDER=0, which switches the recorder off.

    Raises:
        TypeError: `path` is not a path.
    """
    if path is not None and not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must be a str, a path or None, got {type(path).__name__}")
    return write_all(path)


def write_all(path: _Path = None, stack: Sequence[str] = ()) -> list[str]:
    """Write the files of all ranks of this process; return them."""
    written = set()
    for rank in (ref() for ref in recorder.recorders.valuerefs()):
        # Ranks that are threads end with their groups.
        if rank and (rank is recorder.of_process or not all(each.closed for each in rank.groups)):
            written.add(write(rank, path, stack))
    return sorted(each for each in written if each)


def write_and_log(why: str, stack: Sequence[str]) -> None:
    """Write the files of all ranks of this process, and log a WARNING that names each one."""
    for path in write_all(stack=stack):
        _logger.warning("%s: what this rank did last is in %s", why, path)


def group_began(group: GroupRecord, kind: str, ranks: Sequence[int]) -> None:
    """Attach a group to this process's recorder; the first one also prepares the files."""
    rank, name = recorder.of_process, kind
    if kind != "init":
        # Of bounded length, and unique for the members.
        name = f"process group {compact(ranks)[:60]} {zlib.crc32(repr(list(ranks)).encode()):08x}"
    first = rank.rank is None
    group.attach(rank, name, ranks)
    if first:
        # Keep the file of an earlier job at the same address and port under another name.
        with suppress(OSError):
            old = os.path.join(folder(), file_name(rank))
            os.replace(old, old.replace(".json", ".previous"))
    if len(ranks) > 1:
        _install()
        if os.environ.get(FOLDER_VARIABLE):
            alarm.start(write_and_log)


def call_failed(group: GroupRecord, call: Any, error: BaseException) -> None:
    """Note the error of `call`, or of a stream if it is None, and write the rank's file."""
    said = _text(error)
    # After a mismatch the program may continue, and the error itself explains it.
    ends = not isinstance(error, CollectiveMismatchError)
    if ends:
        group.error = group.error or said
    if call is not None and call.record is not UNRECORDED:
        call.record[recorder.ERROR] = said
        with suppress(Exception):
            call.record[recorder.CODE] = call.code
    path = write(group.recorder)
    if path and ends:
        _logger.warning(
            "rank %s failed in a collective, and wrote what it did last to %s: "
            "python -m collectives.flight %s names the rank at fault, once all have",
            *(group.recorder.rank, path, f"{path.rpartition('-rank')[0]}-rank*.json"),
        )
    if isinstance(error, CollectiveTimeoutError):
        alarm.finish(said)


def _text(error: BaseException) -> str:
    """Return an error's class and, for our own errors, the text without the program's texts.

    In errors other than mismatches, the text after the first colon is a peer's reason.
    """
    kind, text = type(error).__name__, str(error)
    if not isinstance(error, CollectiveError):
        return kind
    if not isinstance(error, CollectiveMismatchError):
        clause, _, reason = text.partition(": ")
        text = "; ".join(dict.fromkeys([clause, *_OF_RANKS.findall(reason)]))
    return f"{kind}: {text}"[:_CHARACTERS]


def write(rank: Recorder, path: _Path = None, stack: Sequence[str] = ()) -> str | None:
    """Write the file of `rank`; return its path, or None if that failed or nothing is recorded."""
    if not rank.groups or os.environ.get(FOLDER_VARIABLE) == "0":
        return None
    try:
        if path is None:
            target = os.path.join(_make_folder(), file_name(rank))
        else:
            target = os.path.abspath(os.fsdecode(path).replace("{rank}", str(rank.rank)))
        _put(target, json.dumps(_content(rank, stack), separators=(",", ":")))
    except Exception as error:  # noqa: BLE001 - an error of the recorder must not hide the job's
        _logger.warning("rank %s cannot write its flight record: %s", rank.rank, error)
        return None
    return target


def _put(target: str, text: str) -> None:
    """Write a file that only its user may read, whole or not at all.

    The target is never opened: a FIFO would block, and a link would be followed.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(target).st_mode):
            raise OSError(f"{target} is not a regular file")
    descriptor, beside = tempfile.mkstemp(dir=os.path.dirname(target), prefix=".flight-")
    try:
        with open(descriptor, "w") as file:
            file.write(text)
        os.replace(beside, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(beside)
        raise


@functools.cache
def folder() -> str:
    """Return the folder of the files: ADASUM_FLIGHT_FOLDER, read once, or the default."""
    default = os.path.join(tempfile.gettempdir(), f"adasum-flight-{os.getuid()}")
    return os.path.abspath(os.environ.get(FOLDER_VARIABLE) or default)


def _make_folder() -> str:
    """Make the folder; refuse the default one if others own it or can write to it."""
    path = folder()
    os.makedirs(path, mode=0o700, exist_ok=True)
    found = os.lstat(path)
    own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not os.environ.get(FOLDER_VARIABLE) and (not own or found.st_mode & 0o022):
        raise PermissionError(
            f"{path} is another user's, or others may write to it: set {FOLDER_VARIABLE}"
        )
    return path


def file_name(rank: Recorder) -> str:
    """Return the file name for `rank` in the folder."""
    thread = f"-thread-{os.getpid()}" if rank is not recorder.of_process else ""
    return f"flight-{_job()}{thread}-rank{rank.rank}.json"


def _job() -> str:
    """Return the part of file names that identifies the job."""
    return f"{zlib.crc32(repr([os.environ.get(name) for name in _JOB]).encode()):08x}"


def _content(rank: Recorder, stack: Sequence[str]) -> dict[str, Any]:
    # The wall-clock time at perf_counter_ns() = 0, since hosts can compare wall-clock times.
    zero = time.time() - time.perf_counter_ns() / 1e9
    # Copies, since the rank keeps running.
    calls, groups = rank.ring.copy(), [*rank.groups]
    groups.sort(key=lambda each: each.last[recorder.BEGUN] or 0)
    return {
        "flight": FORMAT,
        "job": _job(),
        "rank": rank.rank,
        "host": os.uname().nodename,
        "process": os.getpid(),
        "written": time.time(),
        "groups": [_group(each, zero) for each in groups[-_GROUPS:]],
        "calls": [_call(each, zero) for each in calls],
        "stack": list(stack)[:_STACK],
    }


def _group(group: GroupRecord, zero: float) -> dict[str, Any]:
    last = group.last
    at, reason = group.aborted or (0, "")
    reason = re.sub(r"^rank \d+ ", "", reason)[:_CHARACTERS]
    return {
        "name": group.name,
        "ranks": group.ranks,
        "closed": group.closed,
        "error": group.error,
        "aborted": (zero + at / 1e9, reason) if group.aborted else None,
        "last": None if last is UNRECORDED else _call(last, zero),
    }


def _call(record: Record, zero: float) -> dict[str, Any]:
    said = dict(zip(recorder.FIELDS, list(record), strict=True))
    said["tensors"] = [str(each)[: recorder.CHARACTERS] for each in said["tensors"]]
    done = "done" if said["ended"] else "running" if said["negotiated"] else "waiting"
    said["state"] = "failed" if said["error"] else done
    for name in ("queued", "begun", "negotiated", "ended"):
        said[name] = round(zero + said[name] / 1e9, 6) if said[name] else None
    return said


def _install() -> None:
    """Install handlers of SIGUSR1 and SIGTERM that write the files, with the thread's stack.

    The program's own handler for SIGUSR1 is kept. After the files are written, SIGTERM has its
    former effect: it ends the process, or runs the program's handler. Only the main thread can
    install handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in {signal.SIGUSR1, signal.SIGTERM} - _handled:
        before = signal.getsignal(number)
        used = before is not signal.SIG_DFL or _is_caught(number)
        if before is signal.SIG_IGN or (used and number == signal.SIGUSR1):
            continue
        # If no descriptor or thread can be created, the signal keeps its handler.
        with suppress(OSError, RuntimeError):
            read, written = os.pipe()
            # The handler must not wait for the reading thread.
            os.set_blocking(written, False)
            threading.Thread(target=_serve, args=(read, number), daemon=True).start()
            faulthandler.register(number, file=written, all_threads=False)
            os.register_at_fork(after_in_child=functools.partial(_forget, number, before, written))
            # Nothing reads the pipe while the interpreter ends.
            atexit.register(_forget, number, before)
            _handled.add(number)


def _is_caught(number: int) -> bool:
    """Return whether a C handler, unknown to Python, handles the signal."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _forget(number: int, before: Any, written: int | None = None) -> None:
    """Restore the former handler, unless the program has set another since.

    written: the pipe's writing end, to close it in a forked child.
    """
    if signal.getsignal(number) is before:
        faulthandler.unregister(number)
    if written is not None:
        with suppress(OSError):
            os.close(written)


def _serve(read: int, number: int) -> None:
    """Write the files whenever a stack comes through the pipe; send SIGTERM again."""
    name = signal.Signals(number).name
    while stack := os.read(read, _MAX_STACK_BYTES):
        while select.select([read], [], [], _PAUSE_SECONDS)[0] and len(stack) < _MAX_STACK_BYTES:
            stack += os.read(read, _MAX_STACK_BYTES)
        write_and_log(name, stack.decode(errors="replace").splitlines())
        if number == signal.SIGTERM:
            faulthandler.unregister(number)
            signal.pthread_kill(threading.main_thread().ident or 0, number)
