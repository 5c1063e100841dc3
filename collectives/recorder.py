"""What a call leaves behind for people to look at: a record, and a range in a profiler's timeline.

The last calls of each rank are kept in a ring of fixed length, and the last call of each group. A
record is a list of numbers and strings, never a tensor. `collectives.tools.flight` writes the
records to a file: the core tells it of a failed call, and imports it only then.

torch.profiler shows the ranges of the threads that it records, on CUDA also NVTX for Nsight.
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
# How many calls of a rank are kept; how many tensors of each call, and characters of its name.
CALLS, TENSORS, CHARACTERS = 256, 4, 80
# The fields of a record. Times are from time.perf_counter_ns(), and 0 until the event.
FIELDS = (
    *("group", "number", "kind", "name", "tensors"),
    *("queued", "begun", "negotiated", "ended", "error", "code"),
)
GROUP, NUMBER, KIND, NAME, SHAPES, QUEUED, BEGUN, NEGOTIATED, ENDED, ERROR, CODE = range(11)
Record = list[Any]
# Takes the times of calls that are not recorded.
UNRECORDED: Record = [None] * 11
# How many closed groups keep their last call.
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

    The number is None until the rank has a group.
    """

    def __init__(self) -> None:
        self.rank: int | None = None
        self.ring: deque[Record] = deque(maxlen=CALLS)
        self.groups: list[GroupRecord] = []
        self.names: Counter[str] = Counter()
        recorders[next(_count)] = self


_count = itertools.count()
# The recorders of this process, oldest first. Ranks that are threads have one each.
recorders: weakref.WeakValueDictionary[int, Recorder] = weakref.WeakValueDictionary()
of_process = Recorder()


class GroupRecord:
    """The record of one rank's part in a group.

    Attributes:
        name: The group's name, the same on all members.
        ranks: The members' numbers in the job.
        last: The call that began last; `UNRECORDED` before the first.
        error: The text of the first error that made the group unusable.
        aborted: When this rank called abort(), by time.perf_counter_ns(), and why.
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
        # A rank of its own, as a thread is, until `attach` says otherwise.
        self.attach(Recorder(), "group")

    def attach(self, recorder: Recorder, name: str, ranks: Sequence[int] = ()) -> None:
        """Make this one of a rank's groups; ranks: the members' numbers in the job, if known."""
        self.recorder = recorder
        self.ranks = tuple(ranks) or self.ranks
        if recorder.rank is None:
            recorder.rank = self.ranks[self._rank]
        closed = [each for each in recorder.groups if each.closed]
        for each in closed[:-_CLOSED]:
            recorder.groups.remove(each)
        recorder.groups.append(self)
        # Members number groups of the same name alike, because all of them make these groups.
        recorder.names[name] += 1
        count = recorder.names[name]
        self.name = f"{name} #{count}" if count > 1 else name

    def attach_part(self, part: GroupRecord, members: Sequence[int]) -> None:
        """Attach the record of a group that the running call splits from this one."""
        name = f"{self.name}/{self.last[NUMBER]}"
        part.attach(self.recorder, name, [self.ranks[member] for member in members])

    def begin(self, call: _Call, number: int) -> Record:
        """Record that a call begins; return its record, in which the caller sets later times."""
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
        """Record a call's error and have this rank's file written, whatever happens to the file.

        call: None for an error that a stream reports.
        """
        if self.on:
            if call is not None:
                call.record[ENDED] = call.record[ENDED] or perf_counter_ns()
            with suppress(Exception):
                _tool().call_failed(self, call, error)

    def write(self) -> None:
        """Have this rank's file written, if that is possible."""
        if self.on:
            with suppress(Exception):
                _tool().write(self.recorder)


def begin(record: GroupRecord, kind: str, ranks: Sequence[int]) -> None:
    """Record a group as one of this process, whose file SIGUSR1 and SIGTERM write from now on.

    kind: The function that made the group. ranks: The members' numbers in torch.distributed.
    """
    if record.on:
        _tool().group_began(record, kind, ranks)


def _tool() -> ModuleType:
    """Import the tool that writes the files; the core imports it nowhere else."""
    from collectives.tools.flight import writer

    return writer


def recording() -> bool:
    """Return whether a profiler is recording; cheaper than an unused `span`."""
    # torch has no public function that says so.
    return torch.autograd.profiler._is_profiler_enabled


def span(name: Callable[[], str], *, cuda: bool = False) -> AbstractContextManager[object]:
    """Return a context that is a range in profilers' timelines, with `cuda` an NVTX range, too.

    name: Returns the range's name; called only if the range can be seen.
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
