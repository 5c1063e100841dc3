"""A connection to a peer on the same host: a ring of slots in shared memory each way, and a socket.

Messages are sent in pieces of at most a slot. The sender copies a piece to a slot of its ring and
sends a record through the socket. The receiver reads the record and copies the piece out. It
returns slots to the sender with the next record that it sends, or with a record of their own. Small
messages travel inside the record. A rank that waits sleeps on the socket, which is closed when the
peer's process ends. So no rank spins, even with more ranks than cores, and the end of a peer is
noticed at once.

Order of memory accesses: a slot is written before send(2) and read after recv(2), and likewise when
it is returned. In the kernel both calls take the lock of the socket's queue: what one side did
before, the other side sees afterwards, on every processor; x86's order of stores is not needed.

Memory: RING_BYTES for each ordered pair of ranks, which the system provides at the first message
larger than INLINE_BYTES.
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

# Small enough for a piece to stay in the shared cache between its two copies, large enough for a
# record to cost only a few hundredths of them.
SLOT_BYTES = 512 * 1024
SLOTS = 4
RING_BYTES = SLOTS * SLOT_BYTES
# Up to this size the kernel's two copies, into the socket and out, are as cheap as ours.
INLINE_BYTES = 16 * 1024
# Room for a largest record for each slot, doubled because the kernel counts bytes of its own, too.
SOCKET_BYTES = 2 * SLOTS * INLINE_BYTES
# A record begins with the number of the peer's pieces that this rank has taken so far, and with the
# bytes of the piece sent and its kind in the highest bits; 0 if the record only returns slots.
_HEADER = struct.Struct("<QQ")
_CACHE_LINE = 64


class ShmConnection(Connection):
    """This rank's end: `Connection`.

    Args:
        peer: The other rank.
        sock: A SOCK_SEQPACKET socket, connected to it; OSError where the system's are too small.
        rings: Memory of 2 * RING_BYTES that both ranks share.
        outgoing: Which half of it this rank writes: 0 on one rank and 1 on the other.
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
        # Pieces that came before a receive was posted: the length, and the data if it was inline.
        self._early: deque[tuple[int, Bytes]] = deque()
        # How many pieces were sent, and for how many of them the peer has returned the slot.
        self._sent = self._returned = 0
        # How many pieces were taken, and how many of these the peer knows of.
        self._taken = self._reported = 0

    def send(self, data: Bytes) -> None:
        self._sends.extend(Queued(piece) for piece in _pieces(data))

    def receive(self, target: Bytes) -> None:
        self._recvs.extend(Queued(piece) for piece in _pieces(target))

    @property
    def busy(self) -> bool:
        return super().busy or self._owing()

    def advance(self) -> bool:
        moved = super().advance()
        return (self._owing() and self._hand_back()) or moved

    def _drop(self) -> None:
        self._sends.clear()
        self._recvs.clear()
        # What is dropped counts as taken, so that the numbers of later pieces stay right.
        self._taken += len(self._early)
        self._early.clear()

    def detach(self) -> None:
        """Close this process's socket and leave the parent's alone."""
        super().detach()
        # The last references to the rings, which are then unmapped.
        self._outgoing = self._incoming = EMPTY

    def _transmit(self) -> bool:
        """Send the next piece if a slot is free, and the socket's queue has room."""
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
        """Whether the connection can go on when a record arrives: with data, or returned slots."""
        return super()._listens() or (bool(self._sends) and self._no_slot())

    def _owing(self) -> bool:
        """Whether slots have to be returned: half of them are free, and the peer may need one."""
        return self._taken - self._reported >= SLOTS // 2

    def _hand_back(self) -> bool:
        try:
            return self._post(0, EMPTY)
        except CLOSED:
            # The peer has ended and needs no slots. That is no error: its last messages can still
            # be read.
            self._reported = self._taken
            return True

    def _pull(self) -> bool:
        """Take a piece that arrived before its receive was posted, or else read one record."""
        if self._early and self._recvs:
            self._take(*self._early.popleft())
            return True
        assert self._socket is not None
        try:
            count = self._socket.recv_into(self._record)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            # The peer ended without reading all records, which this call reports once. What the
            # peer sent before can still be read.
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
        """Return the header of a record of `count` bytes; TransportError if it is not a record."""
        if count >= _HEADER.size:
            returned, field = _HEADER.unpack_from(self._record)
            kind, length = field >> KIND_SHIFT, field & LENGTH_MASK
            # Exactly the small pieces are inline.
            expected = length if kind == DATA and length <= INLINE_BYTES else 0
            inside = count - _HEADER.size
            # `_sent + 1`: after an interrupt a piece that was sent may not have been counted.
            fits = kind == REASON or (inside == expected and length <= SLOT_BYTES)
            if fits and self._returned <= returned <= self._sent + 1:
                return returned, field
        raise TransportError(
            f"what came over the connection to rank {self.name} is no message of a rank: something "
            "else has written to it"
        )

    def _take(self, length: int, inline: Bytes) -> None:
        """Copy one piece to the first posted receive."""
        # Counted first: an error below must not change the numbers of later pieces.
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
    """Return the pieces of a message, each of which takes one record."""
    return (data[start : start + SLOT_BYTES] for start in range(0, data.size, SLOT_BYTES))


def _slot(ring: Bytes, number: int, length: int) -> Bytes:
    """Return the first `length` bytes of the slot of piece `number`."""
    start = number % SLOTS * SLOT_BYTES
    return ring[start : start + length]


def _copy(target: Bytes, source: Bytes) -> None:
    """Copy bytes by memmove, except in the case in which that is ten times slower on Zen 4.

    That is so if the target's offset in its page is a few bytes higher than the source's, which
    happens with pieces of odd lengths: memmove uses a string instruction (glibc bug 30994). torch
    copies in a loop, which is not slower then.
    """
    behind = (target.ctypes.data - source.ctypes.data) % mmap.PAGESIZE
    if 0 < behind < _CACHE_LINE:
        torch.from_numpy(target).copy_(torch.from_numpy(source))
    else:
        np.copyto(target, source)
