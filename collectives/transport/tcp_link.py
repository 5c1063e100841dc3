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
from collections import deque

from ..errors import TransportError
from .link import Bytes, PeerGone

LINE_BYTES = 64
# How many bytes follow, less the padding. Of a farewell, which is text, with the highest bit set.
_HEADER = struct.Struct(f"<Q{LINE_BYTES - 8}x")
_FAREWELL = 1 << 63
_FAREWELL_BYTES = 4096
# What the rest of a message and a farewell may take at the end.
_FAREWELL_SECONDS = 0.5
_SKIP_BYTES = 1 << 16
# What the kernel says where the peer's end is closed.
_CLOSED = (BrokenPipeError, ConnectionResetError)


class TcpLink:
    """This rank's end. sock: connected to the peer, and nothing but lines sent on it."""

    def __init__(self, peer: int, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = peer
        self.near = sock.getpeername()[0] == sock.getsockname()[0]
        self._socket = sock
        self._sends: deque[Bytes] = deque()
        self._recvs: deque[Bytes] = deque()
        # Bytes of the first message's frame that have gone, and of the first receive's that came.
        self._sent = self._come = 0
        self._blocked = False
        self._header = memoryview(bytearray(LINE_BYTES))
        # What comes as padding, of which only a farewell's text is read.
        self._sink = memoryview(bytearray(LINE_BYTES))

    @property
    def busy(self) -> bool:
        """Whether a posted message is not yet with the kernel, or a receive not complete."""
        return bool(self._sends or self._recvs)

    @property
    def events(self) -> int:
        """What the link waits for on its socket: flags of select.poll."""
        return (select.POLLIN if self._recvs else 0) | (select.POLLOUT if self._blocked else 0)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, data: Bytes) -> None:
        """Post a message, which must not change while the link is busy."""
        self._sends.append(data)

    def receive(self, target: Bytes) -> None:
        """Post a receive of exactly the message's length."""
        self._recvs.append(target)

    def advance(self) -> bool:
        """Do what can be done without waiting; return whether anything was.

        Raises PeerGone where the peer's end is closed and something is still under way,
        TransportError where a message has another length than its receive.
        """
        sent = bool(self._sends) and self._push()
        return (bool(self._recvs) and self._pull()) or sent

    def _push(self) -> bool:
        data = self._sends[0]
        try:
            self._sent += self._socket.sendmsg(_behind(_frame(data), self._sent))
        except BlockingIOError:
            self._blocked = True
            return False
        except _CLOSED:
            raise self._gone() from None
        except OSError as error:
            raise self._broken(error) from None
        self._blocked = False
        if self._sent == _frame_bytes(data.size):
            self._sends.popleft()
            self._sent = 0
        return True

    def _pull(self) -> bool:
        target, before = self._recvs[0], self._come
        frame = [self._header, target.data, self._sink[: -target.size % LINE_BYTES]]
        try:
            count, *_ = self._socket.recvmsg_into(_behind(frame, before))
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
        if self._come == _frame_bytes(target.size):
            self._recvs.popleft()
            self._come = 0
        return True

    def _broken(self, error: OSError) -> PeerGone:
        return PeerGone(self.peer, f"the connection to rank {self.peer} broke: {error.strerror}")

    def _check(self, target: Bytes) -> None:
        """Of the header that has come, and what came behind it, in the target."""
        (length,) = _HEADER.unpack(self._header)
        if length & _FAREWELL:
            begun = (target.tobytes() + self._sink.tobytes())[: self._come - LINE_BYTES]
            raise PeerGone(self.peer, self._farewell(begun, length ^ _FAREWELL))
        if length != target.size:
            raise TransportError(
                f"rank {self.peer} sent a message of {length} bytes where one of {target.size} "
                "was expected"
            )

    def _farewell(self, begun: bytes, length: int) -> str:
        """The text whose first bytes are these; no more than what has come of it."""
        if len(begun) < length <= _FAREWELL_BYTES:
            with contextlib.suppress(OSError):
                begun += self._socket.recv(length - len(begun))
        return begun[:length].decode(errors="replace")

    def last_words(self) -> str:
        """Why the peer's end, which is closed, was: what it sent before can still be received."""
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

    def close(self, farewell: str = "") -> None:
        """End the link; `farewell` is what the peer's PeerGone says, where it still listens.

        A message that is half sent is sent whole before it, unless that takes too long.
        """
        if farewell:
            text = farewell.encode()[:_FAREWELL_BYTES]
            # The peer may be gone already, or not be listening.
            with contextlib.suppress(OSError):
                self._socket.settimeout(_FAREWELL_SECONDS)
                if self._sent:
                    for part in _behind(_frame(self._sends[0]), self._sent):
                        self._socket.sendall(part)
                self._socket.sendall(_HEADER.pack(_FAREWELL | len(text)) + text)
        with contextlib.suppress(OSError):
            # To close with something unread would take back what is not yet delivered.
            self._socket.shutdown(socket.SHUT_WR)
            self._socket.setblocking(False)
            while self._socket.recv(_SKIP_BYTES):
                pass
        self.forsake()

    def forsake(self) -> None:
        """Let go of the socket, which another process has, too."""
        self._socket.close()
        self._sends.clear()
        self._recvs.clear()


def _frame(data: Bytes) -> list[memoryview]:
    """What goes out for a message."""
    padding = memoryview(bytes(-data.size % LINE_BYTES))
    return [memoryview(_HEADER.pack(data.size)), data.data, padding]


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
