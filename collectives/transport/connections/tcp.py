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

from collectives.errors import TransportError
from collectives.transport.connections.connection import Bytes, Link, PeerGone

LINE_BYTES = 64
# How many bytes follow, less the padding. Of a farewell, which is text, with the highest bit set.
_HEADER = struct.Struct(f"<Q{LINE_BYTES - 8}x")
_PADDING = memoryview(bytes(LINE_BYTES))
_FAREWELL = 1 << 63
_FAREWELL_BYTES = 4096
# The rest of one whose header has come was sent with it.
_REST_MILLISECONDS = 500
# How much of a message has gone, where an interrupt came before the kernel's answer was noted.
_UNKNOWN = -1
_SKIP_BYTES = 1 << 16
# What the kernel says where the peer's end is closed.
_CLOSED = (BrokenPipeError, ConnectionResetError)


class TcpLink(Link):
    """This rank's end. sock: connected to the peer, and nothing but lines sent on it."""

    def __init__(self, peer: int, sock: socket.socket) -> None:
        super().__init__(peer, sock, near=sock.getpeername()[0] == sock.getsockname()[0])
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Bytes of the first message's frame that have gone, and of the first receive's that came.
        self._sent = self._come = 0
        # What is left of each, where that is known already.
        self._outgoing: list[memoryview] = []
        self._incoming: list[memoryview] = []
        # What is left of the farewell and what goes before it.
        self._last: list[memoryview] | None = None
        self._header = memoryview(bytearray(LINE_BYTES))
        # What comes as padding, of which only a farewell's text is read.
        self._sink = memoryview(bytearray(LINE_BYTES))

    def advance(self) -> bool:
        sent = bool(self._sends) and self._push()
        return (bool(self._recvs) and self._pull()) or sent

    def _push(self) -> bool:
        data, sent = self._sends[0], self._sent
        if not self._outgoing:
            self._outgoing = _frame(data)
        self._sent = _UNKNOWN
        try:
            count = self._socket.sendmsg(self._outgoing)
        except BlockingIOError:
            self._sent, self._blocked = sent, True
            return False
        except _CLOSED:
            raise self._gone() from None
        except OSError as error:
            raise self._broken(error) from None
        self._blocked = False
        self._outgoing = _behind(self._outgoing, count)
        sent += count
        if not self._outgoing:
            self._sends.popleft()
            sent = 0
        self._sent = sent
        return True

    def _pull(self) -> bool:
        target, before = self._recvs[0], self._come
        if not self._incoming:
            self._incoming = [self._header, target.data, self._sink[: -target.size % LINE_BYTES]]
        try:
            count = self._socket.recvmsg_into(self._incoming)[0]
        except BlockingIOError:
            return False
        except _CLOSED:
            raise PeerGone(self.peer) from None
        except OSError as error:
            raise self._broken(error) from None
        if not count:
            raise PeerGone(self.peer)
        self._come += count
        if before < LINE_BYTES <= self._come:
            self._check(target)
        self._incoming = _behind(self._incoming, count)
        if not self._incoming:
            self._recvs.popleft()
            self._come = 0
        return True

    def _broken(self, error: OSError) -> PeerGone:
        return PeerGone(self.peer, f"the connection to rank {self.peer} broke: {error.strerror}")

    def _check(self, target: Bytes) -> None:
        """Of the header that has come, and what came behind it, in the target."""
        (length,) = _HEADER.unpack(self._header)
        if length & _FAREWELL:
            text = target[:_FAREWELL_BYTES].tobytes() + self._sink.tobytes()
            begun = text[: self._come - LINE_BYTES]
            raise PeerGone(self.peer, self._farewell(begun, length ^ _FAREWELL))
        if length != target.size:
            raise TransportError(
                f"rank {self.peer} sent a message of {length} bytes where one of {target.size} "
                "was expected"
            )

    def _farewell(self, begun: bytes, length: int) -> str:
        """The text whose first bytes are these, as far as it comes: the network may cut it."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        with contextlib.suppress(OSError):
            while len(begun) < length <= _FAREWELL_BYTES and poller.poll(_REST_MILLISECONDS):
                more = self._socket.recv(length - len(begun))
                if not more:
                    break
                begun += more
        return begun[:length].decode(errors="replace")

    def last_words(self) -> str:
        return str(self._gone())

    def _gone(self) -> PeerGone:
        """Why the peer takes no more: behind its messages may be what it said last."""
        unread = 0
        if self._come >= LINE_BYTES:
            unread = _frame_bytes(self._recvs[0].size) - self._come
        elif self._come:
            # Of a header that has come in part there is no telling.
            return PeerGone(self.peer)
        # Up to where nothing more has come.
        with contextlib.suppress(OSError):
            while True:
                while unread:
                    skipped = len(self._socket.recv(min(unread, _SKIP_BYTES)))
                    if not skipped:
                        return PeerGone(self.peer)
                    unread -= skipped
                header = self._socket.recv(LINE_BYTES)
                if len(header) < LINE_BYTES:
                    break
                (length,) = _HEADER.unpack(header)
                if length & _FAREWELL:
                    return PeerGone(self.peer, self._farewell(b"", length ^ _FAREWELL))
                unread = _frame_bytes(length) - LINE_BYTES
        return PeerGone(self.peer)

    def part(self, farewell: str) -> bool:
        """Send no more but `farewell`, for the peer's PeerGone; whether all that can be said is.

        A message that is half sent is sent whole before it. Where how much of that has gone is not
        known, there is no farewell: the peer would take it for data.
        """
        if self._last is None:
            half = _behind(_frame(self._sends[0]), self._sent) if self._sent > 0 else []
            text = farewell.encode()[:_FAREWELL_BYTES]
            words = _HEADER.pack(_FAREWELL | len(text)) + text
            self._last = [] if self._sent == _UNKNOWN else [*half, memoryview(words)]
            self._outgoing = self._incoming = []
            self._sends.clear()
            self._recvs.clear()
        while self._last:
            last, self._last = self._last, []
            try:
                self._last = _behind(last, self._socket.sendmsg(last))
            except BlockingIOError:
                self._last, self._blocked = last, True
                return False
            except OSError:
                # The peer may be gone already.
                return True
        return True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            # To close with something unread would take back what is not yet delivered. No more than
            # what can be there now: a peer may be sending still.
            self._socket.shutdown(socket.SHUT_WR)
            left = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
            while left > 0 and (count := len(self._socket.recv(_SKIP_BYTES))):
                left -= count
        self.forsake()

    def forsake(self) -> None:
        self._socket.close()
        self._last = self._outgoing = self._incoming = []
        self._sends.clear()
        self._recvs.clear()


def _frame(data: Bytes) -> list[memoryview]:
    """What goes out for a message."""
    return [memoryview(_HEADER.pack(data.size)), data.data, _PADDING[: -data.size % LINE_BYTES]]


def _frame_bytes(length: int) -> int:
    """Of a message of so many bytes, with header and padding."""
    return LINE_BYTES + length + -length % LINE_BYTES


def _behind(parts: list[memoryview], count: int) -> list[memoryview]:
    """The parts without their first `count` bytes."""
    for number, part in enumerate(parts):
        if count < part.nbytes:
            return [part[count:], *parts[number + 1 :]]
        count -= part.nbytes
    return []
