"""What a rank did last: its calls in a ring of fixed length, and the last call of each group.

`Calls` writes a call's record when it begins the call, without another call of a Python function,
and adds the times of what comes after that. A call's state is what its times say. A record holds
numbers and strings, never a tensor.
"""

from __future__ import annotations

import functools
import itertools
import os
import tempfile
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from collectives.stall import Wait

_VARIABLE = "ADASUM_FLIGHT_FOLDER"
# How many calls of a rank are kept; of each, so many of its tensors and so many
# characters of its name.
CALLS, TENSORS, CHARACTERS = 256, 4, 80
# The fields of a record. Times are those of time.perf_counter_ns(), 0 for what has not come.
GROUP, NUMBER, KIND, NAME, SHAPES, QUEUED, BEGUN, NEGOTIATED, ENDED, ERROR, CODE = range(11)
Record = list[Any]
# Where the times of calls go that are not recorded.
UNRECORDED: Record = [None] * 11
# Closed groups of which a rank keeps the last call.
_CLOSED = 8


@functools.cache
def folder() -> str | None:
    """Return the folder of the records' files; None if nothing is to be recorded.

    It is the environment variable ADASUM_FLIGHT_FOLDER, which is read once; unless it is set, a
    folder of this user among the system's temporary files, and None if it is 0.
    """
    text = os.environ.get(_VARIABLE)
    if not text:
        return os.path.join(tempfile.gettempdir(), f"adasum-flight-{os.getuid()}")
    return None if text == "0" else os.path.abspath(text)


class Recorder:
    """The records of one rank, of all its groups.

    Attributes:
        rank: The rank's number in the job; None before it is in a group.
        ring: The last calls, oldest first; each new one takes the oldest one's place.
        groups: The last call of each group, and what else there is to say of it.
        made: How many there were before it in this process.
    """

    def __init__(self) -> None:
        self.rank: int | None = None
        self.ring: deque[Record] = deque(maxlen=CALLS)
        self.groups: list[GroupRecord] = []
        self.made = next(_made)
        self._names: Counter[str] = Counter()
        recorders.add(self)

    def is_in_use(self) -> bool:
        """Whether the rank has a group that is open."""
        return any(each.queue() is not None for each in self.groups)

    def calls(self) -> list[Record]:
        """Return the calls, oldest first. Any thread may call it."""
        # In one step of the interpreter, while other threads go on.
        return list(self.ring.copy())

    def add(self, group: GroupRecord, name: str) -> str:
        """Keep a group's last call, and forget the oldest of many closed groups.

        Return the name; with a number where there was a group of this name. All members of a group
        have made equally many of its name.
        """
        closed = [each for each in self.groups if each.queue() is None]
        for each in closed[: max(0, len(closed) - _CLOSED)]:
            self.groups.remove(each)
        self.groups.append(group)
        self._names[name] += 1
        return f"{name} #{count}" if (count := self._names[name]) > 1 else name


_made = itertools.count()
# Those of this process, and its own, where it is a rank.
recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()
of_process = Recorder()


class _Queue(Protocol):
    """The part of a group's `CallQueue` that a dump asks. Any thread may."""

    def wait(self) -> Wait | None: ...
    def queued(self) -> list[tuple[str, str | None, int]]: ...


class GroupRecord:
    """What is recorded of one rank's part in a group; `rank` is its place among the members.

    Attributes:
        name: The same on all members, and another one for each group of the rank.
        names: The members' names in errors.
        ranks: Their numbers in the job.
        hosts: By member, a number for its host.
        last: The call that was begun last; `UNRECORDED` if none was.
        error: The text of the first error that made the group unusable.
        on: Whether calls are recorded.
        queue: Returns the group's queue of calls; None once the group was closed.
    """

    def __init__(self, ranks: Sequence[int], rank: int, hosts: Sequence[int]) -> None:
        self.names = self.ranks = tuple(ranks)
        self.hosts = tuple(hosts)
        self.place = rank
        self.last = UNRECORDED
        self.error = ""
        self.on = folder() is not None
        self.queue: Callable[[], _Queue | None] = lambda: None
        # A rank of its own, as a thread is, unless it is said whose group this is.
        self.attach(Recorder(), "group")

    def attach(self, recorder: Recorder, name: str, ranks: Sequence[int] = ()) -> None:
        """Record from now on as one of a rank's groups, before the first call.

        ranks: The members' numbers in the job, where they are not their names.
        """
        self.ranks = tuple(ranks) or self.ranks
        self.recorder, self.ring = recorder, recorder.ring
        if recorder.rank is None:
            recorder.rank = self.ranks[self.place]
        self.name = recorder.add(self, name)

    def part(self, part: GroupRecord, members: Sequence[int]) -> None:
        """Attach the record of a group that the call which runs now splits from this one."""
        name = f"{self.name}/{self.last[NUMBER]}"
        part.attach(self.recorder, name, [self.ranks[member] for member in members])

    def close(self) -> None:
        """Keep the last call, and nothing of the group."""
        self.queue = lambda: None
