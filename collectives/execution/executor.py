"""Run one rank's part of a schedule on a buffer, over any transport, with any reducer.

If the transport puts messages on a stream (NCCL's), the first parts of a step's messages are
reduced while the others travel. On the host a rank cannot reduce and receive at once, so a step's
messages are exchanged whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from collectives.execution.lowering import LoweredStep, Reduction, lower, lower_evenly
from collectives.modes import inference_mode
from collectives.reducers import Needs, Operands, Piece, Reducer, Sum
from collectives.schedules import halving
from collectives.schedules.schedule import Schedule, split_bounds
from collectives.schedules.topology import Topology
from collectives.transport.base import Message, Transport

_VECTOR_ALIGNMENT = 64
# Minimum length of a message's parts, to a peer on this node and on another one. The host puts one
# part after the other on the stream. To keep it ahead of the link with a margin, a part travels
# twice as long as its latency and the host's work on it take together: bytes = 2 (alpha + host) /
# beta by `collectives.cost.ASSUMED`. These are constants, since both ends must cut messages at the
# same places, and since Adasum's bits depend on the cuts. Not measured between GPUs.
_NEAR_PART_BYTES = 57_060_000
_FAR_PART_BYTES = 7_400_000
# Smaller reductions take only the time of their kernel's launch.
_MIN_PART_BYTES = 1 << 20
# No transfer hides the last part's reduction: with 8 parts it is an eighth of the step's.
MAX_PARTS = 8
# Elements; with any dtype, parts then begin at a multiple of the widest memory access.
_ALIGNED = 1024


class Workspace:
    """Reusable memory for messages that are received but not yet reduced.

    On the CPU it is one block, whose pages are mapped once. On CUDA torch's allocator reuses memory
    in the same way, for each stream and for each captured graph.
    """

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8, device="cpu")

    def take(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """Return `numel` uninitialised elements of `like`'s dtype, valid until the next take."""
        if not like.is_cpu:
            return torch.empty(numel, dtype=like.dtype, device=like.device)
        nbytes = numel * like.element_size()
        # Tensors made in inference mode could not be written to outside of it.
        with inference_mode(False):
            if self._block.numel() < nbytes:
                self._block = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            return self._block[:nbytes].view(like.dtype)


@dataclass(frozen=True)
class CallContext:
    """The arguments that all steps of a call share; without a topology all ranks are on one node.

    sums: Functions that sum a float64 tensor over some ranks in place without messages, by the
    ranks.
    """

    transport: Transport
    label: str
    timeout: float
    workspace: Workspace
    topology: Topology | None = None
    sums: dict[tuple[int, ...], Callable[[torch.Tensor], None]] = field(default_factory=dict)

    def is_near(self, peer: int) -> bool:
        """Return whether `peer` is on this rank's node."""
        nodes = self.topology
        return nodes is None or nodes.node_of(peer) == nodes.node_of(self.transport.rank)


def execute(
    schedule: Schedule,
    buffer: torch.Tensor,
    reducer: Reducer | Sequence[Reducer],
    call: CallContext,
    *,
    segments: Sequence[int] | None = None,
    bounds: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
) -> None:
    """Run this rank's steps of `schedule` in place on `buffer` (1-D, contiguous).

    Args:
        schedule: The schedule, the same on all ranks.
        buffer: This rank's data.
        reducer: The operator of REDUCE, one for all phases or one per phase.
        call: The transport, and the call's label and timeout.
        segments: Element boundaries that operators work by; one segment unless given.
        bounds: Element boundaries of the schedule's chunks. Unless given, chunks are nearly equal,
            and consist of whole segments if the schedule asks for that. With bounds, a gathered
            schedule only gathers.
        ranks: The transport's ranks that stand for the schedule's ranks 0, 1, ...; all of them
            unless given.
    """
    transport = call.transport
    members = tuple(range(transport.size) if ranks is None else ranks)
    if len(members) != schedule.size:
        raise ValueError(f"schedule is for {schedule.size} ranks, got {len(members)}")
    rank = members.index(transport.rank)
    if bounds is not None:
        steps = lower(schedule, rank, tuple(bounds), members)
    elif schedule.gathered:
        vectors, bounds = _side_by_side(schedule, rank, buffer, call.workspace)
        execute(schedule, vectors, Sum, call, bounds=bounds, ranks=members)
        _reduce_gathered(vectors.view(schedule.size, -1), buffer, reducer, segments)
        return
    else:
        whole = tuple(segments) if segments is not None and schedule.whole_segments else None
        steps = lower_evenly(schedule, rank, buffer.numel(), whole, members)
    posts_ahead = transport.posts_ahead(buffer.device)
    for step in steps:
        label = f"{step.name} of {call.label}"
        scratch = call.workspace.take(step.staged, buffer) if step.staged else buffer
        sends, recvs = [], []
        for peer, low, high, _ in step.sends:
            sends.append(Message(peer, buffer[low:high]))
        for peer, low, high, staged in step.recvs:
            recvs.append(Message(peer, (scratch if staged else buffer)[low:high]))
        operator = reducer if isinstance(reducer, Reducer) else reducer[step.phase]
        posted: PostedStep | None = None
        if posts_ahead:
            posted = post(sends, recvs, call, label)
        else:
            transport.exchange(sends, recvs, label, call.timeout)
        if step.reductions or step.group:
            _reduce(step, operator, buffer, recvs, posted, segments, call, label)
        if posted is not None:
            posted.wait()
        transport.steps += 1


def _reduce(
    step: LoweredStep,
    operator: Reducer,
    buffer: torch.Tensor,
    recvs: Sequence[Message],
    posted: PostedStep | None,
    segments: Sequence[int] | None,
    call: CallContext,
    label: str,
) -> None:
    """Reduce a step's messages as they arrive. posted: None if all of them have arrived."""
    # Operations on Python's flags are slow, and most operators need no flag.
    needs = operator.needs
    by_segment = needs is not Needs.ANY_ORDER and Needs.ONE_TREE in needs
    sum_partials: Callable[[torch.Tensor], None] | None = None
    gather_partials: Callable[[torch.Tensor], torch.Tensor] | None = None
    kinds: list[tuple[tuple[int, ...], Sequence[Reduction]]] = [((), step.reductions)]
    parted = True
    if by_segment:
        if step.tree and not operator.reads_tree:
            raise ValueError(f"{label} passes a tree, which {operator} does not read: use vhdd")
        kinds, context = _alike(step, operator, label), replace(call, label=label)
        if step.tree and len(step.group) > 1:
            gather_partials = partial(_gather_partials, group=step.group, step=context)
        elif len(step.group) != 1:
            by_messages = partial(_sum_partials, group=step.group, step=context)
            sum_partials = call.sums.get(step.group, by_messages)
        # Without partial sums or a tree, whole segments are reduced at once: wait for all parts.
        parted = sum_partials is not None or bool(step.tree)
    for leaves, reductions in kinds:
        pieces: Sequence[Piece] = _pieces(reductions, recvs, buffer)
        if posted is not None:
            pieces = posted.pieces(pieces, apart=step.sent_first and parted)
        tree = step.tree if by_segment else ()
        operator.reduce(
            Operands(pieces, buffer.numel(), segments, sum_partials, leaves, tree, gather_partials)
        )


def _alike(
    step: LoweredStep, operator: Reducer, label: str
) -> list[tuple[tuple[int, ...], Sequence[Reduction]]]:
    """Return the step's reductions grouped by how many ranks their operands combine.

    Only steps that reduce whole segments have more than one group.
    """
    found: dict[tuple[int, ...], list[Reduction]] = {}
    for reduction in step.reductions:
        if reduction.leaves is None:
            raise ValueError(
                f"{label} does not state how many ranks each operand combines, and {operator} "
                "weights operands by that: run the schedule that verify.with_leaves returns"
            )
        found.setdefault(reduction.leaves, []).append(reduction)
    return list(found.items()) or [((), ())]


def _reduce_gathered(
    vectors: torch.Tensor,
    buffer: torch.Tensor,
    reducer: Reducer | Sequence[Reducer],
    segments: Sequence[int] | None,
) -> None:
    """Reduce all ranks' vectors in rank order, and write the result to `buffer`."""
    operator = reducer if isinstance(reducer, Reducer) else reducer[-1]
    parts = tuple(vector[: buffer.numel()] for vector in vectors)
    pieces = (Piece(parts, parts[0], 0),)
    leaves = (1,) * len(parts)
    operator.reduce(Operands(pieces, buffer.numel(), segments, None, leaves))
    buffer.copy_(parts[0])


def _side_by_side(
    schedule: Schedule, rank: int, buffer: torch.Tensor, workspace: Workspace
) -> tuple[torch.Tensor, list[int]]:
    """Return memory for all ranks' vectors, with a copy of this rank's, and the chunks' boundaries.

    Each vector begins at a multiple of 64 bytes: with the same alignment on every rank, reductions
    give every rank the same bits.
    """
    nbytes = -(-buffer.nbytes // _VECTOR_ALIGNMENT) * _VECTOR_ALIGNMENT
    width = nbytes // buffer.element_size()
    vectors = workspace.take(schedule.size * width, buffer)
    vectors[rank * width :][: buffer.numel()].copy_(buffer)
    inside = split_bounds(buffer.numel(), schedule.parts)[:-1]
    bounds = [vector * width + bound for vector in range(schedule.size) for bound in inside]
    return vectors, [*bounds, vectors.numel()]


def _pieces(
    reductions: Sequence[Reduction], recvs: Sequence[Message], buffer: torch.Tensor
) -> tuple[Piece, ...]:
    """Return the operands of each range: the received values, and the rank's own."""
    pieces = []
    for before, after, low, high, _ in reductions:
        mine = buffer[low:high]
        # Loops, since each comprehension would cost a function call.
        operands = []
        for number in before:
            operands.append(recvs[number].tensor)
        operands.append(mine)
        for number in after:
            operands.append(recvs[number].tensor)
        pieces.append(Piece(tuple(operands), mine, low))
    return tuple(pieces)


def _sum_partials(partials: torch.Tensor, group: tuple[int, ...], step: CallContext) -> None:
    """Sum over `group` by recursive doubling: addition commutes, so all ranks get equal bits."""
    if not group:
        raise ValueError(f"{step.label} names no group to sum over; use rd, rechd or vhdd")
    # The step's own workspace holds the operands of the reduction under way.
    call = replace(step, label=f"the dot products of {step.label}", workspace=Workspace())
    execute(halving.doubling(len(group)), partials.view(-1), Sum, call, ranks=group)


def _gather_partials(
    table: torch.Tensor, group: tuple[int, ...], step: CallContext
) -> torch.Tensor:
    """Return the tables of all ranks of `group`, in the group's order."""
    transport = step.transport
    mine = group.index(transport.rank)
    # Begin with the next rank, so that not all ranks send to the first one at once.
    others = (*range(mine + 1, len(group)), *range(mine))
    tables = table.new_empty(len(group), *table.shape)
    tables[mine] = table
    transport.exchange(
        [Message(group[other], tables[mine].view(-1)) for other in others],
        [Message(group[other], tables[other].view(-1)) for other in others],
        f"the tables of {step.label}",
        step.timeout,
    )
    transport.steps += 1
    return tables


def parts_of(message: Message, call: CallContext) -> int:
    """Return a message's number of parts, by its length and link: the same at both ends."""
    shortest = _NEAR_PART_BYTES if call.is_near(message.peer) else _FAR_PART_BYTES
    return max(1, min(MAX_PARTS, message.tensor.nbytes // shortest))


def post(
    sends: Sequence[Message], recvs: Sequence[Message], call: CallContext, label: str
) -> PostedStep:
    """Start one step's messages; if none has parts, all have arrived when this returns.

    label: The step's name in errors.
    """
    transport, sent, received = call.transport, _cut(sends, call), _cut(recvs, call)
    count = max((len(parts) for parts in (*sent, *received)), default=1)
    if count == 1:
        transport.exchange(sends, recvs, label, call.timeout)
        return PostedStep([])
    waits = []
    for number in range(count):
        # Some messages have fewer parts.
        now = [parts[number] for parts in sent if number < len(parts)]
        then = [parts[number] for parts in received if number < len(parts)]
        part = f"{label}, part {number} of {count}"
        waits.append(transport.post(now, then, part, call.timeout))
    return PostedStep(waits)


def _cut(messages: Sequence[Message], call: CallContext) -> list[list[Message]]:
    return [_parts(message, parts_of(message, call)) for message in messages]


def _parts(message: Message, count: int) -> list[Message]:
    peer, tensor = message
    bounds = pairwise(_part_bounds(tensor, count))
    return [message] if count == 1 else [Message(peer, tensor[low:high]) for low, high in bounds]


def _part_bounds(tensor: torch.Tensor, count: int) -> list[int]:
    """Return the boundaries of a message's parts; parts of an aligned message are aligned, too."""
    numel = tensor.numel()
    length = -(-numel // (count * _ALIGNED)) * _ALIGNED
    return [min(part * length, numel) for part in range(count + 1)]


class PostedStep:
    """A step whose messages are under way. waits: One function per part, which waits for it."""

    def __init__(self, waits: Sequence[Callable[[], None]]) -> None:
        self._waits = waits
        self._arrived = 0

    def wait(self, part: int | None = None) -> None:
        """Wait until all parts up to this one may be used; all parts unless given."""
        stop = len(self._waits) if part is None else part + 1
        for wait in self._waits[self._arrived : stop]:
            wait()
        self._arrived = max(self._arrived, stop)

    def pieces(self, pieces: Sequence[Piece], *, apart: bool) -> Sequence[Piece]:
        """Return one step's pieces, cut into parts that can be reduced as messages arrive.

        The n-th part of a piece needs only the first n parts of its messages.

        apart: Whether the parts may be reduced one by one. Otherwise wait for all messages and
        return whole pieces.
        """
        if not apart or len(self._waits) < 2:
            self.wait()
            return pieces
        parted: list[tuple[int, Piece]] = []
        for parts, out, start in pieces:
            count = max(1, min(len(self._waits), out.nbytes // _MIN_PART_BYTES))
            for number, (low, high) in enumerate(pairwise(_part_bounds(out, count))):
                here = tuple(part[low:high] for part in parts)
                parted.append((number, Piece(here, out[low:high], start + low)))
        return _ArrivingPieces(parted, self)


class _ArrivingPieces(Sequence[Piece]):
    """Pieces, each with the number of the last part that it needs. Indexing waits for that part."""

    def __init__(self, pieces: Sequence[tuple[int, Piece]], posted: PostedStep) -> None:
        self._pieces = pieces
        self._posted = posted

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        part, piece = self._pieces[index]
        self._posted.wait(part)
        return piece
