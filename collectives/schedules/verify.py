"""Verification of a schedule, for all ranks at once, by running it on symbols."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise, zip_longest

from collectives import validation
from collectives.schedules.schedule import Action, Collective, Schedule, Step, Transfer

Leaves = tuple[int, int] | None
"""`Transfer.leaves`; None of a COPY, and where the chunks of a receive differ in them."""

LeafWeights = tuple[tuple[tuple[Leaves, ...], ...], ...]
"""The Leaves of every receive: by rank, by step, in the order of the step's receives."""


class ScheduleError(AssertionError):
    """A schedule does not compute its collective."""


@dataclass(frozen=True)
class Proof:
    """What `verify` found.

    Attributes:
        steps: Number of steps.
        phases: Number of reducers that the run takes, 0 where nothing is reduced.
        one_tree: Whether all chunks end with one expression tree of the last phase, whose leaves
            are what the earlier phases reduced in any order.
        carries_adasum: Whether, besides, every reduction of the last phase names a group that holds
            its whole operands, or whole segments of them, and as many ranks stand behind each chunk
            of a message.
        leaves: How many ranks stand behind both operands of every REDUCE receive.
    """

    steps: int
    phases: int
    one_tree: bool
    carries_adasum: bool
    leaves: LeafWeights = field(default=(), repr=False, compare=False)


class _Expressions:
    """Interned expression trees over the ranks' inputs; a node is an int.

    Attributes:
        ranks: The inputs in each node, a bit each.
        phase: The phase of each node's root, -1 for an input.
    """

    def __init__(self, inputs: int) -> None:
        self.ranks = [1 << i for i in range(inputs)]
        self.phase = [-1] * inputs
        self._shapes: list[int] = [-1] * inputs
        self._nodes: dict[tuple[int, int, int], int] = {}
        self._ids: dict[Hashable, int] = {}

    def reduce(self, left: int, right: int, phase: int, where: str) -> int:
        node = self._nodes.get((left, right, phase))
        if node is not None:
            return node
        if self.ranks[left] & self.ranks[right]:
            raise ScheduleError(f"{where}: a rank's contribution is counted twice")
        if max(self.phase[left], self.phase[right]) > phase:
            raise ScheduleError(f"{where}: phase {phase} reduces the result of a later phase")
        node = self._nodes[left, right, phase] = len(self.ranks)
        shape = (phase, self.shape(left, phase), self.shape(right, phase))
        self._shapes.append(self._id(shape))
        self.ranks.append(self.ranks[left] | self.ranks[right])
        self.phase.append(phase)
        return node

    def shape(self, node: int, phase: int) -> int:
        """Return an id of the node's tree, with earlier phases as the sets of their inputs."""
        return self._shapes[node] if self.phase[node] == phase else self._id(self.ranks[node])

    def _id(self, key: Hashable) -> int:
        return self._ids.setdefault(key, len(self._ids))


_State = list[list[int | None]]
# By chunk: shapes of the left and the right operand of its reductions, one after the other.
_Reductions = dict[int, tuple[tuple[int, int], ...]]
# By sender and receiver: first chunk, last chunk + 1 and values of each message, in order.
_Mail = dict[tuple[int, int], list[tuple[int, int, list[int]]]]
# By chunk: what is received to stand before, and after, the rank's own value.
_Operands = dict[int, tuple[list[int], list[int]]]


def verify(schedule: Schedule) -> Proof:
    """Prove `schedule` for every rank.

    Proved: every send has its receive in the same step and of the same chunks, and the reverse;
    no chunk is read before it is written, nor received into while it is being sent; every rank
    ends with every contribution exactly once where the collective says so; all ranks hold the same
    expression tree for a chunk; no phase reduces the result of a later one; what a rank reduces in
    a step is equal or disjoint ranges; and every non-empty `group` holds the same whole operands,
    each chunk once, every rank's part of it in one range: a pair of them, or any number where the
    group is one rank. With whole_segments a group is one rank, which holds whole segments. A
    gathered schedule only copies, and ends with every rank's vector on every rank. Where a receive
    says how many ranks stand behind its operands, so many do.

    Raises:
        ScheduleError: One of these does not hold; the text names the rank and the step.
    """
    validation.instance("schedule", schedule, Schedule, "a Schedule")
    size, chunks = schedule.size, schedule.chunks
    expressions = _Expressions(size // schedule.replicas)
    state = _initial(schedule)
    grouped: dict[int, bool] = {}
    leaves: list[list[tuple[Leaves, ...]]] = [[] for _ in range(size)]
    count = 0
    for count, steps in enumerate(zip_longest(*map(schedule.steps, range(size))), 1):
        where = f"{schedule.name} of {size}, step {count - 1}"
        if None in steps:
            raise ScheduleError(f"{where}: rank {steps.index(None)} has no step while others do")
        reductions = _run_step(steps, state, expressions, chunks, leaves, where)
        _check_ranges(steps, where)
        _check_groups(steps, reductions, schedule, where)
        for rank, (step, reduced) in enumerate(zip(steps, reductions, strict=True)):
            if reduced:
                carried = bool(step.group) and not _is_uneven(step, leaves[rank][-1])
                grouped[step.phase] = grouped.get(step.phase, True) and carried
    results = _results(schedule, state, expressions)
    found = tuple(map(tuple, leaves))
    if schedule.gathered:
        if grouped:
            raise ScheduleError(f"{schedule.name}: a gathered schedule reduces in a step")
        return Proof(count, int(size > 1), one_tree=True, carries_adasum=True, leaves=found)
    last = max(grouped, default=-1)
    one_tree = len({expressions.shape(result, last) for result in results}) < 2
    return Proof(count, last + 1, one_tree, one_tree and grouped.get(last, True), found)


@lru_cache(maxsize=256)
def leaf_weights(schedule: Schedule) -> LeafWeights:
    """Return how many ranks stand behind both operands of every REDUCE receive, kept by schedule.

    Of the receive `schedule.steps(rank)[step].recvs[i]` it is entry [rank][step][i]: (p, q) with p
    ranks behind the receiver's own value before the step and q behind the message.

    Raises:
        ScheduleError: As `verify`, of all ranks' steps.
    """
    return verify(schedule).leaves


@lru_cache(maxsize=256)
def with_leaves(schedule: Schedule) -> Schedule:
    """Return the schedule, of which every REDUCE receive says its `leaves`.

    Raises:
        ScheduleError: As `verify`.
    """
    found = leaf_weights(schedule)

    def steps(rank: int) -> Iterator[Step]:
        for step, leaves in zip(schedule.steps(rank), found[rank], strict=True):
            recvs = zip(step.recvs, leaves, strict=True)
            yield step._replace(recvs=tuple(recv._replace(leaves=each) for recv, each in recvs))

    return replace(schedule, steps=steps)


def _initial(schedule: Schedule) -> _State:
    owners = [_owner(schedule, chunk) for chunk in range(schedule.chunks)]
    state: _State = []
    for rank in range(schedule.size):
        mine = rank // schedule.replicas
        state.append([mine if owner in (None, rank) else None for owner in owners])
    return state


def _owner(schedule: Schedule, chunk: int) -> int | None:
    """Return the rank whose chunk every rank is sent; None where all ranks' are reduced."""
    if schedule.collective is Collective.BROADCAST:
        return schedule.root
    if schedule.gathered:
        return chunk // schedule.parts
    return chunk if schedule.collective is Collective.ALL_GATHER else None


def _run_step(
    steps: Sequence[Step],
    state: _State,
    expressions: _Expressions,
    chunks: int,
    leaves: Sequence[list[tuple[Leaves, ...]]],
    where: str,
) -> list[_Reductions]:
    """Advance all ranks by one step; return every rank's reductions, add its receives' leaves."""
    mail = _send(steps, state, chunks, where)
    reductions: list[_Reductions] = []
    for rank, step in enumerate(steps):
        copied: set[int] = set()
        operands: _Operands = {}
        counted: list[Leaves] = []
        for recv in step.recvs:
            _check_transfer(rank, recv, len(steps), chunks, where)
            values = _receive(rank, recv, mail, where)
            mine = state[rank][recv.start : recv.stop]
            reduces = recv.action is not Action.COPY
            counted.append(_leaves(mine, values, expressions) if reduces else None)
            if recv.leaves is not None and recv.leaves != counted[-1]:
                raise ScheduleError(
                    f"{where}: rank {rank} says that {recv.leaves} ranks stand behind its value "
                    f"and rank {recv.peer}'s message, not {counted[-1]}"
                )
            for chunk, value in enumerate(values, recv.start):
                if chunk in copied or (not reduces and chunk in operands):
                    raise ScheduleError(f"{where}: rank {rank} writes chunk {chunk} twice")
                if reduces:
                    after_mine = recv.action is Action.REDUCE_RIGHT
                    operands.setdefault(chunk, ([], []))[after_mine].append(value)
                else:
                    copied.add(chunk)
                    state[rank][chunk] = value
        leaves[rank].append(tuple(counted))
        reduced = _reduce(state[rank], operands, step.phase, expressions, f"{where}: rank {rank}")
        reductions.append(reduced)
    for (source, peer), queue in mail.items():
        if queue:
            raise ScheduleError(f"{where}: rank {source} sends to rank {peer}, which receives none")
    return reductions


def _send(steps: Sequence[Step], state: _State, chunks: int, where: str) -> _Mail:
    """Return all ranks' messages of a step, with the values before it."""
    mail: _Mail = {}
    for rank, step in enumerate(steps):
        for send in step.sends:
            _check_transfer(rank, send, len(steps), chunks, where)
            values = [v for v in state[rank][send.start : send.stop] if v is not None]
            if len(values) < send.stop - send.start:
                raise ScheduleError(f"{where}: rank {rank} sends a chunk it does not have yet")
            mail.setdefault((rank, send.peer), []).append((send.start, send.stop, values))
        for recv in step.recvs:
            if recv.action is Action.COPY and any(
                send.start < recv.stop and recv.start < send.stop for send in step.sends
            ):
                raise ScheduleError(f"{where}: rank {rank} receives into chunks it is sending")
    return mail


def _receive(rank: int, recv: Transfer, mail: _Mail, where: str) -> list[int]:
    """Take the message that is next for a receive; return its values."""
    queue = mail.get((recv.peer, rank))
    if not queue:
        raise ScheduleError(f"{where}: rank {rank} waits for rank {recv.peer}, which sends none")
    start, stop, values = queue.pop(0)
    if (start, stop) != (recv.start, recv.stop):
        raise ScheduleError(
            f"{where}: rank {recv.peer} sends chunks [{start}, {stop}), "
            f"rank {rank} expects [{recv.start}, {recv.stop})"
        )
    return values


def _reduce(
    mine: list[int | None],
    operands: _Operands,
    phase: int,
    expressions: _Expressions,
    where: str,
) -> _Reductions:
    """Reduce what a rank has received into its own chunks; return its reductions."""
    reductions: _Reductions = {}
    for chunk, (before, after) in operands.items():
        own = mine[chunk]
        if own is None:
            raise ScheduleError(f"{where} reduces a chunk it does not have")
        whole = [*before, own, *after]
        left = whole[0]
        pairs = []
        for right in whole[1:]:
            pairs.append((expressions.shape(left, phase), expressions.shape(right, phase)))
            left = expressions.reduce(left, right, phase, where)
        reductions[chunk] = tuple(pairs)
        mine[chunk] = left
    return reductions


def _leaves(
    mine: Sequence[int | None], received: Sequence[int | None], expressions: _Expressions
) -> Leaves:
    """Return how many inputs stand behind both of each pair of values; None where pairs differ."""

    def count(value: int | None) -> int:
        return 0 if value is None else expressions.ranks[value].bit_count()

    first, *others = {(count(a), count(b)) for a, b in {*zip(mine, received, strict=True)}}
    return None if others else first


def _is_uneven(step: Step, leaves: Sequence[Leaves]) -> bool:
    """Return whether the chunks of a REDUCE receive differ in their leaves."""
    recvs = zip(step.recvs, leaves, strict=True)
    return any(found is None and recv.action is not Action.COPY for recv, found in recvs)


def _check_transfer(rank: int, transfer: Transfer, size: int, chunks: int, where: str) -> None:
    peer, start, stop, *_ = transfer
    if not 0 <= peer < size or peer == rank:
        raise ScheduleError(f"{where}: rank {rank} names rank {peer} as its peer")
    if not 0 <= start < stop <= chunks:
        raise ScheduleError(f"{where}: rank {rank} names chunks [{start}, {stop}) of {chunks}")


def _check_ranges(steps: Sequence[Step], where: str) -> None:
    """Check that a rank reduces equal or disjoint ranges, and one range where it has a group."""
    for rank, step in enumerate(steps):
        recvs = [r for r in step.recvs if r.action is not Action.COPY]
        ranges = list(dict.fromkeys(recv[1:3] for recv in recvs))
        if any(b[0] < a[1] for a, b in pairwise(sorted(ranges))):
            raise ScheduleError(f"{where}: rank {rank} reduces ranges that overlap: {ranges}")
        if step.group and any(b[0] != a[1] for a, b in pairwise(ranges)):
            raise ScheduleError(f"{where}: rank {rank} has a group but not one range: {ranges}")


def _check_groups(
    steps: Sequence[Step], reductions: Sequence[_Reductions], schedule: Schedule, where: str
) -> None:
    """Check that every group of a step holds the same whole operands, each chunk once."""
    seen: set[tuple[int, ...]] = set()
    for rank, step in enumerate(steps):
        group = step.group
        if not group:
            continue
        if rank not in group:
            raise ScheduleError(f"{where}: rank {rank} names a group it is not in: {group}")
        if group in seen:
            continue
        seen.add(group)
        if list(group) != sorted(set(group)) or not 0 <= group[0] <= group[-1] < len(steps):
            raise ScheduleError(f"{where}: group {group} is not ranks in ascending order")
        for member in group:
            if (steps[member].group, steps[member].phase) != (group, step.phase):
                raise ScheduleError(f"{where}: ranks {rank} and {member} name different groups")
        if schedule.whole_segments:
            if len(group) > 1:
                raise ScheduleError(f"{where}: group {group} is of more ranks than hold a segment")
            continue
        held = [reduced for member in group for reduced in reductions[member].items()]
        operands = {pairs for _, pairs in held}
        covered = {chunk for chunk, _ in held}
        whole = len(held) == len(covered) == schedule.chunks and len(operands) == 1
        if not whole or (len(group) > 1 and len(operands.pop()) > 1):
            raise ScheduleError(
                f"{where}: group {group} does not hold one pair of whole vectors, nor is it one "
                "rank that holds several"
            )


def _results(schedule: Schedule, state: _State, expressions: _Expressions) -> set[int]:
    """Check what every rank ends with; return the distinct expressions of the reduced chunks."""
    size, chunks, collective = schedule.size, schedule.chunks, schedule.collective
    everyone = (1 << size // schedule.replicas) - 1
    results: set[int] = set()
    if collective in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER) and chunks != size:
        raise ScheduleError(f"{schedule.name}: {collective.value} has one chunk a rank")
    for rank in [schedule.root] if collective is Collective.REDUCE else range(size):
        wanted = range(chunks)
        if collective is Collective.REDUCE_SCATTER:
            wanted = range(rank, rank + 1)
        for chunk in wanted:
            value = state[rank][chunk]
            where = f"{schedule.name} of {size}: rank {rank} chunk {chunk}"
            if value is None:
                raise ScheduleError(f"{where} is never written")
            owner = _owner(schedule, chunk)
            if owner is not None:
                if value != owner:
                    raise ScheduleError(f"{where} is not rank {owner}'s")
                continue
            if expressions.ranks[value] != everyone:
                raise ScheduleError(f"{where} misses a rank's contribution")
            results.add(value)
            if collective is Collective.ALL_REDUCE and value != state[0][chunk]:
                raise ScheduleError(f"{where} was computed in another order than on rank 0")
    return results
