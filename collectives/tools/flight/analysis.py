"""Find the rank at fault: follow the waits of all ranks to the one that does not wait.

In each call, ranks wait for the members of the group that have not made it, or made it after others
had given up. These members may wait themselves, in another group's call, and so on. The last one
has no file (it has ended, or is stopped), is outside of any call, called abort(), failed by its own
error, or made another call than its peers. If the waits form a circle, the rank at fault is the one
whose latest calls continued with another call than in earlier steps. Times of different hosts are
compared, so their clocks should agree.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from collectives.errors import compact
from collectives.tools.flight.reader import NO_RECORD, BadInput, Call, Dump, read

# Calls shorter than this, in seconds, are no hangs: the rank was working when its file was written.
_PATIENCE = 1.0
# Ranks are excused if they waited elsewhere for this part of the others' wait.
_HALF = 0.5
# The largest number of preceding calls to compare with earlier ones.
_LONGEST = 32
_WAITED = ("CollectiveTimeoutError", "TransportError")
_INTERRUPTED = ("KeyboardInterrupt", "SystemExit")
_MISMATCH = "CollectiveMismatchError"
# The certainty of a rank's fault, ascending: only the most certain are named.
_FAILED, _ABORTED, _LOST, _ABSENT, _CERTAIN = range(5)
_NEVER = float("inf")
# The report fits on a screen.
_CULPRITS, _WAITS, _STACK, _COLUMNS = 5, 8, 6, 160
_ABOUT = """Join the flight records of a job's ranks, and name the rank at fault.

The status is 0 if a rank is named, 1 if nothing is wrong, and 2 if these are no job's flight
records.
"""


class Wait(NamedTuple):
    """One rank's wait in its call, which may have failed, and the ranks that it waits for."""

    rank: int
    call: Call
    targets: tuple[int, ...]


class Culprit(NamedTuple):
    """A rank at fault; `why` follows "rank 3" in a sentence."""

    rank: int
    why: str
    sure: int


class Analysis:
    """The analysis of the files of a job's ranks.

    `culprits` are the ranks at fault, empty if nothing is wrong; `waits` lead to them; `circle` is
    whether ranks wait for each other in different calls.
    """

    def __init__(self, dumps: Mapping[int, Dump]) -> None:
        self._dumps = dumps
        self._made = {r: {each.key: each for each in dump.calls} for r, dump in dumps.items()}
        # By call, the times of the first begin and of the first failure.
        self._first: dict[tuple[str, int], float] = defaultdict(lambda: _NEVER)
        self._given_up: dict[tuple[str, int], float] = defaultdict(lambda: _NEVER)
        for call in (each for dump in dumps.values() for each in dump.calls):
            self._first[call.key] = min(call.begun, self._first[call.key])
            if call.error and call.ended:
                self._given_up[call.key] = min(call.ended, self._given_up[call.key])
        self._seen: dict[tuple[int, tuple[str, int]], Wait] = {}
        self._found: dict[int, Culprit] = {}
        self.circle = False
        for rank, dump in dumps.items():
            for state in dump.groups.values():
                if state.last is not None and self._is_open(rank, state.last):
                    self._follow(rank, state.last)
                if state.aborted is not None:
                    self._blame_abort(rank, *state.aborted)
        self.waits = list(self._seen.values())
        if not self.waits:
            for last in (dump.calls[-1] for dump in dumps.values() if dump.calls):
                if last.failed_by == _MISMATCH:
                    self._blame_mismatch(last)
        elif not self._found:
            self._break_circle()
        surest = max((each.sure for each in self._found.values()), default=0)
        self.culprits = [each for _, each in sorted(self._found.items()) if each.sure == surest]

    def _is_open(self, rank: int, call: Call) -> bool:
        """Return whether `rank` waits in the call, or failed while it waited."""
        if call.ended is None:
            return self._dumps[rank].written - call.begun >= _PATIENCE
        state = self._dumps[rank].groups.get(call.group)
        error = state.error if state and state.last == call else ""
        # With a GPU, calls end on the host before they fail on their stream.
        return (call.failed_by or error.partition(":")[0]) in (*_WAITED, *_INTERRUPTED)

    def _end(self, rank: int, call: Call) -> float:
        """Return the time when the rank stopped waiting for others to make its call."""
        if call.error:
            return call.ended or 0.0
        return call.negotiated or call.ended or self._dumps[rank].written

    def _follow(self, rank: int, call: Call) -> None:
        """Follow the wait of `rank` in the call to its end."""
        if (rank, call.key) in self._seen:
            return
        targets = self._targets(rank, call)
        self._seen[rank, call.key] = Wait(rank, call, tuple(targets))
        if not targets:
            why = f"failed in {call}: {call.error}" if call.error else f"is inside {call}"
            self._blame(rank, why, _FAILED)
        for target in targets:
            self._explain(target, call)

    def _targets(self, rank: int, call: Call) -> list[int]:
        """Return the ranks that `rank` waits for in the call."""
        state = self._dumps[rank].groups.get(call.group)
        members = [each for each in (state.ranks if state else ()) if each != rank]
        lost = [each for each in members if each not in self._dumps]
        made = {r: self._made[r][call.key] for r in members if call.key in self._made.get(r, ())}
        if broken := [r for r, its in made.items() if _broke(its)]:
            return broken
        if not self._is_open(rank, call):
            # The call has ended: it waited for the members that came last.
            since = call.begun + _HALF * (self._end(rank, call) - call.begun)
            return [r for r, its in made.items() if its.begun > since]
        # If this rank itself is late, the others have failed because of it.
        if self._is_late(rank, call):
            return []
        late = [r for r in members if r in self._dumps and self._is_late(r, call)]
        if late or lost:
            return late + lost
        # All members have made the call: the rank waits in the middle of it.
        if interrupted := [r for r, its in made.items() if its.failed_by in _INTERRUPTED]:
            return interrupted if call.failed_by not in _INTERRUPTED else []
        latest = max((its.ended or _NEVER for its in made.values()), default=0.0)
        if latest > (call.ended or _NEVER) + _PATIENCE:
            return [r for r, its in made.items() if (its.ended or _NEVER) == latest]
        return []

    def _is_late(self, rank: int, call: Call) -> bool:
        """Return whether `rank` has not made the call, or only after a member had failed in it."""
        its = self._made[rank].get(call.key)
        if its is not None:
            # If it came without delay, the others failed for another reason: a third rank's end.
            delay = its.begun - self._first[call.key]
            return its.begun > self._given_up[call.key] and delay >= _PATIENCE
        state = self._dumps[rank].groups.get(call.group)
        if state and state.last and state.last.number > call.number:
            return False
        # Its file may be older than the call.
        return bool(call.error) or self._dumps[rank].written >= call.begun + _PATIENCE

    def _explain(self, target: int, call: Call) -> None:
        """Blame `target` for missing or delaying the call, or follow its own wait elsewhere."""
        if target not in self._dumps:
            self._blame_lost(target)
            return
        its = self._made[target].get(call.key)
        if its and _broke(its):
            why = f"failed by an error of its own, {its.error}, in {its}"
            self._blame(target, why, _CERTAIN)
        elif its and not self._is_late(target, call):
            if self._is_open(target, its) and its.failed_by not in _INTERRUPTED:
                self._follow(target, its)
            else:
                self._blame(target, f"was {its.failed_by or 'late'} in {its}", _LOST)
        else:
            elsewhere = self._elsewhere(target, call, its.begun if its else self._end(target, call))
            if elsewhere is None:
                self._blame(target, self._absence(target, call, its), _ABSENT)
            elif elsewhere.failed_by == _MISMATCH:
                self._blame_mismatch(elsewhere)
            else:
                self._follow(target, elsewhere)

    def _elsewhere(self, rank: int, call: Call, until: float) -> Call | None:
        """Return the call that kept `rank` waiting while others waited for it in `call`."""
        made = [each for each in self._dumps[rank].calls if each.key != call.key]
        latest = next((each for each in reversed(made) if each.begun <= until), None)
        if latest and (latest.failed_by == _MISMATCH or self._is_open(rank, latest)):
            return latest

        def overlap(other: Call) -> float:
            return min(until, self._end(rank, other)) - max(call.begun, other.begun)

        longest = max(made, key=overlap, default=None)
        enough = longest and overlap(longest) >= _HALF * (until - call.begun) > 0.0
        return longest if enough else None

    def _absence(self, rank: int, call: Call, its: Call | None) -> str:
        """Return text on a missing or late call of `rank`, and on its latest call."""
        if its:
            return f"came {its.begun - call.begun:.3g} s late to {its}"
        dump, did = self._dumps[rank], "it has made no call yet"
        if dump.calls:
            since = dump.written - self._end(rank, dump.calls[-1])
            did = f"its last call was {dump.calls[-1]}, {since:.3g} s before it wrote its file"
        return f"has not made {call}; {did}"

    def _blame(self, rank: int, why: str, sure: int) -> None:
        if rank not in self._found or self._found[rank].sure < sure:
            self._found[rank] = Culprit(rank, why, sure)

    def _blame_lost(self, rank: int) -> None:
        """Blame `rank`, which left no file, with a reason from its peers' errors."""
        errors = {state.error for dump in self._dumps.values() for state in dump.groups.values()}
        for what in ("has ended", "called abort()"):
            if any(f"rank {rank} {what}" in error for error in errors):
                self._blame(rank, f"{what}: it left no file", _CERTAIN)
                return
        self._blame(rank, "has ended, is stopped, or cannot be reached: it left no file", _LOST)

    def _blame_abort(self, rank: int, at: float, why: str) -> None:
        """Blame `rank` for abort(), with less certainty after a failure or a wait."""
        waited = any(
            call.begun + _PATIENCE <= at <= (call.ended or _NEVER)
            or (call.failed_by in _WAITED and (call.ended or _NEVER) < at)
            for call in self._dumps[rank].calls
        )
        self._blame(rank, why, _ABORTED if waited else _CERTAIN)

    def _blame_mismatch(self, call: Call) -> None:
        """Blame the ranks that made another call than most ranks, or than before."""
        made = {rank: calls[call.key] for rank, calls in self._made.items() if call.key in calls}
        theirs = {rank: its for rank, its in made.items() if its.failed_by == _MISMATCH}
        (most, count), *others = Counter(its.code for its in theirs.values()).most_common()
        if any(each == count for _, each in others):
            odd = self._odd({rank: self._way(rank, its) for rank, its in theirs.items()})
        else:
            odd = [rank for rank, its in theirs.items() if its.code != most]
        for rank in odd or theirs:
            self._blame(rank, f"made another call than its peers, {theirs[rank]}", _ABSENT)

    def _break_circle(self) -> None:
        """Blame the ranks that continued with another call than in earlier steps."""
        self.circle = True
        calls = {each.rank: each.call for each in self.waits}
        ways: dict[int, list[Call]] = defaultdict(list)
        for wait in self.waits:
            for rank in calls.keys() & {*wait.targets}:
                ways[rank] += self._way(rank, wait.call)
        for rank in self._odd(ways) or calls:
            self._blame(rank, f"is in {calls[rank]}, and its peers are in other calls", _LOST)

    def _way(self, rank: int, call: Call) -> list[Call]:
        """Return the rank's calls after its previous one in the group, up to `call` itself."""
        calls = self._dumps[rank].calls
        end = next((at + 1 for at, each in enumerate(calls) if each.key == call.key), len(calls))
        group, number = call.key
        earlier = [
            at for at, each in enumerate(calls) if each.group == group and each.number < number
        ]
        return calls[earlier[-1] + 1 if earlier else 0 : end]

    def _odd(self, ways: Mapping[int, list[Call]]) -> list[int]:
        """Return the ranks that continued with another call than in earlier steps; [] if all did.

        ways: by rank, calls that may include a wrong one. For each call, find the shortest run of
        calls before it that occurred earlier but was never followed by an equal call. The ranks
        with the shortest run are odd.
        """
        fewest = dict.fromkeys(ways, _NEVER)
        for rank, way in ways.items():
            kinds = [*map(_kind, self._dumps[rank].calls)]
            for end in map(self._dumps[rank].calls.index, way):
                for length in range(1, min(end, _LONGEST) + 1):
                    before = kinds[end - length : end]
                    nexts = [
                        kinds[i] for i in range(length, end) if kinds[i - length : i] == before
                    ]
                    if not nexts:
                        break
                    if kinds[end] not in nexts:
                        fewest[rank] = min(fewest[rank], length)
                        break
        least = min(fewest.values(), default=_NEVER)
        odd = [rank for rank, length in fewest.items() if length == least]
        return odd if len(odd) < len(ways) else []


def _broke(call: Call) -> bool:
    """Return whether the call failed by the rank's own error."""
    return bool(call.error) and call.failed_by not in (*_WAITED, *_INTERRUPTED, _MISMATCH)


def _kind(call: Call) -> str:
    """Return a text that is equal for the same call in each training step, without numbers."""
    return f"{call.group} {call.kind} {re.sub('[0-9]+', '#', call.name or '')} {call.tensors}"


def report(found: Analysis, dumps: Mapping[int, Dump]) -> Iterator[str]:
    """Yield the lines of the report."""
    groups = [each for dump in dumps.values() for each in dump.groups.values()]
    world = {*dumps}.union(*(each.ranks for each in groups))
    written = sorted(dump.written for dump in dumps.values())
    first, last = (time.strftime("%H:%M:%S", time.localtime(written[at])) for at in (0, -1))
    job = next(iter(dumps.values())).job
    yield f"{len(dumps)} of {len(world)} ranks' files of job {job}, {first} to {last}"
    for rank, why, _ in found.culprits[:_CULPRITS]:
        dump = dumps.get(rank)
        yield f"CULPRIT: rank {rank}{f' on {dump.host}' if dump else ''} {why}"
        yield from (f"    {line.strip()}" for line in (dump.stack[:_STACK] if dump else ()))
    if len(found.culprits) > _CULPRITS:
        yield f"and {len(found.culprits) - _CULPRITS} more ranks"
    if found.circle:
        yield "ranks wait for each other: one skipped a call, or their calls have different orders"
    together: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for wait in found.waits:
        if wait.targets:
            together.setdefault((str(wait.call), wait.targets), []).append(wait.rank)
    for (call, targets), ranks in [*together.items()][:_WAITS]:
        yield f"rank {compact(sorted(ranks))} in {call}: waits for rank {compact(sorted(targets))}"
    if len(together) > _WAITS:
        yield f"and {len(together) - _WAITS} more"
    if not found.culprits:
        yield "nothing is wrong: no rank waits for long, and none has failed"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m collectives.flight", description=_ABOUT)
    parser.add_argument("files", nargs="+", help="the ranks' files, or a folder: its latest job's")
    try:
        dumps = read(parser.parse_args(arguments).files)
        found = Analysis(dumps)
        lines = [*report(found, dumps)]
    except (BadInput, *NO_RECORD) as error:
        said = error if isinstance(error, BadInput) else f"these are no flight records: {error!r}"
        print(f"python -m collectives.flight: {said}", file=sys.stderr)
        return 2
    for line in lines:
        # Files may contain any text, such as a terminal's escape sequences.
        shown = "".join(each if each.isprintable() else " " for each in line)
        print(shown if len(shown) <= _COLUMNS else f"{shown[: _COLUMNS - 3]}...")
    return 0 if found.culprits else 1
