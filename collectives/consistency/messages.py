"""Negotiation by messages: do all ranks make the same call?

One all-reduce of some hundred bytes: the largest and the smallest code of the ranks that are at
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
from collectives.execution.executor import execute
from collectives.execution.operations import WITH_JOINED
from collectives.reducers import Max
from collectives.schedules import recursive_doubling
from collectives.transport.base import Transport
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
        RanksDiffer: Where another rank's messages carry another code.
    """
    transport = call.transport
    if isinstance(mine, Joined):
        codes = (_NO_CODE, _NO_CODE, mine.since * transport.size + transport.rank + 1)
    else:
        codes = (mine.code, -mine.code, 0)
    # The least is the most of the opposites.
    extremes = torch.tensor(codes, dtype=torch.int64, device="cpu")
    execute(recursive_doubling.all_reduce(transport.size), extremes, Max, call)
    most, least, since = extremes.tolist()
    if most == _NO_CODE:
        return Outcome(last=(since - 1) % transport.size)
    if most == -least and not since:
        return Outcome()
    report = ["", sorted(mine.operators)] if isinstance(mine, Joined) else [mine.to_json(), movable]
    reports = gather_bytes(
        json.dumps(report).encode(), transport, call.label, call.timeout, call.code
    )
    told = read_objects(reports, transport)
    try:
        return _conclude(told, transport)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise TransportError(f"{call.label}: what ranks told is no call: {error}") from error


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
