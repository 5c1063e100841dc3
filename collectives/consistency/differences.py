"""The text of a mismatch: how two ranks' calls differ."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import zip_longest

from collectives.execution.call import Call
from collectives.transport.base import Transport


def difference(
    calls: Mapping[int, Call], transport: Transport, movable: Collection[int] = ()
) -> str:
    """Describe how the lowest rank's call differs from the first one that is not like it.

    The text is the same on every rank. calls: By rank, at least two that differ. movable: The ranks
    whose call is a named asynchronous one.
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
    """Say what to do if a named asynchronous call meets a call of another name or kind.

    The other one may be a call of this library, such as the optimizer's, which the user did not
    write.
    """
    met = f"makes another call, a {other.kind}" if other.kind != call.kind else f"calls {other}"
    return (
        f"{transport.named([rank])} calls {call}, and {transport.named([other_rank])} {met}: "
        f"{call} was started at another place among the calls; start it at the same place on every "
        "rank, as before backward() on all or behind it on all, or in a group of its own "
        "(Group.split, or a process set)"
    )


def _entry(call: Call, number: int, other_length: bool) -> str:
    """Return one entry of a call; if tensor counts differ, the call's count of tensors first."""
    entry = [*call.entries(), ""][number] if number <= len(call.entries()) else ""
    if not other_length or (entry and number <= len(call.options)):
        return entry
    count = f"{len(call.described)} tensor{'' if len(call.described) == 1 else 's'}"
    return f"{count}, among them {entry}" if entry else count
