"""Run one rank's part of a schedule on a buffer, over any transport, with any reducer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from collectives.execution.lowering import LoweredStep, lower
from collectives.execution.pipelining import post
from collectives.reducers import Operands, Piece, Reducer, Sum
from collectives.schedules import recursive_doubling
from collectives.schedules.partition import split_bounds
from collectives.schedules.schedule import Schedule
from collectives.transport.base import Message, Transport

__all__ = ["Workspace", "execute"]

# Of a workspace, kept; making one costs some microseconds.
_MAX_VIEWS = 256
_MAX_BLOCKS = 8
_VECTOR_ALIGNMENT = 64

# A device, and the handle of one of its streams; 0 for the CPU.
_MemoryKey = tuple[torch.device, int]


class Workspace:
    """Reusable memory for what is received but not yet reduced: one block a device and stream.

    What a stream still reads is not there for another one. A graph gets memory of its own: it
    would go on using the block after that has been given back for a larger one.
    """

    def __init__(self) -> None:
        self._blocks: dict[_MemoryKey, torch.Tensor] = {}
        self._views: dict[tuple[_MemoryKey, torch.dtype, int], torch.Tensor] = {}
        self._within: Workspace | None = None

    def take(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """Return `numel` uninitialised elements of `like`'s dtype, valid until the next take."""
        nbytes = numel * like.element_size()
        where: _MemoryKey = (like.device, 0)
        if like.is_cuda:
            where = (like.device, torch.cuda.current_stream(like.device).cuda_stream)
            if torch.cuda.is_current_stream_capturing():
                return self._part(self._block(nbytes, like), nbytes, like)
        key = (where, like.dtype, numel)
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = self._view(nbytes, like, where)
        return view

    def _view(self, nbytes: int, like: torch.Tensor, where: _MemoryKey) -> torch.Tensor:
        block = self._blocks.get(where)
        grows = block is None or block.numel() < nbytes
        if grows or len(self._views) >= _MAX_VIEWS:
            # The smaller block goes with its views.
            self._views.clear()
        if block is None or grows:
            if len(self._blocks) >= _MAX_BLOCKS:
                self._blocks.clear()
            block = self._blocks[where] = self._block(nbytes, like)
        return self._part(block, nbytes, like)

    def _part(self, block: torch.Tensor, nbytes: int, like: torch.Tensor) -> torch.Tensor:
        # Nobody may write outside inference mode to a tensor made inside it.
        with torch.inference_mode(False):
            return block[:nbytes].view(like.dtype)

    def _block(self, nbytes: int, like: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.empty(max(nbytes, 1), dtype=torch.uint8, device=like.device)

    @property
    def within(self) -> Workspace:
        """Another one, for what runs while this one is in use."""
        if self._within is None:
            self._within = Workspace()
        return self._within


def execute(
    schedule: Schedule,
    buffer: torch.Tensor,
    transport: Transport,
    reducer: Reducer | Sequence[Reducer],
    *,
    label: str,
    timeout: float,
    workspace: Workspace,
    segments: Sequence[int] | None = None,
    bounds: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
    code: int = 0,
) -> None:
    """Run this rank's steps of `schedule` in place on `buffer` (1-D, contiguous).

    Args:
        schedule: What all ranks run.
        buffer: This rank's data.
        transport: Between the ranks.
        reducer: What REDUCE means, one for all phases or one a phase.
        label: What an error calls this collective.
        timeout: Seconds for each step.
        workspace: Memory for what is received.
        segments: Element boundaries that operators work by; one segment unless given.
        bounds: Element boundaries of the schedule's chunks; nearly equal pieces unless given, of
            whole segments where the schedule asks for them.
        ranks: The transport's ranks that stand for the schedule's ranks 0, 1, ...; all of them
            unless given.
        code: What the messages carry, as `Transport.exchange` takes it.
    """
    size = transport.size if ranks is None else len(ranks)
    if size != schedule.size:
        raise ValueError(f"schedule is for {schedule.size} ranks, got {size}")
    rank = transport.rank if ranks is None else ranks.index(transport.rank)
    if schedule.gathered:
        vectors, chunks = _side_by_side(schedule, rank, buffer, workspace)
        execute(
            replace(schedule, gathered=False),
            vectors,
            transport,
            Sum,
            label=label,
            timeout=timeout,
            workspace=workspace,
            bounds=chunks,
            ranks=ranks,
            code=code,
        )
        _reduce_gathered(vectors.view(size, -1), buffer, reducer, segments)
        return
    members = None if ranks is None else tuple(ranks)
    steps = lower(schedule, rank, buffer.numel(), segments=segments, bounds=bounds, ranks=members)
    for step in steps:
        where = f"{step.name} of {label}"
        scratch = workspace.take(step.staged, buffer) if step.staged else buffer
        sends = [Message(peer, _elements(buffer, low, high)) for peer, low, high, _ in step.sends]
        recvs = [
            Message(peer, _elements(scratch if staged else buffer, low, high))
            for peer, low, high, staged in step.recvs
        ]
        posted = post(sends, recvs, transport, where, timeout, code)
        if step.reductions or step.group:
            operator = reducer if isinstance(reducer, Reducer) else reducer[step.phase]
            sum_partials = _partial_sum(step.group, transport, where, timeout, workspace, code)
            # What is reduced whole, segment by segment, waits for all of it.
            apart = step.sent_first and (not operator.needs_one_tree or sum_partials is not None)
            arriving = posted.pieces(_pieces(step, recvs, buffer), apart=apart)
            operator.reduce(Operands(arriving, buffer.numel(), segments, sum_partials))
        posted.wait()


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
    operator.reduce(Operands(pieces, buffer.numel(), segments, None))
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


def _pieces(step: LoweredStep, recvs: Sequence[Message], buffer: torch.Tensor) -> tuple[Piece, ...]:
    """Return what a step reduces: for each range what is received, and the rank's own value."""
    pieces = []
    for before, after, low, high in step.reductions:
        mine = _elements(buffer, low, high)
        left = [recvs[number].tensor for number in before]
        right = [recvs[number].tensor for number in after]
        pieces.append(Piece((*left, mine, *right), mine, low))
    return tuple(pieces)


def _elements(whole: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """Return whole[low:high], which costs a microsecond or two."""
    return whole if high - low == whole.numel() else whole[low:high]


def _partial_sum(
    group: tuple[int, ...],
    transport: Transport,
    where: str,
    timeout: float,
    workspace: Workspace,
    code: int,
) -> Callable[[torch.Tensor], None] | None:
    """Sum over `group` by recursive doubling: addition commutes, so all get equal bits."""
    if len(group) == 1:
        return None

    def sum_partials(partials: torch.Tensor) -> None:
        if not group:
            raise ValueError(f"{where} names no group to sum over; use rd, rechd or vhdd")
        execute(
            recursive_doubling.all_reduce(len(group)),
            partials.view(-1),
            transport,
            Sum,
            label=f"the dot products of {where}",
            timeout=timeout,
            workspace=workspace.within,
            ranks=group,
            code=code,
        )

    return sum_partials
