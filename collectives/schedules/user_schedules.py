"""All-reduces that users write: verified before they run, and identified by their steps."""

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
from collectives.reducers import Needs, Reducer
from collectives.schedules.algorithm import refusal
from collectives.schedules.schedule import Action, Collective, Schedule, Step, Transfer
from collectives.schedules.symbolic_step import ScheduleError
from collectives.schedules.verify import Proof, verify, with_leaves

# Limits per rank: an endless generator must not hang its caller.
MAX_STEPS = 1 << 16
MAX_MESSAGES = 1 << 17
_MAX_ENTRIES = 64


class VerifiedSchedule(NamedTuple):
    """A user's all-reduce and its proof.

    The schedule has the steps as verified. The digest is their hash, equal in every process.
    """

    schedule: Schedule
    proof: Proof
    digest: str


def verified(schedule: Schedule, size: int) -> VerifiedSchedule:
    """Verify an all-reduce of `size` ranks; the latest results are cached.

    Raises:
        TypeError: It is not a Schedule, or yields something other than Steps.
        ValueError: It is not an all-reduce, is wrong, or is for another number of ranks.
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
    return _verified(schedule)


def require_carries(known: VerifiedSchedule, op: Reducer, dtype: torch.dtype) -> None:
    """Raise ValueError unless the schedule can carry the operator on tensors of this dtype."""
    schedule, proof = known.schedule, known.proof
    if proof.phases > 1:
        proof = replace(proof, meets=proof.meets & ~Needs.ONE_TREE)
    elif Needs.BALANCED_TREE in op.needs:
        # The operator itself joins several operands by the balanced tree.
        proof = replace(proof, meets=proof.meets | _with_trees(schedule).meets)
    if reason := refusal(
        proof, op.needs, op.reads_tree_of(dtype), op=f"{op} of {dtype}", size=schedule.size
    ):
        raise ValueError(f"schedule {schedule.name!r} {reason}")


@lru_cache(maxsize=_MAX_ENTRIES)
def _with_trees(schedule: Schedule) -> Proof:
    return verify(schedule, joins="tree")


@lru_cache(maxsize=_MAX_ENTRIES)
def _verified(schedule: Schedule) -> VerifiedSchedule:
    steps = [tuple(_checked_steps(schedule, rank)) for rank in range(schedule.size)]
    kind = schedule.size, schedule.chunks, schedule.whole_segments, schedule.gathered
    digest = hashlib.blake2b(repr((kind, steps)).encode(), digest_size=8).hexdigest()
    frozen = replace(schedule, steps=steps.__getitem__)
    try:
        return VerifiedSchedule(with_leaves(frozen), verify(frozen), digest)
    except ScheduleError as error:
        raise ValueError(f"schedule: {error}") from error


def _checked_steps(schedule: Schedule, rank: int) -> Iterator[Step]:
    """Yield one rank's steps with all numbers as ints; raise for wrong types, or too many steps."""
    where = f"schedule {schedule.name!r}, rank {rank}"
    left = MAX_MESSAGES
    for number, step in enumerate(islice(schedule.steps(rank), MAX_STEPS + 1)):
        if number == MAX_STEPS:
            raise ValueError(f"{where} has more than {MAX_STEPS} steps")
        validation.instance(f"{where}, step {number}", step, Step, "a Step")
        try:
            # One more than allowed, to notice an excess.
            sends = tuple(map(_checked, islice(step.sends, left + 1)))
            recvs = tuple(map(_checked, islice(step.recvs, left + 1)))
            group = tuple(map(index, islice(step.group, schedule.size + 1)))
            tree = tuple(map(_join, islice(step.tree, schedule.size)))
            checked = Step(sends, recvs, group, index(step.phase), tree)
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
