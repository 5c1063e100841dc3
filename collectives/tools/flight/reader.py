"""Read the files of a job's ranks."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from collectives.tools.flight.writer import FORMAT

_MAX_BYTES = 1 << 26
# Exceptions raised by JSON that is not a record.
NO_RECORD = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


class Call(NamedTuple):
    """One rank's call. Times are wall-clock times, and None for events that have not happened."""

    group: str
    number: int
    kind: str
    name: str | None
    tensors: list[str]
    begun: float
    negotiated: float | None
    ended: float | None
    error: str
    code: int

    @property
    def failed_by(self) -> str:
        """The class name of its error; "" without an error."""
        return self.error.partition(":")[0]

    @property
    def key(self) -> tuple[str, int]:
        """The call's identity, the same on all ranks."""
        return self.group, self.number

    def __str__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        of = f" of {'; '.join(self.tensors)}" if self.tensors else ""
        return f"{self.kind}{name}{of} (call {self.number} of {self.group})"


class GroupState(NamedTuple):
    """One rank's part in a group; `aborted` is the time and reason of its abort()."""

    name: str
    ranks: list[int]
    last: Call | None
    error: str
    aborted: tuple[float, str] | None


class Dump(NamedTuple):
    """One rank's file: its groups by name, its calls in order, its stack if a signal came."""

    rank: int
    job: str
    host: str
    written: float
    groups: dict[str, GroupState]
    calls: list[Call]
    stack: list[str]


class BadInput(Exception):
    """The files are not the flight records of one job."""


def read(paths: Sequence[str]) -> dict[int, Dump]:
    """Read one job's files, or the latest job's in folders, by rank; raise BadInput for others."""
    dumps: dict[int, Dump] = {}
    for given in map(Path, paths):
        for path in _of_latest_job(given) if given.is_dir() else [given]:
            dump = _read(path)
            job = next(iter(dumps.values()), dump).job
            if dump.job != job:
                raise BadInput(
                    f"{path} is of job {dump.job}, {paths[0]} has job {job}: pass one job's files"
                )
            if dump.rank in dumps:
                raise BadInput(f"{path} is a second file of rank {dump.rank}: pass one of each")
            dumps[dump.rank] = dump
    if not dumps:
        raise BadInput(f"there are no flight records in {', '.join(paths)}")
    return dumps


def _of_latest_job(folder: Path) -> list[Path]:
    """Return the files in a folder whose job wrote last: it keeps the files of earlier jobs."""
    jobs: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("flight-*.json")):
        jobs.setdefault(path.name.rpartition("-rank")[0], []).append(path)
    written = [(max(path.lstat().st_mtime for path in files), files) for files in jobs.values()]
    return max(written, default=(0.0, []))[1]


def _read(path: Path) -> Dump:
    try:
        # A FIFO or a device would block, and a link may lead to one. The flags guard against one
        # that replaces the file after this check.
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise BadInput(f"{path} is not a regular file")
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
            said = json.loads(file.read(_MAX_BYTES), object_hook=_typed)
        if said["flight"] != FORMAT:
            raise BadInput(f"{path} is in format {said['flight']}, this version reads {FORMAT}")
        dump = Dump(**{name: said[name] for name in Dump._fields})
        groups: list[GroupState] = said["groups"]
        last = [state.last for state in groups if state.last]
        calls = {each.key: each for each in (*dump.calls, *last)}
        ordered = sorted(calls.values(), key=lambda each: each.begun)
        return dump._replace(groups={each.name: each for each in groups}, calls=ordered)
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error
    except NO_RECORD as error:
        raise BadInput(f"{path} is no flight record: {error!r}") from error


def _typed(said: dict[str, Any]) -> Any:
    """Return a JSON object as a Call or GroupState, or unchanged."""
    for kind in (Call, GroupState):
        if said.keys() >= {*kind._fields}:
            return kind(**{name: said[name] for name in kind._fields})
    return said
