"""Optimizer states that lie on one rank each: whose they are, and gathering them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from adasum.horovod import objects
from collectives import Group, validation

# Whether a rank has a state of a parameter.
HAS, LACKS = b"1", b"0"


def gather_states(
    group: Group,
    states: Sequence[tuple[int, Mapping[str, Any]]],
    to: int | None,
    whole: Mapping[int, Any] | None,
) -> Mapping[int, Any] | None:
    """Return the states that are not empty by number, with tensors on the CPU; collective.

    `states` has the rank that has each state, and the state, of which only this rank's are read.
    They go to rank `to`, or to all for None; other ranks get None. `whole` is the answer where this
    rank has it already; where all have that get it, nothing is sent. ValueError: `to` is no rank.
    TypeError: on every rank, where a state cannot be sent.
    """
    if to is not None:
        validation.rank("to", to, group.size)
    has = group.all_gather_bytes(b"1" if whole is not None else b"0", name="states: who has them")
    wanted = range(group.size) if to is None else [to]
    if all(has[rank] == b"1" for rank in wanted):
        return whole
    gathered: dict[int, Any] = {}
    for number, (owner, state) in enumerate(states):
        sent = objects.encode(dict(state)) if group.rank == owner and state else b""
        received = objects.broadcast_bytes(group, owner, sent, f"state {number}")
        if received:
            # By ranks that do not want it, too: all raise where it cannot be sent.
            state = objects.decode(received, f"the state of parameter {number} on rank {owner}")
            if group.rank in wanted:
                gathered[number] = state
    return gathered if group.rank in wanted else None


def assign_owners(
    owners: dict[Tensor, int], new: Sequence[Tensor], size: int, states: Sequence[bytes]
) -> None:
    """Give each of the new parameters an owner, beside those in `owners`.

    Trainable ones first, each to the rank that owns the fewest bytes. Where states are as large as
    their parameters, or any multiple of that, no rank then has more than an n-th of all state plus
    the largest one. `states` has for each rank a byte for each of the new ones, `HAS` where it has
    a state of it, and no bytes for a rank that has joined. A parameter whose state some ranks have,
    and others not, is the first one's of them.
    """
    loads = [0] * size
    for parameter, rank in owners.items():
        loads[rank] += parameter.nbytes
    for k in sorted(range(len(new)), key=lambda k: not new[k].requires_grad):
        holders = [i for i, each in enumerate(states) if each[k : k + 1] == HAS]
        some = 0 < len(holders) < sum(map(bool, states))
        rank = holders[0] if some else loads.index(min(loads))
        owners[new[k]] = rank
        loads[rank] += new[k].nbytes
