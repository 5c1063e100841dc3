"""One peer that is reached over TCP: most often a rank on another host.

A message is a frame: a header, the bytes, and padding. All of it goes out with one system call and
comes in with one, the bytes straight to where they are wanted, as far as the kernel has room or has
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

from collectives.errors import TransportError
from collectives.transport.connections.connection import (
    CLOSED,
    DATA,
    FAREWELL,
    FAREWELL_BYTES,
    KIND_SHIFT,
    LENGTH_MASK,
    Connection,
    PeerGone,
    Queued,
)
from collectives.transport.shared_memory.symmetric_memory import RanksDiffer

LINE_BYTES = 64
# How many bytes follow, less the padding, with the kind above them; the code.
_HEADER = struct.Struct(f"<QQ{LINE_BYTES - 16}x")
_PADDING = memoryview(bytes(LINE_BYTES))
# Where padding is written, and what is dropped; never read.
_SCRATCH = memoryview(bytearray(1 << 16))
# The rest of a farewell whose header has come was sent with it.
_REST_SECONDS = 0.5


class TcpConnection(Connection):
    """This rank's end. sock: connected to the peer, and nothing but lines sent on it."""

    def __init__(self, peer: int, sock: socket.socket) -> None:
        super().__init__(peer, sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # What is left of the frame that has begun to go out.
        self._outgoing: list[memoryview] = []
        # Whether an interrupt came before it was noted how much the kernel took.
        self._uncertain = False
        # What comes next is dropped, so many bytes; then what is left to come of a header, or of a
        # message and its padding.
        self._unwanted = 0
        self._header = memoryview(bytearray(LINE_BYTES))
        self._incoming = [self._header]
        self._within_message = False

    def _transmit(self) -> bool:
        outgoing = self._outgoing or _frame(self._sends[0])
        self._blocked, self._uncertain = False, True
        try:
            count = self._socket.sendmsg(outgoing)
        except OSError as error:
            self._uncertain = False
            self._blocked = isinstance(error, BlockingIOError)
            if self._blocked:
                return False
            raise
        self._outgoing = _behind(outgoing, count)
        if not self._outgoing:
            self._sends.popleft()
        self._uncertain = False
        return True

    def _pull(self) -> bool:
        try:
            count = self._socket.recvmsg_into(
                [_SCRATCH[: self._unwanted]] if self._unwanted else self._incoming
            )[0]
        except BlockingIOError:
            return False
        except CLOSED:
            count = 0
        if not count:
            raise PeerGone(self.peer)
        if self._unwanted:
            self._unwanted -= count
            return True
        self._incoming = _behind(self._incoming, count)
        if not self._incoming:
            self._incoming = [self._header]
            if self._within_message:
                self._within_message = False
                self._recvs.popleft()
            else:
                self._begin()
        return True

    def _begin(self) -> None:
        """Take note of the header that has come."""
        field, code = _HEADER.unpack(self._header)
        kind, length = field >> KIND_SHIFT, field & LENGTH_MASK
        padding = -length % LINE_BYTES
        if kind == FAREWELL:
            raise PeerGone(self.peer, self._farewell(length))
        if kind != DATA:
            self._heed(kind, code)
            return
        if self._flushing or code != self._recvs[0].code:
            self._unwanted = length + padding
            if self._flushing:
                return
            raise RanksDiffer
        target = self._recvs[0].data
        if length != target.size:
            raise TransportError(
                f"rank {self.peer} sent a message of {length} bytes where one of {target.size} "
                "was expected"
            )
        self._incoming = [target.data, _SCRATCH[:padding]]
        self._within_message = True

    def _farewell(self, length: int) -> str:
        """The text, unless the network cuts it."""
        text = b""
        self._socket.settimeout(_REST_SECONDS)
        with contextlib.suppress(OSError), self._socket.makefile("rb") as file:
            text = file.read(min(length, FAREWELL_BYTES))
        self._socket.setblocking(False)
        return text.decode(errors="replace")

    def _drop(self) -> None:
        begun = bool(self._outgoing) or self._uncertain
        while len(self._sends) > begun:
            self._sends.pop()
        self._recvs.clear()
        if self._within_message:
            self._within_message = False
            self._unwanted = sum(part.nbytes for part in self._incoming)
            self._incoming = [self._header]

    def send_farewell(self, text: str) -> bool:
        """Send no more but `text`: `Connection.send_farewell`."""
        # A message that is half sent is sent whole before it. Where it is not known how much has
        # gone there is no farewell: the peer would take it for data.
        return self._uncertain or super().send_farewell(text)

    def close(self) -> None:
        """End the connection; what was sent before still arrives."""
        with contextlib.suppress(OSError):
            # To close with something unread would take back what is not yet delivered. No more than
            # what can be there now: a peer may be sending still.
            self._socket.shutdown(socket.SHUT_WR)
            left = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
            while left > 0 and (count := len(self._socket.recv(_SCRATCH.nbytes))):
                left -= count
        self.detach()


def _frame(item: Queued) -> list[memoryview]:
    """What goes out for a message, or for one of the other kinds."""
    size = item.data.size
    header = _HEADER.pack(size | item.kind << KIND_SHIFT, item.code)
    parts = [memoryview(header), item.data.data, _PADDING[: -size % LINE_BYTES]]
    return parts if size else parts[:1]


def _behind(parts: list[memoryview], count: int) -> list[memoryview]:
    """The parts without their first `count` bytes."""
    for number, part in enumerate(parts):
        if count < part.nbytes:
            return [part[count:], *parts[number + 1 :]]
        count -= part.nbytes
    return []
