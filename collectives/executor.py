"""Run one rank's part of a schedule on a buffer, over any transport, with any reducer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .algorithms import doubling
from .arrivals import post
from .reducers import Operands, Piece, Reducer, Sum
from .schedule import Action, Schedule, Step, Transfer, steps_of
from .split import segment_bounds, split_bounds
from .transport.base import Message, Transport

# Of a workspace, kept; making one costs some microseconds.
_MOST_VIEWS = 256
_MOST_BLOCKS = 8

# A device, and a stream's handle; 0 for the CPU.
_Where = tuple[torch.device, int]


class Workspace:
    """Reusable memory for what is received but not yet reduced: one block a device and stream.

    What a stream still reads is not there for another one. A graph gets memory of its own: it
    would go on using the block after that has been given back for a larger one.
    """

    def __init__(self) -> None:
        self._blocks: dict[_Where, torch.Tensor] = {}
        self._views: dict[tuple[_Where, torch.dtype, int], torch.Tensor] = {}
        self._within: Workspace | None = None

    def take(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """`numel` uninitialised elements of `like`'s dtype and device, until the next take."""
        nbytes = numel * like.element_size()
        where: _Where = (like.device, 0)
        if like.is_cuda:
            where = (like.device, torch.cuda.current_stream(like.device).cuda_stream)
            if torch.cuda.is_current_stream_capturing():
                return self._part(self._block(nbytes, like), nbytes, like)
        key = (where, like.dtype, numel)
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = self._view(nbytes, like, where)
        return view

    def _view(self, nbytes: int, like: torch.Tensor, where: _Where) -> torch.Tensor:
        block = self._blocks.get(where)
        grows = block is None or block.numel() < nbytes
        if grows or len(self._views) >= _MOST_VIEWS:
            # The smaller block goes with its views.
            self._views.clear()
        if block is None or grows:
            if len(self._blocks) >= _MOST_BLOCKS:
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
) -> None:
    """Run this rank's steps of `schedule` in place on `buffer` (1-D, contiguous).

    reducer: what REDUCE means, one for all phases or one a phase. bounds: element boundaries of
    the schedule's chunks; nearly equal pieces unless given, of whole segments where the schedule
    asks for them. ranks: the transport's ranks that stand for the schedule's ranks 0, 1, ...; all
    of them unless given. label: what an error calls this collective. timeout: seconds for each
    step.
    """
    members = range(transport.size) if ranks is None else ranks
    if len(members) != schedule.size:
        raise ValueError(f"schedule is for {schedule.size} ranks, got {len(members)}")
    cuts = _cuts(schedule, buffer.numel(), segments) if bounds is None else bounds
    rank = members.index(transport.rank)
    for number, step in enumerate(steps_of(schedule, rank)):
        where = f"step {number} ({schedule.name}) of {label}"
        scratch = workspace.take(_staged(step, cuts), buffer) if step.recvs else buffer[:0]
        sends = [Message(members[t.peer], _piece(buffer, cuts, t)) for t in step.sends]
        recvs: list[Message] = []
        used = 0
        for transfer in step.recvs:
            target = _piece(buffer, cuts, transfer)
            if transfer.action is not Action.COPY:
                target = scratch[used : used + target.numel()]
                used += target.numel()
            recvs.append(Message(members[transfer.peer], target))
        arrivals = post(sends, recvs, transport, where, timeout)

        pieces = _pieces(step, recvs, buffer, cuts)
        if pieces or step.group:
            operator = reducer if isinstance(reducer, Reducer) else reducer[step.phase]
            group = tuple(members[r] for r in step.group)
            if schedule.whole_segments:
                group = (transport.rank,)
            sum_partials = _partial_sum(group, transport, where, timeout, workspace)
            # What is reduced whole, segment by segment, waits for all of it.
            apart = (not operator.uniform or sum_partials is not None) and _sent_first(step)
            coming = arrivals.pieces(pieces, apart=apart)
            operator.reduce(Operands(coming, buffer.numel(), segments, sum_partials))
        arrivals.wait()


def _cuts(schedule: Schedule, numel: int, segments: Sequence[int] | None) -> Sequence[int]:
    if schedule.whole_segments:
        return segment_bounds((0, numel) if segments is None else segments, schedule.chunks)
    return split_bounds(numel, schedule.chunks)


def _pieces(
    step: Step, recvs: Sequence[Message], buffer: torch.Tensor, cuts: Sequence[int]
) -> tuple[Piece, ...]:
    """What a step reduces: for each range of chunks what was received, and the rank's own value."""
    found: dict[tuple[int, int], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for transfer, message in zip(step.recvs, recvs, strict=True):
        if transfer.action is not Action.COPY:
            sides = found.setdefault((transfer.start, transfer.stop), ([], []))
            sides[transfer.action is Action.REDUCE_RIGHT].append(message.tensor)
    pieces = []
    for (start, stop), (before, after) in found.items():
        mine = buffer[cuts[start] : cuts[stop]]
        pieces.append(Piece((*before, mine, *after), mine, cuts[start]))
    return tuple(pieces)


def _sent_first(step: Step) -> bool:
    """Whether what a part of a message is reduced into has been sent when that part has come."""
    return all(
        sent.stop <= recv.start or recv.stop <= sent.start or sent[1:3] == recv[1:3]
        for recv in step.recvs
        if recv.action is not Action.COPY
        for sent in step.sends
    )


def _piece(buffer: torch.Tensor, cuts: Sequence[int], transfer: Transfer) -> torch.Tensor:
    return buffer[cuts[transfer.start] : cuts[transfer.stop]]


def _staged(step: Step, cuts: Sequence[int]) -> int:
    """Elements that a step receives but must not write to the buffer yet."""
    return sum(cuts[t.stop] - cuts[t.start] for t in step.recvs if t.action is not Action.COPY)


def _partial_sum(
    group: tuple[int, ...],
    transport: Transport,
    where: str,
    timeout: float,
    workspace: Workspace,
) -> Callable[[torch.Tensor], None] | None:
    """Sums over `group` by recursive doubling: addition commutes, so all members get equal bits."""
    if len(group) == 1:
        return None

    def sum_partials(partials: torch.Tensor) -> None:
        if not group:
            raise ValueError(f"{where} names no group to sum over; use a uniform algorithm")
        execute(
            doubling.all_reduce(len(group)),
            partials.view(-1),
            transport,
            Sum,
            label=f"the dot products of {where}",
            timeout=timeout,
            workspace=workspace.within,
            ranks=group,
        )

    return sum_partials
