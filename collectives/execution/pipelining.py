"""Pipelining: the first parts of a step's messages are reduced while the others travel.

Messages are sent in parts if the transport only puts them on a stream (NCCL's). On the host a rank
cannot reduce and receive at once: there a step's messages are exchanged whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from collectives.execution.context import CallContext
from collectives.reducers import Piece
from collectives.transport.base import Message

# How long a part of a message is at the least, to a peer on this node and to another's: it travels
# twice as long as its own latency and the host's work on a step take, bytes = 2 (alpha + host) /
# beta by `collectives.cost.ASSUMED`, so that the host, which puts one part after the other on the
# stream, stays ahead of the link with a margin. Both ends of a message must cut it alike, and the
# bits of Adasum depend on it, so that these are constants. Not measured between GPUs.
_NEAR_PART_BYTES = 57_060_000
_FAR_PART_BYTES = 7_400_000
# Below it a reduction is no more than the launch of its kernel.
_MIN_PART_BYTES = 1 << 20
# The last part's reduction, which nothing hides, is an eighth of the step's then.
MAX_PARTS = 8
# Elements; a part of any dtype then begins at a whole number of the widest accesses.
_ALIGNED = 1024


def parts_of(message: Message, call: CallContext) -> int:
    """Return how many parts a message has, by its length and its link: alike at both its ends."""
    shortest = _NEAR_PART_BYTES if call.is_near(message.peer) else _FAR_PART_BYTES
    return max(1, min(MAX_PARTS, message.tensor.nbytes // shortest))


def post(
    sends: Sequence[Message], recvs: Sequence[Message], call: CallContext, label: str
) -> PostedStep:
    """Start the messages of a step; without parts they have arrived when this returns.

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
    """Return the boundaries of a message's parts, so that aligned ones have aligned parts."""
    numel = tensor.numel()
    length = -(-numel // (count * _ALIGNED)) * _ALIGNED
    return [min(part * length, numel) for part in range(count + 1)]


class PostedStep:
    """A step whose messages are under way. waits: functions that wait for each part, in order."""

    def __init__(self, waits: Sequence[Callable[[], None]]) -> None:
        self._waits = waits
        self._arrived = 0

    def wait(self, part: int | None = None) -> None:
        """Wait until this part and those before it may be used; all unless given."""
        stop = len(self._waits) if part is None else part + 1
        for wait in self._waits[self._arrived : stop]:
            wait()
        self._arrived = max(self._arrived, stop)

    def pieces(self, pieces: Sequence[Piece], *, apart: bool) -> Sequence[Piece]:
        """Return the pieces of a step, each in at least as many parts as its messages.

        So the n-th part of a piece needs no later part of any of its messages than their n-th.

        apart: whether they may be reduced one by one; else they stay whole, and all have arrived.
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
    """Pieces with the part that each arrives in. Taking one waits for it."""

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
