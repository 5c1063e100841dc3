"""Negotiation by messages: do all ranks make the same call?

In about log2 n steps every rank learns the largest and the smallest code of the ranks that are at
work, and whether any rank has joined. Equal codes and none joined: go on. Otherwise the
descriptions themselves are gathered, and every rank raises the same error, or learns what the
joined ranks have to take part in.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch

from collectives.consistency.description import Description, difference
from collectives.errors import CollectiveMismatchError, TransportError
from collectives.execution.context import CallContext
from collectives.execution.operations import WITH_JOINED
from collectives.transport.base import Message, Transport
from collectives.transport.byte_gathering import gather_bytes, read_objects

_NO_CODE = torch.iinfo(torch.int64).min


class Joined(NamedTuple):
    """A rank that takes part in the others' calls until all have joined.

    Attributes:
        since: The number of the first call that it only joined.
        operators: The names of the reducers that it can carry out.
    """

    since: int
    operators: Collection[str]


class Outcome(NamedTuple):
    """What a negotiation has found, the same on all ranks.

    Attributes:
        joined: The ranks that have joined.
        last: Where all have joined, the rank that was the last to.
        call: What the others do, where any rank has joined.
    """

    joined: Sequence[int] = ()
    last: int | None = None
    call: Description | None = None


def negotiate_by_messages(
    mine: Description | Joined, call: CallContext, *, movable: bool = False
) -> Outcome:
    """Return when all ranks that have not joined make one call, or all have joined.

    Args:
        mine: What this rank does.
        call: What the steps of the negotiation have in common.
        movable: As `Negotiation.movable`.

    Raises:
        CollectiveMismatchError: On every rank with the same text, where the calls differ or the
            joined ranks cannot take part.
    """
    transport = call.transport
    if isinstance(mine, Joined):
        codes = (_NO_CODE, _NO_CODE, mine.since * transport.size + transport.rank + 1)
    else:
        codes = (mine.code, -mine.code, 0)
    # The least is the most of the opposites.
    most, least, since = _largest(codes, call)
    if most == _NO_CODE:
        return Outcome(last=(since - 1) % transport.size)
    if most == -least and not since:
        return Outcome()
    report = ["", sorted(mine.operators)] if isinstance(mine, Joined) else [mine.to_json(), movable]
    reports = gather_bytes(json.dumps(report).encode(), transport, call.label, call.timeout)
    told = read_objects(reports, transport)
    try:
        return _conclude(told, transport)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise TransportError(f"{call.label}: what ranks told is no call: {error}") from error


def _largest(numbers: Sequence[int], call: CallContext) -> list[int]:
    """Return, number by number, the largest of all ranks'.

    In each step a rank learns from twice as far below itself what the ranks up to there know. Any
    number of ranks may then count one twice, which changes no maximum.
    """
    transport, distance = call.transport, 1
    rank, size = transport.rank, transport.size
    known = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    while distance < size:
        theirs = torch.empty_like(known)
        transport.exchange(
            [Message((rank + distance) % size, known)],
            [Message((rank - distance) % size, theirs)],
            f"step {distance.bit_length() - 1} of {call.label}",
            call.timeout,
        )
        transport.steps += 1
        known = torch.maximum(known, theirs)
        distance *= 2
    largest: list[int] = known.tolist()
    return largest


def _conclude(reports: list[list[Any]], transport: Transport) -> Outcome:
    """Draw the conclusion that all ranks draw from all ranks' reports."""
    calls = {r: Description.from_json(text) for r, (text, *_) in enumerate(reports) if text}
    joined = [rank for rank in range(len(reports)) if rank not in calls]
    call = calls[min(calls)]
    if any(other != call for other in calls.values()):
        movable = [rank for rank in calls if reports[rank][1]]
        raise CollectiveMismatchError(difference(calls, transport, movable))
    for rank in joined:
        _, operators = reports[rank]
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
    return Outcome(joined, call=call)
