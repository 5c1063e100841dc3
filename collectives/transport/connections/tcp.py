"""A connection to a peer over TCP: usually a rank on another host.

A message is sent as a frame: a header, the bytes, and padding. If the kernel's queues have room, a
frame is sent by one system call and received by two. The bytes are received straight into their
tensor: they are not staged, and no further thread is involved. A rank that waits sleeps on the
socket. The end of the peer's process is noticed at once; that of its host, or of the network to it,
only by the timeout.

The kernel writes what is sent to its pages without gaps. Header and padding make each frame a
multiple of a cache line long, so that data have the same offset in a cache line there as in the
tensor: on Zen 4 the kernel's copy takes three times as long if the offset is a few bytes higher
(glibc bug 30994).
"""

from __future__ import annotations

import contextlib
import socket
import struct

import numpy as np

from collectives.errors import TransportError
from collectives.transport.connections.connection import (
    DATA,
    KIND_SHIFT,
    LENGTH_MASK,
    REASON,
    REASON_BYTES,
    Connection,
    PeerGone,
    Queued,
)

LINE_BYTES = 64
# A frame begins with this number, so that other bytes are not taken for a frame, and with the
# number of bytes without the padding, with the kind in its highest bits.
_FRAME = 0x6D61_7573_6164_AD04
_HEADER = struct.Struct(f"<QQ{LINE_BYTES - 16}x")
_PADDING = memoryview(bytes(LINE_BYTES))
# Memory into which padding, and what is dropped, is received; it is never read.
SCRATCH = memoryview(bytearray(1 << 16))
# The kind of a hello in the queue: its bytes are sent as they are, before the first frame.
_HELLO = -1


class TcpConnection(Connection):
    """This rank's end: `Connection`. Its socket may still be connecting.

    hello: Bytes to send before anything else.
    """

    def __init__(self, peer: int, sock: socket.socket | None = None, hello: bytes = b"") -> None:
        super().__init__(peer, None)
        # What is left of a frame that was sent in part; what is left to receive of a header or a
        # message; and the receive of that message, None for a header.
        self._outgoing: list[memoryview] = []
        self._header = memoryview(bytearray(LINE_BYTES))
        self._incoming: list[memoryview] = [self._header]
        self._arriving: Queued | None = None
        # How many of the next bytes to arrive are dropped.
        self._unwanted = 0
        # Whether an interrupt came between sending and recording how much the kernel has taken.
        self._unsure = False
        if hello:
            self._sends.append(Queued(np.frombuffer(hello, np.uint8), _HELLO))
        if sock is not None:
            self.attach(sock)

    def attach(self, sock: socket.socket) -> None:
        """Use the socket by which the peer has connected."""
        sock.setblocking(False)
        # A message must not wait until those before it are acknowledged.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock

    def detached(self) -> socket.socket:
        """Take out the socket, from which nothing was read; this object cannot be used any more."""
        assert self._socket is not None
        sock, self._socket = self._socket, None
        return sock

    def _transmit(self) -> bool:
        assert self._socket is not None
        self._blocked, moved = False, False
        while self._sends:
            outgoing = self._outgoing or _frame(self._sends[0])
            # Cleared on every way out of the loop but an interrupt.
            self._unsure = True
            try:
                count = self._socket.sendmsg(outgoing)
            except BlockingIOError:
                self._blocked, self._unsure = True, False
                break
            except OSError:
                self._unsure = False
                raise
            self._outgoing = _behind(outgoing, count)
            if not self._outgoing:
                self._sends.popleft()
            self._unsure, moved = False, True
        return moved

    def _pull(self) -> bool:
        assert self._socket is not None
        moved = False
        while self._recvs or self._dropping:
            unwanted = self._unwanted
            try:
                into = [SCRATCH[:unwanted]] if unwanted else self._incoming
                count = self._socket.recvmsg_into(into)[0]
            except BlockingIOError:
                break
            if not count:
                raise PeerGone(self.peer, self.name)
            moved = True
            if unwanted:
                self._unwanted -= count
                continue
            self._incoming = _behind(self._incoming, count)
            if not self._incoming:
                self._arrived()
        return moved

    def _arrived(self) -> None:
        """Handle a header, or a message, that has arrived completely."""
        arriving, self._arriving = self._arriving, None
        self._incoming = [self._header]
        if arriving is None:
            arriving = self._expected()
            if arriving is None:
                return
            size = arriving.data.size
            if size:
                self._arriving = arriving
                self._incoming = [arriving.data.data, SCRATCH[: -size % LINE_BYTES]]
                return
        if arriving.kind == REASON:
            raise PeerGone(self.peer, self.name, arriving.data.tobytes().decode(errors="replace"))
        self._recvs.popleft()

    def _expected(self) -> Queued | None:
        """Return the receive for the message that the header announces; None if it is dropped.

        Raises:
            TransportError: It is not a header, or the message is not as long as expected.
        """
        begins, field = _HEADER.unpack(self._header)
        kind, length = field >> KIND_SHIFT, field & LENGTH_MASK
        if begins != _FRAME or kind > REASON or (kind == REASON and length > REASON_BYTES):
            raise TransportError(
                f"what came over the connection to rank {self.name} is no message of a rank: "
                "something else has written to it, or a part was lost on the way"
            )
        if kind == REASON:
            return Queued(np.empty(length, np.uint8), REASON)
        if self._dropping:
            self._unwanted = length + -length % LINE_BYTES
            return None
        target = self._recvs[0]
        if length != target.data.size:
            raise TransportError(
                f"rank {self.name} sent a message of {length} bytes where one of "
                f"{target.data.size} was expected"
            )
        return target

    def _drop(self) -> None:
        # The peer needs the rest of a frame, and the hello, to make sense of what follows.
        kept = bool(self._outgoing) or (bool(self._sends) and self._sends[0].kind == _HELLO)
        while len(self._sends) > kept:
            self._sends.pop()
        self._recvs.clear()
        if self._arriving is not None and self._arriving.kind == DATA:
            # The rest of this message is dropped, too: its tensor may not exist any more.
            self._unwanted = sum(part.nbytes for part in self._incoming)
            self._arriving, self._incoming = None, [self._header]

    def send_reason(self, text: str) -> bool:
        # The rest of a message that is sent in part goes before it. If it is not known how much was
        # sent, no reason is sent: the peer would take it for the message's data.
        return self._unsure or super().send_reason(text)

    def close(self) -> None:
        """Close the connection; what was sent before still arrives."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                # Read what has arrived: TCP resets a connection that is closed with unread data,
                # and the reset discards what was sent and not yet delivered. Read no more than the
                # receive buffer holds, since the peer may still be sending.
                self._socket.shutdown(socket.SHUT_WR)
                left = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
                while left > 0 and (count := len(self._socket.recv(SCRATCH.nbytes))):
                    left -= count
        self.detach()


def _frame(item: Queued) -> list[memoryview]:
    """Return the buffers to send for what was posted."""
    size = item.data.size
    if item.kind == _HELLO:
        return [item.data.data]
    header = memoryview(_HEADER.pack(_FRAME, size | item.kind << KIND_SHIFT))
    return [header, item.data.data, _PADDING[: -size % LINE_BYTES]] if size else [header]


def _behind(parts: list[memoryview], count: int) -> list[memoryview]:
    """Return the parts without their first `count` bytes."""
    for number, part in enumerate(parts):
        if count < part.nbytes:
            return [part[count:], *parts[number + 1 :]]
        count -= part.nbytes
    return []
