"""Channels: messages from one rank to another, through slots in memory that both share.

A message of any length travels in chunks, each in one slot. The sender copies a chunk to a free
slot and counts it as written; the receiver copies it out and counts it as taken. Each count is
written by one rank only. Sending does not wait for the receiver while there are free slots.

Order of memory accesses: a count is written by one aligned store. A fence before the store and a
fence after each load of the count make sure that the peer that sees the count sees the chunk, or
the free slot. A third fence separates the store from the check for a sleeping peer, so no wake-up
is lost.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import deque
from collections.abc import Callable

import torch

# Small enough for a chunk to stay in the shared cache between its two copies, large enough that the
# Python code per chunk takes only a few hundredths of the copies' time.
SLOT_BYTES = 256 * 1024
SLOTS = 4
# A channel's words. In the sender's cache line: the number of chunks written, and for each slot the
# length of the whole message. In the receiver's cache line: the number of chunks taken.
_WRITTEN, _LENGTHS, _TAKEN, _WORDS = 0, 1, 8, 16
# Up to this size a copy keeps the interpreter's lock: if released, another thread could hold it for
# milliseconds.
_HELD_BYTES = 16 * 1024
_CACHE_LINE = 64
_copy_holding = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)


def channels_bytes(size: int) -> int:
    """Return how much memory the channels between `size` ranks take."""
    return _slots_at(size) + size * size * SLOTS * SLOT_BYTES


def _slots_at(size: int) -> int:
    return -(-size * size * _WORDS * 8 // mmap.PAGESIZE) * mmap.PAGESIZE


class LengthsDiffer(Exception):
    """A message and its receive differ in length; args: the peer, bytes sent, bytes expected."""


class Channel:
    """This rank's end of the channel from one rank to another.

    Args:
        memory: The memory of all channels, zeros at first.
        address: The address of this memory.
        size: How many ranks share it.
        pair: The numbers of the sender and the receiver among these ranks.
        peer: The other rank.
        fence: Keeps the processor from moving memory accesses across it.
        wake: Wakes the peer if it sleeps.

    Attributes:
        queue: The address and the length of each message that is under way.
    """

    def __init__(
        self,
        memory: memoryview,
        address: int,
        size: int,
        pair: tuple[int, int],
        peer: int,
        fence: Callable[[], None],
        wake: Callable[[], None],
    ) -> None:
        number = pair[0] * size + pair[1]
        # It also keeps the memory mapped.
        self._words = memory[number * _WORDS * 8 : (number + 1) * _WORDS * 8].cast("Q")
        self._slots = address + _slots_at(size) + number * SLOTS * SLOT_BYTES
        self._fence, self._wake = fence, wake
        self.peer = peer
        self.queue: deque[tuple[int, int]] = deque()
        # How many chunks this end has moved in all, and how many bytes of the first message.
        self._count = self._done = 0

    def ready(self) -> bool:
        """Return whether the next chunk can be moved."""
        raise NotImplementedError

    def advance(self) -> bool:
        """Move all chunks that can be moved without waiting; return whether there were any."""
        moved = False
        while self.queue and self.ready():
            self._fence()
            address, nbytes = self.queue[0]
            slot = self._slots + self._count % SLOTS * SLOT_BYTES
            self._move(address + self._done, slot, min(SLOT_BYTES, nbytes - self._done))
            self._done += SLOT_BYTES
            if self._done >= nbytes:
                self._done = 0
                self.queue.popleft()
            moved = True
        return moved

    def _move(self, address: int, slot: int, nbytes: int) -> None:
        """Copy one chunk between the message and the slot, and count it."""
        raise NotImplementedError

    def _publish(self, word: int) -> None:
        self._count += 1
        self._fence()
        self._words[word] = self._count
        self._fence()
        self._wake()


class Outgoing(Channel):
    """The sender's end: `Channel`."""

    def ready(self) -> bool:
        return self._count - self._words[_TAKEN] < SLOTS

    def _move(self, address: int, slot: int, nbytes: int) -> None:
        self._words[_LENGTHS + self._count % SLOTS] = self.queue[0][1]
        _copy(slot, address, nbytes)
        self._publish(_WRITTEN)


class Incoming(Channel):
    """The receiver's end: `Channel`."""

    def ready(self) -> bool:
        return self._words[_WRITTEN] > self._count

    def _move(self, address: int, slot: int, nbytes: int) -> None:
        sent, expected = self._words[_LENGTHS + self._count % SLOTS], self.queue[0][1]
        if sent != expected:
            raise LengthsDiffer(self.peer, sent, expected)
        _copy(address, slot, nbytes)
        self._publish(_TAKEN)


def _copy(target: int, source: int, nbytes: int) -> None:
    """Copy bytes by memmove, except in a case that is ten times slower on Zen 4.

    In that case the target's offset in its page is a few bytes higher than the source's, as happens
    after messages of odd lengths, and memmove uses a string instruction (glibc bug 30994). torch
    copies in a loop, which stays fast.
    """
    if nbytes <= _HELD_BYTES:
        _copy_holding(target, source, nbytes)
    elif 0 < (target - source) % mmap.PAGESIZE < _CACHE_LINE:
        _bytes_at(target, nbytes).copy_(_bytes_at(source, nbytes))
    else:
        ctypes.memmove(target, source, nbytes)


def _bytes_at(address: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)
