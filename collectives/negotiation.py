"""The negotiation that precedes each call of a group: do all ranks make the same call?

- Ranks that share memory write a code of their call, a hash, to their signal pads, and wait until
  all pads hold the same code, without messages. The code includes the stage of a request on a GPU:
  if ranks differ only in it, they learn the least stage.
- Messages are used if not all ranks share memory, if the codes in the pads differ (to find out
  how), and while any rank has joined. In about log2 n steps every rank learns the largest and the
  smallest code of the ranks that have not joined, and whether any has. If both codes are equal and
  no rank has joined, the call runs. Otherwise the descriptions of all calls are gathered, and every
  rank raises the same error, or learns the call that the joined ranks must take part in.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from collectives.call import Call
from collectives.errors import CollectiveMismatchError, TransportError
from collectives.execution.operations import WITH_JOINED
from collectives.transport.base import Message, Transport, gather_bytes, read_objects
from collectives.transport.symmetric_memory import JOINED, RanksDiffer

# The code of joined ranks in the search for the largest code: smaller than any other.
_NO_CODE = torch.iinfo(torch.int64).min


class Joined(NamedTuple):
    """The part of a joined rank: it takes part in the others' calls until all have joined.

    Attributes:
        since: The number of the first call that it joined.
        operators: The names of the reducers that it can use.
        label: The name of its part in the next call, for errors.
    """

    since: int
    operators: Collection[str]
    label: str = "join"


class Outcome(NamedTuple):
    """The result of a negotiation, the same on all ranks.

    Attributes:
        joined: The ranks that have joined.
        last: The rank that joined last, if all have joined.
        call: The call of the other ranks, without tensors, if any rank has joined.
        stage: The least of the calls' stages; None if all are equal, and no rank has joined.
    """

    joined: Sequence[int] = ()
    last: int | None = None
    call: Call | None = None
    stage: int | None = None


_SAME_CALL = Outcome()


class Negotiation:
    """Checks for each of the group's calls that all ranks make it."""

    def __init__(self, transport: Transport, timeout: float) -> None:
        self._transport = transport
        self._timeout = timeout
        self._any_joined = False

    def signal(self, mine: Call | Joined) -> None:
        """Tell the other ranks of the call through shared memory, if any; does not wait."""
        memory = self._transport.symmetric_memory
        if memory is not None and self._transport.size > 1:
            memory.signal(mine.code ^ mine.stage or 1 if isinstance(mine, Call) else JOINED)

    def wait(self, mine: Call | Joined) -> Outcome:
        """Wait until all ranks that have not joined make the same call, or all have joined.

        If calls differ, or a joined rank cannot take part, every rank raises the same
        CollectiveMismatchError.
        """
        if self._transport.size == 1:
            return _SAME_CALL
        memory = self._transport.symmetric_memory
        if memory is not None and not self._any_joined and isinstance(mine, Call):
            # By `suppress`, not `except`: the error of a mismatch, raised below, would otherwise
            # have RanksDiffer as its context in the traceback.
            with suppress(RanksDiffer):
                memory.wait(f"step 0 (the ranks' arrival) of {mine.label}", self._timeout)
                return _SAME_CALL
        # Reset first: if the next line raises a mismatch, that ends all joins.
        self._any_joined = False
        outcome = negotiate_by_messages(mine, self._transport, self._timeout)
        self._any_joined = bool(outcome.joined)
        return outcome


def negotiate_by_messages(mine: Call | Joined, transport: Transport, timeout: float) -> Outcome:
    """Negotiate like `Negotiation.wait`, but only by messages."""
    label = f"the negotiation of {mine.label}"
    # The third number is 0 if this rank has not joined. It grows with the first call that the rank
    # joined, then with the rank, so the largest one tells which rank joined last.
    if isinstance(mine, Joined):
        codes = (_NO_CODE, _NO_CODE, mine.since * transport.size + transport.rank + 1)
    else:
        code = mine.code ^ mine.stage or 1
        codes = (code, -code, 0)
    # The smallest code is the negative of the largest negated one: one maximum finds both.
    most, least, since = _largest(codes, transport, label, timeout)
    if most == _NO_CODE:
        return Outcome(last=(since - 1) % transport.size)
    if most == -least and not since:
        return _SAME_CALL
    report: list[Any]
    if isinstance(mine, Joined):
        report = ["", sorted(mine.operators)]
    else:
        report = [mine.text, mine.movable, mine.stage]
    reports = gather_bytes(json.dumps(report).encode(), transport, label, timeout)
    said = read_objects(reports, transport)
    try:
        return _conclude(said, transport)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise TransportError(f"{label}: the ranks' reports describe no call: {error}") from error


def _largest(numbers: Sequence[int], transport: Transport, label: str, timeout: float) -> list[int]:
    """Return the elementwise maximum of all ranks' numbers.

    Each rank knows the maximum over itself and some ranks below it, whose number doubles in each
    step. If the group's size is not a power of two some ranks are counted twice, which does not
    change a maximum.
    """
    rank, size, distance, step = transport.rank, transport.size, 1, 0
    known = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    while distance < size:
        theirs = torch.empty_like(known)
        transport.exchange(
            [Message((rank + distance) % size, known)],
            [Message((rank - distance) % size, theirs)],
            f"step {step} of {label}",
            timeout,
        )
        transport.steps += 1
        known = torch.maximum(known, theirs)
        distance, step = 2 * distance, step + 1
    largest: list[int] = known.tolist()
    return largest


def _conclude(reports: list[list[Any]], transport: Transport) -> Outcome:
    """Return the outcome of all ranks' reports, or raise their error."""
    calls = {rank: Call.of_text(text) for rank, (text, *_) in enumerate(reports) if text}
    joined = [rank for rank in range(len(reports)) if rank not in calls]
    if len({reports[rank][0] for rank in calls}) > 1:
        movable = [rank for rank in calls if reports[rank][1]]
        raise CollectiveMismatchError(difference(calls, transport, movable))
    call = calls[min(calls)]
    for rank in joined:
        operators = reports[rank][1]
        problem = None
        if call.kind not in WITH_JOINED:
            problem = "cannot be called"
        elif rank in (call.options.get("root"), call.options.get("dst")):
            problem = f"needs {transport.named([rank])}"
        elif call.options.get("op", operators[0]) not in operators:
            problem = f"needs op {call.options['op']}, which join was not given there,"
        if problem:
            named = transport.named([rank])
            raise CollectiveMismatchError(f"{call} {problem} while {named} has joined")
    return Outcome(joined, call=call, stage=min(reports[rank][2] for rank in calls))


def difference(
    calls: Mapping[int, Call], transport: Transport, movable: Collection[int] = ()
) -> str:
    """Return a text on the difference between the lowest rank's call and the first other one.

    The text is the same on every rank. calls: by rank, at least two that differ; movable: the ranks
    with named asynchronous calls.
    """
    lowest = min(calls)
    first = calls[lowest].entries()
    rank = next(r for r in sorted(calls) if calls[r].text != calls[lowest].text)
    other = calls[rank].entries()
    disagree = f"ranks disagree{f' in the group{of}' if (of := transport.of_ranks) else ''}"
    one, another = transport.named([lowest]), transport.named([rank])
    if first[0] != other[0] and (lowest in movable) is not (rank in movable):
        early, late = (lowest, rank) if lowest in movable else (rank, lowest)
        return f"{disagree}: {_moved(calls[early], calls[late], early, late, transport)}"
    if first[0] != other[0]:
        return f"{disagree}: {one} calls {first[0]}, {another} calls {other[0]}"
    if first == other:
        # For example one rank's tensor is named "tensor 0", and the other's has no name.
        return f"{disagree}: {one} and {another} call {first[0]} with names that only look alike"
    number = next(i for i, (mine, theirs) in enumerate(zip_longest(first, other)) if mine != theirs)
    mine, theirs = (
        _entry(calls[each], number, len(calls[lowest].described) != len(calls[rank].described))
        for each in (lowest, rank)
    )
    return (
        f"{disagree}: {one} calls {first[0]} with {mine}, {another} calls {other[0]} with {theirs}"
    )


def _moved(call: Call, other: Call, rank: int, other_rank: int, transport: Transport) -> str:
    """Return advice for a named asynchronous call that meets one of another name or kind.

    The other call may be this library's own, such as the optimizer's.
    """
    met = f"makes another call, a {other.kind}" if other.kind != call.kind else f"calls {other}"
    return (
        f"{transport.named([rank])} calls {call}, and {transport.named([other_rank])} {met}: "
        f"{call} was started at another place among the calls; start it at the same place on every "
        "rank, as before backward() on all or behind it on all, or in a group of its own "
        "(Group.split, or a process set)"
    )


def _entry(call: Call, number: int, other_length: bool) -> str:
    """Return one entry of the call, preceded by its number of tensors if the other's differs."""
    entry = [*call.entries(), ""][number] if number <= len(call.entries()) else ""
    if not other_length or (entry and number <= len(call.options)):
        return entry
    count = f"{len(call.described)} tensor{'' if len(call.described) == 1 else 's'}"
    return f"{count}, among them {entry}" if entry else count
