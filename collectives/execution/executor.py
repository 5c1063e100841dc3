"""Run one rank's part of a schedule on a buffer, over any transport, with any reducer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from collectives.execution.context import CallContext, Workspace
from collectives.execution.lowering import LoweredStep, Reduction, lower, lower_evenly
from collectives.execution.pipelining import PostedStep, post
from collectives.reducers import Operands, Piece, Reducer, Sum
from collectives.schedules import recursive_doubling
from collectives.schedules.partition import split_bounds
from collectives.schedules.schedule import Schedule
from collectives.transport.base import Message

_VECTOR_ALIGNMENT = 64


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

    reducer: What REDUCE means, one for all phases or one a phase. segments: Element boundaries that
    operators work by; one segment unless given. bounds: Element boundaries of the schedule's
    chunks; nearly equal pieces, or whole segments, unless given. With them a schedule that gathers
    does no more than that. ranks: The transport's ranks that stand for the schedule's; all of them
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
    """Reduce what a step receives, as it arrives. posted: None where all of it has arrived."""
    numel = buffer.numel()
    if not operator.needs_one_tree:
        pieces: Sequence[Piece] = _pieces(step.reductions, recvs, buffer)
        if posted is not None:
            pieces = posted.pieces(pieces, apart=step.sent_first)
        operator.reduce(Operands(pieces, numel, segments, None))
        return
    context = replace(call, label=label)
    sum_partials, gather_partials = None, None
    if not step.tree:
        sum_partials = _partial_sum(step.group, context)
    elif operator.reads_tree:
        gather_partials = _partial_gather(step, operator, context)
    else:
        raise ValueError(f"{label} hands over a tree, which {operator} does not read: use vhdd")
    for leaves, reductions in _alike(step, operator, label):
        pieces = _pieces(reductions, recvs, buffer)
        if posted is not None:
            # What is reduced whole, segment by segment, waits for all of it.
            parted = sum_partials is not None or bool(step.tree)
            pieces = posted.pieces(pieces, apart=step.sent_first and parted)
        operator.reduce(
            Operands(pieces, numel, segments, sum_partials, leaves, step.tree, gather_partials)
        )


def _alike(
    step: LoweredStep, operator: Reducer, label: str
) -> Iterable[tuple[tuple[int, ...], Sequence[Reduction]]]:
    """Return the step's reductions by the ranks behind their operands.

    There are two kinds or more only in steps that reduce whole segments: those that share dot
    products reduce one pair of vectors.
    """
    if not step.reductions:
        return [((), ())]
    found: dict[tuple[int, ...], list[Reduction]] = {}
    for reduction in step.reductions:
        if reduction.leaves is None:
            raise ValueError(
                f"{label} does not say how many ranks stand behind what it reduces, which "
                f"{operator} weighs: run what verify.with_leaves makes of the schedule"
            )
        found.setdefault(reduction.leaves, []).append(reduction)
    return found.items()


def _reduce_gathered(
    vectors: torch.Tensor,
    buffer: torch.Tensor,
    reducer: Reducer | Sequence[Reducer],
    segments: Sequence[int] | None,
) -> None:
    """Write all ranks' vectors, reduced in rank order, to `buffer`."""
    operator = reducer if isinstance(reducer, Reducer) else reducer[-1]
    parts = tuple(vector[: buffer.numel()] for vector in vectors)
    pieces = (Piece(parts, parts[0], 0),)
    leaves = (1,) * len(parts)
    operator.reduce(Operands(pieces, buffer.numel(), segments, None, leaves))
    buffer.copy_(parts[0])


def _side_by_side(
    schedule: Schedule, rank: int, buffer: torch.Tensor, workspace: Workspace
) -> tuple[torch.Tensor, list[int]]:
    """Return memory for all ranks' vectors, with this rank's, and their chunks' boundaries.

    Each vector begins at a multiple of 64 bytes: reductions of vectors that are aligned alike on
    every rank give every rank the same bits.
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
    """Return what is reduced: for each range what is received, and the rank's own value."""
    pieces = []
    for before, after, low, high, _ in reductions:
        mine = buffer[low:high]
        operands = []
        for number in before:
            operands.append(recvs[number].tensor)
        operands.append(mine)
        for number in after:
            operands.append(recvs[number].tensor)
        pieces.append(Piece(tuple(operands), mine, low))
    return tuple(pieces)


def _partial_sum(
    group: tuple[int, ...], step: CallContext
) -> Callable[[torch.Tensor], None] | None:
    """Return what sums over `group` by recursive doubling; None where that is this rank alone.

    Addition commutes, so all ranks get equal bits.
    """
    if len(group) == 1:
        return None

    def sum_partials(partials: torch.Tensor) -> None:
        if not group:
            raise ValueError(f"{step.label} names no group to sum over; use rd, rechd or vhdd")
        # The step's own workspace holds what is being reduced.
        call = replace(step, label=f"the dot products of {step.label}", workspace=Workspace())
        schedule = recursive_doubling.all_reduce(len(group))
        execute(schedule, partials.view(-1), Sum, call, ranks=group)

    return sum_partials


def _partial_gather(
    lowered: LoweredStep, operator: Reducer, step: CallContext
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return what gathers the tables of a step's group; None where that is this rank alone.

    By digits it adds up all but the last one's, in one order on all ranks.
    """
    group = lowered.group
    if len(group) < 2:
        return None

    def gather_partials(table: torch.Tensor) -> torch.Tensor:
        stride, tables = 1, table.unsqueeze(0)
        for radix in lowered.digits or (len(group),):
            table = tables[0] if stride == 1 else operator.add_tables(tables)
            mine = group.index(step.transport.rank)
            first = mine - mine // stride % radix * stride
            alike = group[first : first + radix * stride : stride]
            tables = _exchange_tables(table, alike, step)
            stride *= radix
        return tables

    return gather_partials


def _exchange_tables(table: torch.Tensor, ranks: Sequence[int], step: CallContext) -> torch.Tensor:
    """Return the tables of all `ranks`, in their order."""
    transport = step.transport
    mine = ranks.index(transport.rank)
    # The next rank first, so that not all begin with the first one.
    others = (*range(mine + 1, len(ranks)), *range(mine))
    tables = table.new_empty(len(ranks), *table.shape)
    tables[mine] = table
    transport.exchange(
        [Message(ranks[other], tables[mine].view(-1)) for other in others],
        [Message(ranks[other], tables[other].view(-1)) for other in others],
        f"the tables of {step.label}",
        step.timeout,
    )
    transport.steps += 1
    return tables
