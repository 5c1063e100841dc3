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
import select
import socket
import struct

import numpy as np

from collectives.errors import TransportError
from collectives.transport.connections.connection import (
    CLOSED,
    FAREWELL,
    KIND_SHIFT,
    LENGTH_MASK,
    MARKER,
    PROBE,
    Connection,
    Outgoing,
    PeerGone,
)
from collectives.transport.shared_memory.symmetric_memory import RanksDiffer

__all__ = ["LINE_BYTES", "TcpConnection"]

LINE_BYTES = 64
# How many bytes follow, less the padding, with the kind above them; the code.
_HEADER = struct.Struct(f"<QQ{LINE_BYTES - 16}x")
_PADDING = memoryview(bytes(LINE_BYTES))
_FAREWELL_BYTES = 4096
# The rest of one whose header has come was sent with it.
_REST_MILLISECONDS = 500
_SKIP_BYTES = 1 << 16


class TcpConnection(Connection):
    """This rank's end. sock: connected to the peer, and nothing but lines sent on it."""

    def __init__(self, peer: int, sock: socket.socket) -> None:
        super().__init__(peer, sock, near=sock.getpeername()[0] == sock.getsockname()[0])
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # What is left of the frame that has begun to go out.
        self._outgoing: list[memoryview] = []
        # Whether an interrupt came before it was noted how much the kernel took.
        self._uncertain = False
        # Of the next one to be received: how many bytes of the header have come, and what is left
        # behind that, as places in memory or, where it is dropped, as a number of bytes.
        self._come = 0
        self._incoming: list[memoryview] = []
        self._unwanted = 0
        self._header = memoryview(bytearray(LINE_BYTES))
        # What comes as padding.
        self._sink = memoryview(bytearray(LINE_BYTES))
        self._ending = False

    def advance(self) -> bool:
        """Do what can be done without waiting: `Connection.advance`."""
        sent = bool(self._sends) and self._push()
        return (self._expects() and self._pull()) or sent

    def _push(self) -> bool:
        try:
            return super()._push()
        except OSError as error:
            raise self._broken(error) from None

    def _transmit(self) -> bool:
        outgoing = self._outgoing or _frame(self._sends[0])
        self._uncertain = True
        try:
            count = self._socket.sendmsg(outgoing)
        except OSError as error:
            self._uncertain = False
            self._blocked = isinstance(error, BlockingIOError)
            if self._blocked:
                return False
            raise
        self._blocked = False
        self._outgoing = _behind(outgoing, count)
        if not self._outgoing:
            self._sends.popleft()
        self._uncertain = False
        return True

    def _pull(self) -> bool:
        if self._come < LINE_BYTES:
            count = self._receive([self._header[self._come :]])
            self._come += count
            if self._come < LINE_BYTES or not self._begin():
                return count > 0
        if self._unwanted:
            scratch = memoryview(bytearray(min(self._unwanted, _SKIP_BYTES)))
            count = self._receive([scratch])
            self._unwanted -= count
        else:
            count = self._receive(self._incoming)
            self._incoming = _behind(self._incoming, count)
            if not self._incoming:
                self._recvs.popleft()
        if not self._unwanted and not self._incoming:
            self._come = 0
        return count > 0

    def _receive(self, places: list[memoryview]) -> int:
        """How many bytes were received; 0 where none have come."""
        try:
            count = self._socket.recvmsg_into(places)[0]
        except BlockingIOError:
            return 0
        except CLOSED:
            raise PeerGone(self.peer) from None
        except OSError as error:
            raise self._broken(error) from None
        if not count:
            raise PeerGone(self.peer)
        return count

    def _broken(self, error: OSError) -> PeerGone:
        return PeerGone(self.peer, f"the connection to rank {self.peer} broke: {error.strerror}")

    def _begin(self) -> bool:
        """Take note of the header that has come; whether anything follows."""
        field, code = _HEADER.unpack(self._header)
        kind, length = field >> KIND_SHIFT, field & LENGTH_MASK
        self._come = 0
        if kind == FAREWELL:
            raise PeerGone(self.peer, self._farewell(length))
        if kind == MARKER:
            self._marked = True
            if self._flushing:
                return False
            raise RanksDiffer
        if kind == PROBE:
            if not self._flushing:
                self._take_probe(code)
            return False
        self._come = LINE_BYTES
        if self._flushing or code != self._recvs[0].code:
            self._unwanted = length + -length % LINE_BYTES
            if self._flushing:
                return True
            raise RanksDiffer
        target = self._recvs[0].target
        if length != target.size:
            raise TransportError(
                f"rank {self.peer} sent a message of {length} bytes where one of {target.size} "
                "was expected"
            )
        self._incoming = [target.data, self._sink[: -length % LINE_BYTES]]
        return True

    def _farewell(self, length: int) -> str:
        """The text, as far as it comes: the network may cut it."""
        text = b""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        with contextlib.suppress(OSError):
            while len(text) < length <= _FAREWELL_BYTES and poller.poll(_REST_MILLISECONDS):
                more = self._socket.recv(length - len(text))
                if not more:
                    break
                text += more
        return text.decode(errors="replace")

    def _drop(self) -> None:
        begun = bool(self._outgoing) or self._uncertain
        while len(self._sends) > begun:
            self._sends.pop()
        self._recvs.clear()
        self._unwanted += sum(part.nbytes for part in self._incoming)
        self._incoming = []

    def send_farewell(self, text: str) -> bool:
        """Send no more but `text`: `Connection.send_farewell`."""
        # A message that is half sent is sent whole before it. Where it is not known how much has
        # gone there is no farewell: the peer would take it for data.
        if not self._ending:
            self._ending = True
            self._drop()
            if self._uncertain:
                self._sends.clear()
            else:
                data = np.frombuffer(text.encode()[:_FAREWELL_BYTES], np.uint8)
                self._sends.append(Outgoing(data, 0, FAREWELL))
        # The peer may be gone already.
        with contextlib.suppress(OSError):
            while self._sends:
                if not self._transmit():
                    return False
        return True

    def close(self) -> None:
        """End the connection; what was sent before still arrives."""
        with contextlib.suppress(OSError):
            # To close with something unread would take back what is not yet delivered. No more than
            # what can be there now: a peer may be sending still.
            self._socket.shutdown(socket.SHUT_WR)
            left = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
            while left > 0 and (count := len(self._socket.recv(_SKIP_BYTES))):
                left -= count
        self.detach()

    def detach(self) -> None:
        """Close this process's socket and leave the parent's alone."""
        self._socket.close()
        self._outgoing = self._incoming = []
        self._sends.clear()
        self._recvs.clear()


def _frame(item: Outgoing) -> list[memoryview]:
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
