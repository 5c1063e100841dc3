"""One peer on the same host: a ring of slots in shared memory each way, and a socket beside it.

The sender copies a piece of a message into a slot of its ring and sends a record through the
socket; the receiver reads the record, copies the piece out, and hands slots back with the next
record that it sends, or with one of their own. Small messages travel inside the record. A rank that
waits sleeps on the socket, which ends with the peer's process: nothing spins where there are more
ranks than cores, and a death is seen at once.

Order of memory accesses: a slot is written before send(2) and read after recv(2), and handed back
the same way. Both calls take the lock of the socket's queue in the kernel, which orders what either
side did before and after on every processor; nothing relies on the store order of x86.

Memory: RING_BYTES for each ordered pair of ranks, which the system provides when the first message
larger than INLINE_BYTES passes.
"""

from __future__ import annotations

import mmap
import socket
import struct
from collections import deque
from collections.abc import Iterator

import numpy as np
import torch

from collectives.errors import TransportError
from collectives.transport.connections.connection import (
    CLOSED,
    DATA,
    EMPTY,
    KIND_SHIFT,
    LENGTH_MASK,
    REASON,
    Bytes,
    Connection,
    PeerGone,
    Queued,
)

# Small enough to stay in the shared cache between the two copies, large enough that a record a slot
# costs a few hundredths of its copies.
SLOT_BYTES = 512 * 1024
SLOTS = 4
RING_BYTES = SLOTS * SLOT_BYTES
# Up to here the kernel's two copies are as cheap as ours.
INLINE_BYTES = 16 * 1024
# Room for a largest record in every slot, and the kernel's own bytes beside them.
SOCKET_BYTES = 2 * SLOTS * INLINE_BYTES
# Pieces taken from the peer so far; bytes of the piece sent, 0 where there is none, with the kind
# above them.
_HEADER = struct.Struct("<QQ")
_CACHE_LINE = 64


class ShmConnection(Connection):
    """This rank's end. Messages of one direction arrive in the order in which they were posted.

    Args:
        peer: The other rank.
        sock: SOCK_SEQPACKET, connected to it.
        rings: Memory that both share, of 2 * RING_BYTES.
        outgoing: Which half of it this rank writes; 1 on the one rank, 0 on the other.

    Raises:
        OSError: The system's sockets are too small.
    """

    shares_memory = True

    def __init__(self, peer: int, sock: socket.socket, rings: mmap.mmap, *, outgoing: int) -> None:
        super().__init__(peer, sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < SOCKET_BYTES:
            raise OSError("net.core.wmem_max is too small for a connection")
        halves = np.frombuffer(rings, np.uint8).reshape(2, RING_BYTES)
        self._outgoing, self._incoming = halves[outgoing], halves[1 - outgoing]
        self._record = bytearray(_HEADER.size + INLINE_BYTES)
        self._inline = np.frombuffer(self._record, np.uint8)[_HEADER.size :]
        # Pieces that came before a receive was posted: length, inline data if any.
        self._early: deque[tuple[int, Bytes]] = deque()
        self._sent = self._returned = 0
        # Pieces taken, and how many of them the peer knows of.
        self._taken = self._reported = 0

    def send(self, data: Bytes) -> None:
        """Post a message, which must not change while the connection is busy."""
        self._sends.extend(Queued(piece) for piece in _pieces(data))

    def receive(self, target: Bytes) -> None:
        """Post a receive of exactly the message's length."""
        self._recvs.extend(Queued(piece) for piece in _pieces(target))

    @property
    def busy(self) -> bool:
        """Whether a posted message, or a slot to hand back, is still under way."""
        return super().busy or self._owing()

    def advance(self) -> bool:
        """Do what can be done without waiting: `Connection.advance`."""
        moved = super().advance()
        return (self._owing() and self._hand_back()) or moved

    def _drop(self) -> None:
        self._sends.clear()
        self._recvs.clear()
        self._taken += len(self._early)
        self._early.clear()

    def detach(self) -> None:
        """Close this process's socket and leave the parent's alone."""
        super().detach()
        # Nothing is left that keeps the rings mapped.
        self._outgoing = self._incoming = EMPTY

    def _transmit(self) -> bool:
        """Send the next piece if there is a slot for it."""
        if self._no_slot():
            return False
        data, kind = self._sends[0]
        inline = data
        if data.size > INLINE_BYTES:
            inline = EMPTY
            _copy(_slot(self._outgoing, self._sent, data.size), data)
        if not self._post(data.size | kind << KIND_SHIFT, inline):
            return False
        if kind == DATA:
            self._sent += 1
        self._sends.popleft()
        return True

    def _post(self, field: int, inline: Bytes) -> bool:
        """Send a record; False where the socket's queue is full. Raises CLOSED."""
        try:
            assert self._socket is not None
            self._socket.sendmsg([_HEADER.pack(self._taken, field), inline.data])
        except BlockingIOError:
            self._blocked = True
            return False
        self._blocked = False
        self._reported = self._taken
        return True

    def _no_slot(self) -> bool:
        return self._sends[0].kind == DATA and self._sent - self._returned == SLOTS

    def _listens(self) -> bool:
        """Whether a record could help: one with data, or with slots handed back."""
        return super()._listens() or (bool(self._sends) and self._no_slot())

    def _owing(self) -> bool:
        """Whether the peer may be waiting for slots that this rank has emptied."""
        return self._taken - self._reported >= SLOTS // 2

    def _hand_back(self) -> bool:
        try:
            return self._post(0, EMPTY)
        except CLOSED:
            # The peer has ended after its last message, which may still be read: no error here.
            self._reported = self._taken
            return True

    def _pull(self) -> bool:
        """Take a piece that has arrived for a posted receive, else read one record."""
        if self._early and self._recvs:
            self._take(*self._early.popleft())
            return True
        assert self._socket is not None
        try:
            count = self._socket.recv_into(self._record)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            # The peer ended and left records unread. What it sent before can still be read.
            return True
        if not count:
            raise PeerGone(self.peer, self.name)
        self._returned, field = self._header(count)
        kind, length = field >> KIND_SHIFT, field & LENGTH_MASK
        inline = self._inline[: count - _HEADER.size]
        if kind == REASON:
            raise PeerGone(self.peer, self.name, inline.tobytes().decode(errors="replace"))
        if length and self._dropping:
            self._taken += 1
        elif length and self._recvs:
            self._take(length, inline)
        elif length:
            self._early.append((length, inline.copy()))
        return True

    def _header(self, count: int) -> tuple[int, int]:
        """Return what a record of `count` bytes begins with; TransportError for what is none."""
        if count >= _HEADER.size:
            returned, field = _HEADER.unpack_from(self._record)
            kind, length = field >> KIND_SHIFT, field & LENGTH_MASK
            # Inline is what is small, and nothing else.
            expected = length if kind == DATA and length <= INLINE_BYTES else 0
            inside = count - _HEADER.size
            # One that was sent may not be counted yet, after an interrupt.
            fits = kind == REASON or (inside == expected and length <= SLOT_BYTES)
            if fits and self._returned <= returned <= self._sent + 1:
                return returned, field
        raise TransportError(
            f"what came over the connection to rank {self.name} is no message of a rank: something "
            "else has written to it"
        )

    def _take(self, length: int, inline: Bytes) -> None:
        """Copy one piece to the first posted receive."""
        number = self._taken
        self._taken += 1
        target, _ = self._recvs[0]
        if length != target.size:
            raise TransportError(
                f"rank {self.name} sent {length} bytes where {target.size} were expected"
            )
        if inline.size:
            np.copyto(target, inline)
        else:
            _copy(target, _slot(self._incoming, number, length))
        self._recvs.popleft()


def _pieces(data: Bytes) -> Iterator[Bytes]:
    """Return the pieces of a message, of which each passes in a record."""
    return (data[start : start + SLOT_BYTES] for start in range(0, data.size, SLOT_BYTES))


def _slot(ring: Bytes, number: int, length: int) -> Bytes:
    """The first `length` bytes of the slot of piece `number`."""
    start = number % SLOTS * SLOT_BYTES
    return ring[start : start + length]


def _copy(target: Bytes, source: Bytes) -> None:
    """Copy bytes by memmove, except where the processor would take ten times as long for it.

    Zen 4's string instruction does where the target's offset in its page is a few bytes behind the
    source's, as it can be with pieces of odd lengths (glibc bug 30994); torch's loop does not.
    """
    behind = (target.ctypes.data - source.ctypes.data) % mmap.PAGESIZE
    if 0 < behind < _CACHE_LINE:
        torch.from_numpy(target).copy_(torch.from_numpy(source))
    else:
        np.copyto(target, source)
