"""All-reduces that users write themselves: verified before they run, and known by their steps."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from operator import index
from typing import NamedTuple

import torch

from collectives import validation
from collectives.reducers import Reducer
from collectives.schedules.algorithm import Order
from collectives.schedules.orders import tree_text
from collectives.schedules.schedule import Action, Collective, Schedule, Step, Transfer
from collectives.schedules.symbolic_step import ScheduleError
from collectives.schedules.verify import Proof, verify, with_leaves

# Of one rank; a generator that never ends must not hang its caller.
MAX_STEPS = 1 << 16
MAX_MESSAGES = 1 << 17
_MAX_ENTRIES = 64


class VerifiedSchedule(NamedTuple):
    """A user's all-reduce that was proved right.

    The schedule has this rank's steps as they were verified; the digest, a hash of all ranks'
    steps, is the same in every process.
    """

    schedule: Schedule
    proof: Proof
    digest: str


def verified(schedule: Schedule, rank: int, size: int) -> VerifiedSchedule:
    """Verify an all-reduce of `size` ranks, of which `rank` is to be run; the latest are kept.

    TypeError where it is no Schedule, or yields something else than Steps; ValueError, which says
    where, for other ranks, no all-reduce, or a wrong one.
    """
    validation.instance("schedule", schedule, Schedule, "a Schedule")
    if schedule.collective is not Collective.ALL_REDUCE or schedule.replicas > 1:
        raise ValueError(f"schedule must be an all-reduce without replicas, got {schedule}")
    if schedule.size != size:
        raise ValueError(f"schedule is for {schedule.size} ranks, this group has {size}")
    try:
        hash(schedule)
    except TypeError:
        raise TypeError("schedule.steps must have a hash, as functions do: pass one") from None
    return _verified(schedule, rank)


def require_carries(known: VerifiedSchedule, op: Reducer, dtype: torch.dtype) -> None:
    """Raise ValueError unless a schedule can carry an operator on tensors of a dtype."""
    name, proof = known.schedule.name, known.proof
    if op.needs_one_tree and not (proof.carries_adasum and proof.phases < 2):
        raise ValueError(
            f"schedule {name!r} cannot carry {op}: it reduces in phases, not every "
            "element by one expression tree, or in steps without the group of ranks that hold "
            "the whole operands"
        )
    if op.needs_one_tree and proof.by_tree and not op.reads_tree_of(dtype):
        raise ValueError(
            f"schedule {name!r} cannot carry {op} of {dtype}: it hands over operands with their "
            "tree, which the operator does not read: reduce them in pairs, as vhdd does"
        )
    if op.ordered and not (proof.all_at_once or _is_balanced(known.schedule)):
        raise ValueError(
            f"schedule {name!r} does not add every element by the balanced tree "
            f"{tree_text(known.schedule.size)}, which order='tree' is: `verify` of it, with "
            "joins='tree', has the tree that it makes"
        )
    if op.operands == "all" and not proof.all_at_once:
        raise ValueError(
            f"schedule {name!r} cannot carry {op}, which needs all ranks' operands at once, in "
            "rank order: let each reduction be of all of them"
        )


@lru_cache(maxsize=_MAX_ENTRIES)
def _is_balanced(schedule: Schedule) -> bool:
    """Return whether every element is the balanced tree, where that joins what meets at once."""
    return verify(schedule, joins="tree").tree == Order.BALANCED.tree(range(schedule.size))


@lru_cache(maxsize=_MAX_ENTRIES)
def _verified(schedule: Schedule, rank: int) -> VerifiedSchedule:
    kind = schedule.size, schedule.chunks, schedule.whole_segments, schedule.gathered
    digest = hashlib.blake2b(repr(kind).encode(), digest_size=8)
    mine: tuple[Step, ...] = ()
    for each in range(schedule.size):
        steps = tuple(_checked_steps(schedule, each))
        if each == rank:
            mine = steps
        plain = [
            (
                _plain(step.sends),
                _plain(step.recvs, receives=True),
                *step[2:4],
                *step.tree,
                # A list, which is no join of a tree.
                *filter(None, [[*step.digits]]),
            )
            for step in steps
        ]
        digest.update(repr(plain).encode())

    def steps_of(each: int) -> tuple[Step, ...]:
        return mine if each == rank else tuple(_checked_steps(schedule, each))

    frozen = replace(schedule, steps=steps_of)
    try:
        proof = verify(frozen)
    except ScheduleError as error:
        raise ValueError(f"schedule: {error}") from error
    return VerifiedSchedule(with_leaves(frozen), proof, digest.hexdigest())


def _plain(transfers: tuple[Transfer, ...], *, receives: bool = False) -> list[tuple[object, ...]]:
    """Return transfers as what looks the same in every process; only receives have actions."""
    return [(*each[:3], each.action.value) if receives else each[:3] for each in transfers]


def _checked_steps(schedule: Schedule, rank: int) -> Iterator[Step]:
    """Yield a rank's steps with every number an int.

    TypeError for what is no Step, or made of other things; ValueError for too many, or messages.
    """
    where = f"schedule {schedule.name!r}, rank {rank}"
    left = MAX_MESSAGES
    for number, step in enumerate(islice(schedule.steps(rank), MAX_STEPS + 1)):
        if number == MAX_STEPS:
            raise ValueError(f"{where} has more than {MAX_STEPS} steps")
        validation.instance(f"{where}, step {number}", step, Step, "a Step")
        try:
            # One more than there may be, so that it is seen that there are.
            sends = tuple(map(_checked, islice(step.sends, left + 1)))
            recvs = tuple(map(_checked, islice(step.recvs, left + 1)))
            group = tuple(map(index, islice(step.group, schedule.size + 1)))
            tree = tuple(map(_join, islice(step.tree, schedule.size)))
            digits = tuple(map(index, islice(step.digits, schedule.size)))
            checked = Step(sends, recvs, group, index(step.phase), tree, digits)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{where}, step {number}: {error}") from None
        left -= len(sends) + len(recvs)
        if left < 0:
            raise ValueError(f"{where} has more than {MAX_MESSAGES} messages")
        yield checked


def _join(each: Sequence[int]) -> tuple[int, int, int, int]:
    left, right, p, q = map(index, each)
    return left, right, p, q


def _checked(each: Transfer) -> Transfer:
    validation.instance("a message", each, Transfer, "a Transfer")
    validation.instance("action", each.action, Action, "an Action")
    return each._replace(peer=index(each.peer), start=index(each.start), stop=index(each.stop))
