"""Runs one step of all ranks' schedules on symbols, for `verify`."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from functools import reduce
from typing import Any, Literal, TypeAlias

from collectives.errors import compact
from collectives.schedules.algorithm import Order
from collectives.schedules.schedule import Action, Step, Transfer, Tree

# Like `Transfer.leaves`: None for COPY, and if the chunks of one receive differ.
Leaves = tuple[int, int] | None
# How a reduction joins more than two operands: "said", by the step's tree, or from left to right
# without one; "list", always from left to right; "tree", by the balanced tree.
Joins: TypeAlias = Literal["said", "list", "tree"]


class ScheduleError(AssertionError):
    """A schedule does not compute its collective."""


class Expressions:
    """Interned expression trees over the ranks' inputs; nodes are ints.

    Attributes:
        ranks: The inputs in each node, one bit each.
        phase: The phase of each node's root, -1 for an input.
        all_at_once: Whether every reduction so far took all inputs at once, in their order.
    """

    def __init__(self, inputs: int) -> None:
        self.ranks = [1 << i for i in range(inputs)]
        self.phase = [-1] * inputs
        self.all_at_once = True
        self._inputs = [*range(inputs)]
        self._shapes: list[int] = [-1] * inputs
        self._nodes: dict[tuple[int, int, int], int] = {}
        self._ids: dict[Hashable, int] = {}
        self._operands: list[tuple[int, int] | None] = [None] * inputs

    def missing(self, node: int) -> str:
        """Return a text for the inputs that the node lacks, such as "rank 0, 2"; "" if none."""
        return _ranks_of(~self.ranks[node] & ((1 << len(self._inputs)) - 1))

    def see(self, operands: Sequence[int]) -> None:
        """Note the operands of one reduction, for `all_at_once`."""
        self.all_at_once &= operands == self._inputs

    def reduce(self, left: int, right: int, phase: int, where: str) -> int:
        """Return the node that reduces `left` and `right`, which must not share ranks.

        Errors begin with `where`.
        """
        node = self._nodes.get((left, right, phase))
        if node is not None:
            return node
        if twice := self.ranks[left] & self.ranks[right]:
            raise ScheduleError(f"{where}: the contribution of {_ranks_of(twice)} is counted twice")
        if max(self.phase[left], self.phase[right]) > phase:
            raise ScheduleError(f"{where}: phase {phase} reduces the result of a later phase")
        node = self._nodes[left, right, phase] = len(self.ranks)
        shape = (phase, self.shape(left, phase), self.shape(right, phase))
        self._shapes.append(self._id(shape))
        self._operands.append((left, right))
        self.ranks.append(self.ranks[left] | self.ranks[right])
        self.phase.append(phase)
        return node

    def shape(self, node: int, phase: int) -> int:
        """Return an id of the node's tree; results of earlier phases count as sets of inputs."""
        return self._shapes[node] if self.phase[node] == phase else self._id(self.ranks[node])

    def tree(self, node: int) -> Any:
        """Return the node as nested pairs of inputs."""
        # Without recursion: the line of a thousand ranks is a thousand levels deep.
        trees: list[Any] = []
        for each, pair in enumerate(self._operands[: node + 1]):
            trees.append(each if pair is None else (trees[pair[0]], trees[pair[1]]))
        return trees[node]

    def _id(self, key: Hashable) -> int:
        return self._ids.setdefault(key, len(self._ids))


def _ranks_of(bits: int) -> str:
    ranks = [rank for rank in range(bits.bit_length()) if bits >> rank & 1]
    return f"rank {compact(ranks)}" if ranks else ""


# By rank and chunk: the node in it, None before it is written.
State = list[list[int | None]]
# By chunk: the shapes of its reduction's operands in order.
Reductions = dict[int, tuple[int, ...]]
# By sender and receiver: first chunk, last chunk + 1 and values of each message, in order.
_Mail = dict[tuple[int, int], deque[tuple[int, int, list[int]]]]
# By chunk: the received operands before, and after, the rank's own value.
_Operands = dict[int, tuple[list[int], list[int]]]


def run_step(
    steps: Sequence[Step],
    state: State,
    expressions: Expressions,
    chunks: int,
    leaves: Sequence[list[tuple[Leaves, ...]]],
    where: str,
    joins: Joins = "said",
) -> list[Reductions]:
    """Advance all ranks by one step; return their reductions, and append to their `leaves`."""
    mail = _send(steps, state, chunks, where)
    reductions: list[Reductions] = []
    for rank, step in enumerate(steps):
        copied: set[int] = set()
        operands: _Operands = {}
        counted: list[Leaves] = []
        for recv in step.recvs:
            values = _receive(rank, recv, mail, where)
            mine = state[rank][recv.start : recv.stop]
            reduces = recv.action is not Action.COPY
            counted.append(_leaves(mine, values, expressions) if reduces else None)
            if recv.leaves is not None and recv.leaves != counted[-1]:
                raise ScheduleError(
                    f"{where}: rank {rank} says that {recv.leaves} ranks are combined in its value "
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
        reduced = _reduce(state[rank], operands, step, expressions, f"{where}: rank {rank}", joins)
        reductions.append(reduced)
    for (source, peer), queue in mail.items():
        if queue:
            raise ScheduleError(f"{where}: rank {source} sends to rank {peer}, which receives none")
    return reductions


def _send(steps: Sequence[Step], state: State, chunks: int, where: str) -> _Mail:
    """Return all ranks' messages of one step, with the values before the step.

    Also checks every transfer, and that no rank receives by COPY into chunks that it sends.
    """
    mail: _Mail = {}
    for rank, step in enumerate(steps):
        for send in step.sends:
            _check_transfer(rank, send, len(steps), chunks, where)
            values = [v for v in state[rank][send.start : send.stop] if v is not None]
            if len(values) < send.stop - send.start:
                raise ScheduleError(f"{where}: rank {rank} sends a chunk it does not have yet")
            mail.setdefault((rank, send.peer), deque()).append((send.start, send.stop, values))
        sent = {chunk for send in step.sends for chunk in range(send.start, send.stop)}
        for recv in step.recvs:
            _check_transfer(rank, recv, len(steps), chunks, where)
            if recv.action is Action.COPY and not sent.isdisjoint(range(recv.start, recv.stop)):
                raise ScheduleError(f"{where}: rank {rank} receives into chunks it is sending")
    return mail


def _receive(rank: int, recv: Transfer, mail: _Mail, where: str) -> list[int]:
    """Remove the next message for a receive from the mail; return its values."""
    queue = mail.get((recv.peer, rank))
    if not queue:
        raise ScheduleError(f"{where}: rank {rank} waits for rank {recv.peer}, which sends none")
    start, stop, values = queue.popleft()
    if (start, stop) != (recv.start, recv.stop):
        raise ScheduleError(
            f"{where}: rank {recv.peer} sends chunks [{start}, {stop}), "
            f"rank {rank} expects [{recv.start}, {recv.stop})"
        )
    return values


def _reduce(
    mine: list[int | None],
    operands: _Operands,
    step: Step,
    expressions: Expressions,
    where: str,
    joins: Joins,
) -> Reductions:
    """Reduce the received operands into one rank's own chunks; return the reductions."""
    reductions: Reductions = {}
    for chunk, (before, after) in operands.items():
        own = mine[chunk]
        if own is None:
            raise ScheduleError(f"{where} reduces a chunk it does not have")
        whole = [*before, own, *after]
        expressions.see(whole)
        reductions[chunk] = tuple(expressions.shape(each, step.phase) for each in whole)
        if step.tree and joins == "said":
            mine[chunk] = _joined(whole, step.tree, step.phase, expressions, where)
        elif joins == "tree":
            mine[chunk] = _folded(Order.BALANCED.tree(whole), step.phase, expressions, where)
        else:
            # Without recursion: the line of a thousand ranks is a thousand levels deep.
            mine[chunk] = reduce(
                lambda left, right: expressions.reduce(left, right, step.phase, where), whole
            )
    return reductions


def _folded(tree: Any, phase: int, expressions: Expressions, where: str) -> int:
    """Return the node that reduces nested pairs of nodes."""
    if isinstance(tree, int):
        return tree
    left, right = (_folded(each, phase, expressions, where) for each in tree)
    return expressions.reduce(left, right, phase, where)


def _joined(
    operands: Sequence[int], tree: Tree, phase: int, expressions: Expressions, where: str
) -> int:
    """Return the node that joins the operands by a tree; it must use each operand once."""
    left_over = dict(enumerate(operands))
    for left, right, *said in tree:
        if left == right or not {left, right} <= left_over.keys():
            raise ScheduleError(
                f"{where} joins operands {left} and {right} of {len(operands)}, which its tree "
                "does not have or has used"
            )
        pair = left_over[left], left_over.pop(right)
        behind = [expressions.ranks[each].bit_count() for each in pair]
        if said != behind:
            raise ScheduleError(
                f"{where} says that {tuple(said)} ranks are combined in operands {left} and "
                f"{right} of its tree, not {tuple(behind)}"
            )
        left_over[left] = expressions.reduce(*pair, phase, where)
    if len(left_over) > 1:
        raise ScheduleError(f"{where} has a tree that leaves out an operand")
    return left_over[tree[-1][0]]


def _leaves(
    mine: Sequence[int | None], received: Sequence[int | None], expressions: Expressions
) -> Leaves:
    """Return the numbers of inputs in both values of each pair; None if pairs differ."""

    def count(value: int | None) -> int:
        return 0 if value is None else expressions.ranks[value].bit_count()

    first, *others = {(count(a), count(b)) for a, b in {*zip(mine, received, strict=True)}}
    return None if others else first


def _check_transfer(rank: int, transfer: Transfer, size: int, chunks: int, where: str) -> None:
    if not isinstance(transfer, Transfer) or not isinstance(transfer.action, Action):
        raise ScheduleError(
            f"{where}: rank {rank} must send and receive tuples of Transfers, each with an Action, "
            f"got {transfer!r}"
        )
    peer, start, stop, *_ = transfer
    if not 0 <= peer < size or peer == rank:
        raise ScheduleError(f"{where}: rank {rank} names rank {peer} as its peer")
    if not 0 <= start < stop <= chunks:
        raise ScheduleError(f"{where}: rank {rank} names chunks [{start}, {stop}) of {chunks}")
