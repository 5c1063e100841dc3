"""Traces of calls for people to read: records, and ranges in a profiler's timeline.

Each rank keeps its latest calls in a ring of fixed length, and the last call of each group. Records
are lists of numbers and strings, without tensors. `collectives.tools.flight` writes the records to
a file: the core tells it of groups and failed calls, and imports it only then.

torch.profiler shows the ranges of the threads that it records; on CUDA there are NVTX ranges for
Nsight, too.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from time import perf_counter_ns
from types import ModuleType
from typing import Any, Protocol

import torch

FOLDER_VARIABLE = "ADASUM_FLIGHT_FOLDER"
# The number of calls to keep per rank, tensors per call, and characters of its name.
CALLS, TENSORS, CHARACTERS = 256, 4, 80
# The fields of a record. Times are from time.perf_counter_ns(), and 0 until the event.
FIELDS = (
    *("group", "number", "kind", "name", "tensors"),
    *("queued", "begun", "negotiated", "ended", "error", "code"),
)
GROUP, NUMBER, KIND, NAME, SHAPES, QUEUED, BEGUN, NEGOTIATED, ENDED, ERROR, CODE = range(11)
Record = list[Any]
# A record for the times of calls that are not recorded.
UNRECORDED: Record = [None] * 11
# The number of closed groups that keep their last call.
_CLOSED = 8
NOTHING: AbstractContextManager[object] = nullcontext()


class _Call(Protocol):
    """The part of a `Call` that is recorded."""

    kind: str
    name: str | None
    described: list[Any]
    queued: int
    record: Record


class Recorder:
    """The last calls of one rank and its groups, both oldest first; the rank's number in the job.

    The number is None before the rank has a group.
    """

    def __init__(self) -> None:
        self.rank: int | None = None
        self.ring: deque[Record] = deque(maxlen=CALLS)
        self.groups: list[GroupRecord] = []
        self.names: Counter[str] = Counter()
        recorders[next(_count)] = self


_count = itertools.count()
# The recorders of this process, oldest first: one per rank if ranks are threads.
recorders: weakref.WeakValueDictionary[int, Recorder] = weakref.WeakValueDictionary()
of_process = Recorder()


class GroupRecord:
    """The record of one rank's part in a group.

    Attributes:
        name: The group's name, the same on all members.
        ranks: The members' numbers in the job.
        last: The call that began last; `UNRECORDED` before the first.
        error: The text of the first error that made the group unusable.
        aborted: The time of this rank's abort(), by time.perf_counter_ns(), and its reason.
        on: Whether calls are recorded.
        closed: Whether the group is closed.
    """

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        self.ranks = tuple(ranks)
        self.last = UNRECORDED
        self.error = ""
        self.aborted: tuple[int, str] | None = None
        self.on = os.environ.get(FOLDER_VARIABLE) != "0"
        self.closed = False
        self._rank = rank
        # A recorder of its own, as for a rank that is a thread, until `attach` sets another.
        self.attach(Recorder(), "group")

    def attach(self, recorder: Recorder, name: str, ranks: Sequence[int] = ()) -> None:
        """Add this group to a recorder; `ranks`: the members' numbers in the job, if known."""
        self.recorder = recorder
        self.ranks = tuple(ranks) or self.ranks
        if recorder.rank is None:
            recorder.rank = self.ranks[self._rank]
        closed = [each for each in recorder.groups if each.closed]
        for each in closed[:-_CLOSED]:
            recorder.groups.remove(each)
        recorder.groups.append(self)
        # All members make the groups of one name, so they number them equally.
        recorder.names[name] += 1
        count = recorder.names[name]
        self.name = f"{name} #{count}" if count > 1 else name

    def attach_part(self, part: GroupRecord, members: Sequence[int]) -> None:
        """Attach the record of a group that the current call splits from this one."""
        name = f"{self.name}/{self.last[NUMBER]}"
        part.attach(self.recorder, name, [self.ranks[member] for member in members])

    def begin(self, call: _Call, number: int) -> Record:
        """Record that `call` begins; return its record, for the caller to set later times."""
        if not self.on:
            return UNRECORDED
        name, shapes = call.name, call.described
        if len(shapes) > TENSORS:
            shapes = [*shapes[:TENSORS], f"and {len(shapes) - TENSORS} more"]
        # In the order of the fields.
        record = self.last = [
            self.name, number, call.kind, name and name[:CHARACTERS], shapes, call.queued,
            perf_counter_ns(), 0, 0, "", 0,
        ]  # fmt: skip
        self.recorder.ring.append(record)
        return record

    def failed(self, call: _Call | None, error: BaseException) -> None:
        """Record a call's error and write this rank's file; errors of the file are ignored.

        call: None for an error that a stream reports.
        """
        if self.on:
            if call is not None:
                call.record[ENDED] = call.record[ENDED] or perf_counter_ns()
            with suppress(Exception):
                _tool().call_failed(self, call, error)

    def write(self) -> None:
        """Write this rank's file, if possible."""
        if self.on:
            with suppress(Exception):
                _tool().write(self.recorder)


def begin(record: GroupRecord, kind: str, ranks: Sequence[int]) -> None:
    """Attach a group to this process's recorder; SIGUSR1 and SIGTERM write its file from now on.

    kind: the function that made the group; ranks: the members' numbers in torch.distributed.
    """
    if record.on:
        _tool().group_began(record, kind, ranks)


def _tool() -> ModuleType:
    """Import the tool that writes the files; the core imports it nowhere else."""
    from collectives.tools.flight import writer

    return writer


def recording() -> bool:
    """Return whether a profiler is recording; cheaper than an unused `span`."""
    # torch has no public function for this.
    return torch.autograd.profiler._is_profiler_enabled


def span(name: Callable[[], str], *, cuda: bool = False) -> AbstractContextManager[object]:
    """Return a context that adds a range to profilers' timelines; with `cuda` also to NVTX.

    name: returns the range's name; called only if the range is recorded.
    """
    profiled = torch.profiler.record_function(name()) if recording() else NOTHING
    return _with_nvtx(name(), profiled) if cuda else profiled


@contextmanager
def _with_nvtx(name: str, profiled: AbstractContextManager[object]) -> Iterator[None]:
    torch.cuda.nvtx.range_push(name)
    try:
        with profiled:
            yield
    finally:
        torch.cuda.nvtx.range_pop()
