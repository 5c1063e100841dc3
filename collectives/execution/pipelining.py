"""Pipelining: the first parts of a step's messages are reduced while the others travel.

Messages are sent in parts where the transport only puts them on a stream (NCCL's). On the host a
rank cannot reduce and receive at once: there a step's messages are exchanged whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import overload

import torch

from collectives.execution.context import CallContext
from collectives.reducers import Piece
from collectives.transport.base import Message

# A part is long beside the microseconds that a message costs, and the last one's reduction, which
# nothing hides, is short beside the step. Not measured on a GPU.
PART_BYTES = 4 * 1024 * 1024
MAX_PARTS = 8
# Elements; a part of any dtype then begins at a whole number of the widest accesses.
_ALIGNED = 1024

Wait = Callable[[], None]


def parts_of(nbytes: int) -> int:
    """Return how many parts a message has; both its ends ask, and know nothing else."""
    return max(1, min(MAX_PARTS, nbytes // PART_BYTES))


def post(sends: Sequence[Message], recvs: Sequence[Message], step: CallContext) -> PostedStep:
    """Start the messages of a step; without parts they have arrived when this returns."""
    transport, count = step.transport, 1
    if transport.posts_ahead:
        count = max((parts_of(m.tensor.nbytes) for m in (*sends, *recvs)), default=1)
    if count == 1:
        transport.exchange(sends, recvs, step.label, step.timeout, step.code)
        return PostedStep([])
    sent, received = ([_parts(message) for message in messages] for messages in (sends, recvs))
    waits = []
    for number in range(count):
        # Some messages have fewer parts.
        now, then = (
            [parts[number] for parts in messages if number < len(parts)]
            for messages in (sent, received)
        )
        label = f"{step.label}, part {number} of {count}"
        waits.append(transport.post(now, then, label, step.timeout))
    return PostedStep(waits)


def _parts(message: Message) -> list[Message]:
    peer, tensor = message
    return [Message(peer, tensor[low:high]) for low, high in pairwise(_part_bounds(tensor))]


def _part_bounds(tensor: torch.Tensor) -> list[int]:
    """Return the boundaries of a message's parts, so that aligned ones have aligned parts."""
    numel, count = tensor.numel(), parts_of(tensor.nbytes)
    length = -(-numel // (count * _ALIGNED)) * _ALIGNED
    return [min(part * length, numel) for part in range(count + 1)]


class PostedStep:
    """A step whose messages are under way. waits: what waits for each part, in order."""

    def __init__(self, waits: Sequence[Wait]) -> None:
        self._waits = list(waits)
        self._arrived = 0

    def wait(self, part: int | None = None) -> None:
        """Wait until this part and those before it may be used; all unless given."""
        stop = len(self._waits) if part is None else part + 1
        while self._arrived < stop:
            self._waits[self._arrived]()
            self._arrived += 1

    def pieces(self, pieces: Sequence[Piece], *, apart: bool) -> Sequence[Piece]:
        """Return the pieces of a step, each in parts as its messages are.

        apart: whether they may be reduced one by one; else they stay whole, and all have arrived.
        """
        if not apart or len(self._waits) < 2:
            self.wait()
            return pieces
        parted: list[tuple[int, Piece]] = []
        for parts, out, start in pieces:
            for number, (low, high) in enumerate(pairwise(_part_bounds(out))):
                here = tuple(part[low:high] for part in parts)
                parted.append((number, Piece(here, out[low:high], start + low)))
        return _ArrivingPieces(parted, self)


class _ArrivingPieces(Sequence[Piece]):
    """Pieces with the part that each arrives in. Taking one waits for it."""

    def __init__(self, pieces: Sequence[tuple[int, Piece]], posted: PostedStep) -> None:
        self._pieces = pieces
        self._posted = posted

    def __len__(self) -> int:
        return len(self._pieces)

    @overload
    def __getitem__(self, index: int) -> Piece: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Piece]: ...
    def __getitem__(self, index: int | slice) -> Piece | Sequence[Piece]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        part, piece = self._pieces[index]
        self._posted.wait(part)
        return piece
