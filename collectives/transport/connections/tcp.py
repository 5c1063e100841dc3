"""One peer that is reached over TCP: most often a rank on another host.

A message is a frame: a header, the bytes, and padding. All of it goes out with one system call, and
comes in with two, the bytes straight to where they are wanted, as far as the kernel has room or has
them: nothing is staged, and no thread stands between the rank and the kernel. A rank that waits
sleeps on the socket. The end of the peer's process is seen at once; that of its host, or of the
network to it, by the time limit alone.

The kernel lays what is sent in its pages one behind the other. Header and padding keep every frame
a multiple of a cache line long, so that data lie as far into a line there as in the tensor: on Zen
4 the kernel's copy takes three times as long where they lie a few bytes further (glibc bug 30994).
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
# What every frame begins with, so that bytes of anything else are not taken for one; then how many
# bytes follow, less the padding, with the kind above them.
_FRAME = 0x6D61_7573_6164_AD04
_HEADER = struct.Struct(f"<QQ{LINE_BYTES - 16}x")
_PADDING = memoryview(bytes(LINE_BYTES))
# Where padding is written, and what is dropped; never read.
SCRATCH = memoryview(bytearray(1 << 16))
# Of what is sent: bytes as they are, before the first frame.
_HELLO = -1


class TcpConnection(Connection):
    """This rank's end.

    Args:
        peer: The other rank.
        sock: To the peer, connected or on the way to it; None where the peer has yet to connect.
        hello: What is sent before anything else.
    """

    def __init__(self, peer: int, sock: socket.socket | None = None, hello: bytes = b"") -> None:
        super().__init__(peer, None)
        # What is left of what has begun to go out, and of a header or a message that has begun to
        # come in; where it is no header, to whom it belongs.
        self._outgoing: list[memoryview] = []
        self._header = memoryview(bytearray(LINE_BYTES))
        self._incoming: list[memoryview] = [self._header]
        self._arriving: Queued | None = None
        # Bytes that come next and are dropped.
        self._unwanted = 0
        # Whether an interrupt came before it was noted how much the kernel took.
        self._unsure = False
        if hello:
            self._sends.append(Queued(np.frombuffer(hello, np.uint8), _HELLO))
        if sock is not None:
            self.attach(sock)

    def attach(self, sock: socket.socket) -> None:
        """Go on with the socket by which the peer has connected."""
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock

    def detached(self) -> socket.socket:
        """Return the socket, of which this end has read nothing; it cannot be used any more."""
        assert self._socket is not None
        sock, self._socket = self._socket, None
        return sock

    def _transmit(self) -> bool:
        assert self._socket is not None
        self._blocked, moved = False, False
        while self._sends:
            outgoing = self._outgoing or _frame(self._sends[0])
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
        """Take note of a header, or of a message, that has come whole."""
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
        """Return where that goes which the header announces; None where it is dropped.

        TransportError for what is no message, or not the one expected.
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
        kept = bool(self._outgoing) or (bool(self._sends) and self._sends[0].kind == _HELLO)
        while len(self._sends) > kept:
            self._sends.pop()
        self._recvs.clear()
        if self._arriving is not None and self._arriving.kind == DATA:
            # Its target may be gone.
            self._unwanted = sum(part.nbytes for part in self._incoming)
            self._arriving, self._incoming = None, [self._header]

    def send_reason(self, text: str) -> bool:
        """Send no more but `text`: `Connection.send_reason`."""
        # A message that is half sent is sent whole before it. Where it is not known how much has
        # gone there is no reason either: the peer would take it for data.
        return self._unsure or super().send_reason(text)

    def close(self) -> None:
        """End the connection; what was sent before still arrives."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                # To close with something unread would take back what is not yet delivered. No more
                # than what can be there now: a peer may be sending still.
                self._socket.shutdown(socket.SHUT_WR)
                left = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
                while left > 0 and (count := len(self._socket.recv(SCRATCH.nbytes))):
                    left -= count
        self.detach()


def _frame(item: Queued) -> list[memoryview]:
    """Return what goes out for what was posted."""
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
