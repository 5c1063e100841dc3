"""Who is at fault: follow the waits of all ranks to the one that waits for nobody.

A rank waits in a call for the members of its group that have not made it, or made it after others
had given up. One of those may wait itself, in a call of another group, and so on. At the end is a
rank without a file (it has ended, or is stopped), one outside of any call, one whose call failed by
an error of its own, or one that made another call than its peers. Where the waits form a circle, it
is the rank that went on from its last calls to another one than in earlier steps. Times of several
hosts are compared, as far as their clocks agree.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from collectives.flight.files import Call, Dump

# A call that has lasted no longer is no hang, but a rank at work when its file was written.
PATIENCE = 1.0
# The part of others' wait that a rank must itself have waited elsewhere, to be excused by it.
_HALF = 0.5
# Of a slow rank: in so many calls, and for so much of the time, the others wait for it.
_FEW, _MUCH = 8, 0.2
# So many calls before one are compared with earlier ones at the most.
_LONGEST = 32
_WAITED = ("CollectiveTimeoutError", "TransportError")
_INTERRUPTED = ("KeyboardInterrupt", "SystemExit")
_MISMATCH = "CollectiveMismatchError"


class Wait(NamedTuple):
    """A rank that waits, or did until it failed, in a call, and the ranks that it waits for."""

    rank: int
    call: Call
    targets: tuple[int, ...]


class Culprit(NamedTuple):
    """A rank at fault.

    Attributes:
        why: What it did, or did not do, in words that follow "rank 3".
        sure: How much that says: of several culprits those that are surest count.
    """

    rank: int
    why: str
    sure: int = 1


class Analysis:
    """What the files of a job's ranks say together.

    Attributes:
        culprits: The ranks at fault; none if nothing is wrong.
        waits: The waits that lead to them, nearest to them last.
        circle: Whether ranks wait for each other in different calls.
    """

    def __init__(self, dumps: Mapping[int, Dump]) -> None:
        self._dumps = dumps
        self._made = {rank: _made(dump) for rank, dump in dumps.items()}
        self._order = {
            rank: sorted(made.values(), key=lambda each: each.begun)
            for rank, made in self._made.items()
        }
        self._kinds = {rank: [*map(_kind, order)] for rank, order in self._order.items()}
        self._given_up = self._first_failures()
        self._seen: dict[tuple[int, tuple[str, int]], Wait] = {}
        self._found: dict[int, Culprit] = {}
        self.circle = False
        for rank, call in self._open():
            self._follow(rank, call)
        self.waits = list(self._seen.values())
        if self._seen and not self._found:
            self._break_circle()
        if not self._seen:
            self._end_mismatches()
        surest = max((each.sure for each in self._found.values()), default=0)
        self.culprits = [each for _, each in sorted(self._found.items()) if each.sure == surest]

    def _first_failures(self) -> dict[tuple[str, int], float]:
        """Return when a rank first failed in a call, for each call in which one has."""
        found: dict[tuple[str, int], float] = {}
        for made in self._made.values():
            for key, call in made.items():
                if call.error and call.ended:
                    found[key] = min(call.ended, found.get(key, call.ended))
        return found

    def _open(self) -> Iterator[tuple[int, Call]]:
        """Yield the calls in which ranks wait, or failed because they waited."""
        for rank, dump in self._dumps.items():
            for state in dump.groups.values():
                if state.last is not None and self._is_open(rank, state.last):
                    yield rank, state.last

    def _is_open(self, rank: int, call: Call) -> bool:
        if call.ended is None:
            return self._dumps[rank].written - call.begun >= PATIENCE
        state = self._dumps[rank].groups.get(call.group)
        error = state.error if state and state.last == call else ""
        # On a GPU a call ends on the host before it fails on its stream.
        return (call.failed_by or error.partition(":")[0]) in (*_WAITED, *_INTERRUPTED)

    def _end(self, rank: int, call: Call) -> float:
        """Return when a rank no longer waited for others to make its call."""
        if call.error:
            return call.ended or 0.0
        return call.negotiated or call.ended or self._dumps[rank].written

    def _follow(self, rank: int, call: Call) -> None:
        """Follow a rank's wait to its end."""
        if (rank, call.key) in self._seen:
            return
        targets = self._targets(rank, call)
        self._seen[rank, call.key] = Wait(rank, call, tuple(targets))
        if not targets and call.error:
            self._blame(rank, f"failed in {call}: {call.error}", 0)
        for target in targets:
            self._explain(target, rank, call)

    def _targets(self, rank: int, call: Call) -> list[int]:
        """Return the ranks that a rank waits for in a call."""
        members = [each for each in self._members(rank, call) if each != rank]
        there = {each: self._made[each].get(call.key) for each in members if each in self._dumps}
        broken = [each for each, its in there.items() if its and self._broke(its)]
        if broken:
            return broken
        if not self._is_open(rank, call):
            return self._last_to_come(rank, call, there)
        late = [each for each in there if self._is_late(each, rank, call)]
        # A rank that is late itself waits for nobody: the others have failed because of it.
        if self._is_late(rank, rank, call):
            return []
        late += [each for each in members if each not in self._dumps]
        return late or self._inside(rank, call, there)

    def _inside(self, rank: int, call: Call, there: Mapping[int, Call | None]) -> list[int]:
        """Return whom a rank waits for in the middle of a call that all have made."""
        if interrupted := [r for r, its in there.items() if its and its.failed_by in _INTERRUPTED]:
            return interrupted if call.failed_by not in _INTERRUPTED else []
        mine = call.ended or float("inf")
        ends = {r: its.ended or float("inf") for r, its in there.items() if its}
        if ends and max(ends.values()) > mine + PATIENCE:
            return [r for r, end in ends.items() if end == max(ends.values())]
        state = self._dumps[rank].groups.get(call.group)
        return [r for r in state.waits_for if r in there] if state else []

    def _last_to_come(self, rank: int, call: Call, there: Mapping[int, Call | None]) -> list[int]:
        """Return for whom a rank waited in a call that has ended."""
        since = call.begun + _HALF * (self._end(rank, call) - call.begun)
        return [each for each, its in there.items() if its and its.begun > since]

    def _is_late(self, other: int, rank: int, call: Call) -> bool:
        """Whether a rank has not made a call, or made it after a member had failed in it."""
        its = self._made[other].get(call.key)
        if its is None:
            state = self._dumps[other].groups.get(call.group)
            passed = state and state.last and state.last.number > call.number
            # Its file may be older than the call.
            known = call.error or self._dumps[other].written >= call.begun + PATIENCE
            return not passed and bool(known)
        return its.begun > self._given_up.get(call.key, float("inf"))

    def _explain(self, target: int, rank: int, call: Call) -> None:
        """Say why a rank did not come to a call, or follow it to where it waits itself."""
        if target not in self._dumps:
            gone = any(f"rank {target} has ended" in each for each in self._errors())
            why = "has ended" if gone else "has ended, is stopped, or cannot be reached"
            self._blame(target, f"{why}: it left no file", 3 if gone else 1)
            return
        its = self._made[target].get(call.key)
        if its and self._broke(its):
            self._blame(target, f"failed by an error of its own, {its.error}, in {its}", 3)
            return
        if its and not self._is_late(target, rank, call):
            if self._is_open(target, its) and its.failed_by not in _INTERRUPTED:
                self._follow(target, its)
            else:
                self._blame(target, f"was {its.failed_by or 'late'} in {its}", 1)
            return
        until = its.begun if its else self._end(rank, call)
        elsewhere = self._elsewhere(target, call, until)
        if elsewhere is None:
            self._blame(target, self._absence(target, call, its), 2)
        elif elsewhere.failed_by == _MISMATCH:
            self._blame_mismatch(elsewhere)
        else:
            self._follow(target, elsewhere)

    def _elsewhere(self, rank: int, call: Call, until: float) -> Call | None:
        """Return the call in which a rank waited while others waited for it in another one."""
        made = [each for each in self._made[rank].values() if each.key != call.key]
        latest = max(
            (each for each in made if each.begun <= until),
            key=lambda each: each.begun,
            default=None,
        )
        if latest and (latest.failed_by == _MISMATCH or self._is_open(rank, latest)):
            return latest

        def overlap(other: Call) -> float:
            return min(until, self._end(rank, other)) - max(call.begun, other.begun)

        longest = max(made, key=overlap, default=None)
        if longest and overlap(longest) >= _HALF * (until - call.begun) > 0.0:
            return longest
        return None

    def _absence(self, rank: int, call: Call, its: Call | None) -> str:
        """Say of a rank that it did not make a call, or made it too late, and what it did."""
        if its:
            return f"came {its.begun - call.begun:.3g} s late to {its}"
        last = self._order[rank][-1] if self._order[rank] else None
        did = "it has made no call yet"
        if last:
            since = self._dumps[rank].written - self._end(rank, last)
            did = f"its last call was {last}, {since:.3g} s before it wrote its file"
        return f"has not made {call}; {did}"

    def _blame_mismatch(self, call: Call) -> None:
        """Blame those that made another call than most, or than before."""
        theirs = {
            rank: its
            for rank, made in self._made.items()
            if (its := made.get(call.key)) and its.failed_by == _MISMATCH
        }
        codes = Counter(its.code for its in theirs.values())
        (most, count), *others = codes.most_common()
        if any(each == count for _, each in others):
            odd = self._odd({rank: self._way(rank, its) for rank, its in theirs.items()})
        else:
            odd = [rank for rank, its in theirs.items() if its.code != most]
        for rank in odd or theirs:
            self._blame(rank, f"made another call than its peers, {theirs[rank]}", 2)

    def _end_mismatches(self) -> None:
        """Blame for a mismatch that was the last thing that happened."""
        for calls in self._order.values():
            if calls and calls[-1].failed_by == _MISMATCH:
                self._blame_mismatch(calls[-1])

    def _break_circle(self) -> None:
        """Blame those that went on to another call than in earlier steps."""
        self.circle = True
        calls = {each.rank: each.call for each in self.waits}
        ways: dict[int, list[Call]] = {}
        for wait in self.waits:
            for rank in calls.keys() & {*wait.targets}:
                ways.setdefault(rank, []).extend(self._way(rank, wait.call))
        for rank in self._odd(ways) or calls:
            self._blame(rank, f"is in {calls[rank]}, and its peers are in other calls", 1)

    def _odd(self, ways: Mapping[int, list[Call]]) -> list[int]:
        """Return the ranks that went on to another call than in earlier steps; none if all did.

        First by the one call before; where that says nothing of any rank, by more and more. ways:
        By rank, the calls of which one may be wrong.
        """
        for length in range(1, _LONGEST + 1):
            odd = [
                rank
                for rank, calls in ways.items()
                if any(self._is_new(rank, call, length) for call in calls)
            ]
            if odd:
                return odd if len(odd) < len(ways) else []
        return []

    def _way(self, rank: int, call: Call) -> list[Call]:
        """Return a rank's calls after its last one before a call of that call's group."""
        order = self._order[rank]
        before = [
            at
            for at, each in enumerate(order)
            if each.group == call.group and each.number < call.number
        ]
        end = next((at + 1 for at, each in enumerate(order) if each.key == call.key), len(order))
        return order[before[-1] + 1 if before else 0 : end]

    def _is_new(self, rank: int, call: Call, length: int) -> bool:
        """Whether the `length` calls before were made earlier, and never was this one the next."""
        kinds = self._kinds[rank]
        end = self._order[rank].index(call)
        before = kinds[end - length : end] if length <= end else []
        nexts = [
            kinds[at + length]
            for at in range(end - length)
            if before and kinds[at : at + length] == before
        ]
        return bool(nexts) and kinds[end] not in nexts

    def _blame(self, rank: int, why: str, sure: int) -> None:
        if rank not in self._found or self._found[rank].sure < sure:
            self._found[rank] = Culprit(rank, why, sure)

    def _members(self, rank: int, call: Call) -> tuple[int, ...]:
        state = self._dumps[rank].groups.get(call.group)
        return state.ranks if state else ()

    def _errors(self) -> Iterator[str]:
        for dump in self._dumps.values():
            for state in dump.groups.values():
                yield state.error

    def _broke(self, call: Call) -> bool:
        return bool(call.error) and call.failed_by not in (*_WAITED, *_INTERRUPTED, _MISMATCH)


def _made(dump: Dump) -> dict[tuple[str, int], Call]:
    """Return a rank's calls by group and number."""
    last = [state.last for state in dump.groups.values() if state.last]
    return {each.key: each for each in (*dump.calls, *last)}


def _kind(call: Call) -> str:
    """Return what is the same of a call in each step of a training: no number in its name is."""
    return f"{call.group} {re.sub('[0-9]+', '#', call.title)} {call.tensors}"


class Slow(NamedTuple):
    """A rank to whose calls the others came first, again and again.

    They waited `seconds` for it, `of` the seconds that the calls span; it came last in `times` of
    them.
    """

    rank: int
    seconds: float
    of: float
    times: int
    calls: int


def slowest(dumps: Mapping[int, Dump]) -> Slow | None:
    """Return the rank for which the others waited most, if that is much of their time."""
    made = [_made(dump) for dump in dumps.values()]
    late: Counter[int] = Counter()
    seconds = dict.fromkeys(dumps, 0.0)
    spans: list[float] = []
    keys = {key for each in made for key, call in each.items() if call.negotiated}
    for key in keys:
        came = {r: its[key].begun for r, its in zip(dumps, made, strict=True) if key in its}
        if len(came) > 1:
            last = max(came, key=lambda rank: came[rank])
            late[last] += 1
            seconds[last] += came[last] - min(came.values())
            spans += [min(came.values()), came[last]]
    if len(spans) < 2 * _FEW:
        return None
    rank = max(seconds, key=lambda each: seconds[each])
    waited = seconds[rank]
    found = Slow(rank, waited, max(spans) - min(spans), late[rank], len(spans) // 2)
    return found if waited >= _MUCH * found.of and late[rank] * 2 > found.calls else None
