"""Read the files of a job's ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from collectives.flight.dump import FORMAT

_MOST_RANKS = 1 << 20


@dataclass(frozen=True)
class Call:
    """A call of one rank; times are the wall clock's, and None for what has not come.

    Attributes:
        group: The group's name.
        number: Among the group's calls, the same on all ranks.
        title: The collective and its name.
        tensors: Shapes, dtypes and devices.
        negotiated: When all ranks had begun it.
        error: Its error, with the class before it.
        code: What ranks compare, where the call failed.
    """

    group: str
    number: int
    title: str
    tensors: str
    begun: float
    negotiated: float | None
    ended: float | None
    error: str
    code: int

    @property
    def failed_by(self) -> str:
        """The class of its error; empty for none."""
        return self.error.partition(":")[0]

    @property
    def key(self) -> tuple[str, int]:
        """The same on all ranks."""
        return self.group, self.number

    def __str__(self) -> str:
        of = f" of {self.tensors}" if self.tensors else ""
        return f"{self.title}{of} (call {self.number} of {self.group})"


@dataclass
class GroupState:
    """One rank's part in a group when it wrote its file.

    Attributes:
        last: The call that it began last, if any.
        waits_for: The ranks that the transport waits for, or did when the call failed.
        step: The step in which it does.
        error: What made the group unusable.
    """

    ranks: tuple[int, ...]
    last: Call | None
    waits_for: tuple[int, ...]
    step: str
    error: str


@dataclass
class Dump:
    """One rank's file: its groups by name, its last calls, oldest first, and where it was.

    The job is the same in all files of one; the stack is there if a signal asked for the file.
    """

    rank: int
    job: str
    host: str
    written: float
    groups: dict[str, GroupState]
    calls: list[Call]
    stack: list[str] = field(default_factory=list)


class BadInput(Exception):
    """What was passed is no job's flight records; the text says why."""


def read(paths: Sequence[str]) -> dict[int, Dump]:
    """Read the files of one job, or those in folders, by rank; BadInput if they are none."""
    dumps: dict[int, Dump] = {}
    for path in _files(paths):
        dump = _read(path)
        other = dumps.setdefault(dump.rank, dump)
        first = next(iter(dumps.values()))
        if dump.job != first.job:
            raise BadInput(
                f"{path} is of job {dump.job}, {paths[0]} has job {first.job}: pass one job's files"
            )
        if other is not dump:
            raise BadInput(f"{path} is a second file of rank {dump.rank}: pass one of each rank")
    if not dumps:
        raise BadInput(f"there are no flight records in {', '.join(paths)}")
    return dumps


def _files(paths: Iterable[str]) -> list[Path]:
    found = [Path(path) for path in paths]
    return [
        file
        for path in found
        for file in (sorted(path.glob("flight-*.json")) if path.is_dir() else [path])
    ]


def _read(path: Path) -> Dump:
    try:
        said = json.loads(path.read_text())
        if said["flight"] != FORMAT:
            raise BadInput(f"{path} is in format {said['flight']}, this version reads {FORMAT}")
        return Dump(
            rank=int(said["rank"]),
            job=str(said["job"]),
            host=str(said["host"]),
            written=float(said["written"]),
            groups={str(each["name"]): _group(each) for each in said["groups"]},
            calls=[_call(each) for each in said["calls"]],
            stack=[str(line) for line in said["stack"]],
        )
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise BadInput(f"{path} is no flight record: {error!r}") from error


def _group(said: dict[str, Any]) -> GroupState:
    if sum(last - first for first, last in said["ranks"]) > _MOST_RANKS:
        raise ValueError("more ranks than any job has")
    ranks = [rank for first, last in said["ranks"] for rank in range(first, last + 1)]
    last, waits = said["last"], said.get("waits") or {}
    return GroupState(
        tuple(ranks),
        _call(last) if last else None,
        tuple(int(rank) for rank in waits.get("for", ())),
        str(waits.get("step", "")),
        str(said["error"]),
    )


def _call(said: dict[str, Any]) -> Call:
    title = f"{said['kind']} {said['name']!r}" if said["name"] else str(said["kind"])
    times = (said.get(key) for key in ("negotiated", "ended"))
    negotiated, ended = (None if each is None else float(each) for each in times)
    return Call(
        str(said["group"]),
        int(said["number"]),
        title,
        "; ".join(said["tensors"]),
        float(said["begun"]),
        negotiated,
        ended,
        str(said["error"]),
        int(said["code"]),
    )
