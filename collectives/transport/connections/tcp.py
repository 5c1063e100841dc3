"""One peer that is reached over TCP: most often a rank on another host.

The socket may have other connections to the same peer beside this one (shared_socket.py).

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
from collections import deque

import numpy as np

from collectives.errors import TransportError
from collectives.transport.connections.connection import (
    DATA,
    FAREWELL,
    Bytes,
    Connection,
    PeerGone,
    Queued,
)
from collectives.transport.connections.shared_socket import LINE_BYTES, SCRATCH, SharedSocket
from collectives.transport.connections.waker import Waker

__all__ = ["LINE_BYTES", "TcpConnection"]


class TcpConnection(Connection):
    """This rank's end.

    Args:
        peer: The other rank.
        sock: Connected to the peer, and nothing but lines sent on it.
        beside: A connection to the same rank whose socket this one shares; none unless given.
        number: The channel's, the same at both ends and new to the socket.
        waker: Of the thread that uses this connection.
    """

    def __init__(
        self,
        peer: int,
        sock: socket.socket,
        beside: TcpConnection | None = None,
        number: int = 0,
        waker: Waker | None = None,
    ) -> None:
        super().__init__(peer, sock)
        if beside is None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.number = number
        self.waker = waker
        self._shared: SharedSocket = SharedSocket() if beside is None else beside._shared
        # What has come while nothing waited for it.
        self._early: deque[Queued] = deque()
        with self._shared.lock:
            self._early.extend(self._shared.open(self))

    def channel(self, peer: int, number: int, waker: Waker) -> TcpConnection:
        """Return another connection through the same socket; `peer` is what it calls the rank."""
        return TcpConnection(peer, self._socket, self, number, waker)

    def first(self) -> Queued:
        """Return what is to be sent next: `Channel.first`."""
        return self._sends[0]

    def sent(self) -> None:
        """Forget what was first: `Channel.sent`."""
        self._sends.popleft()

    def place(self, length: int) -> Bytes | None:
        """Return where a message goes straight to: `Channel.place`."""
        if self._early or not self._recvs or self._dropping:
            return None
        data, _ = self._recvs[0]
        return data if length == data.size else None

    def refusal(self, length: int) -> TransportError | None:
        """Return what a message that is not the one expected raises: `Channel.refusal`."""
        if not self._recvs:
            return None
        data, _ = self._recvs[0]
        return TransportError(
            f"rank {self.name} sent a message of {length} bytes where one of {data.size} was "
            "expected"
        )

    def placed(self) -> None:
        """Take note that a message has come: `Channel.placed`."""
        self._recvs.popleft()

    def drops(self, kind: int) -> bool:
        """Return whether frames of this kind are not wanted: `Channel.drops`."""
        return kind == DATA and self._dropping

    def put(self, frame: Queued) -> None:
        """Keep a frame until this rank asks: `Channel.put`."""
        self._early.append(frame)

    def wake(self) -> None:
        """Let the thread that uses this connection look again: `Channel.wake`."""
        if self.waker is not None:
            self.waker.wake()

    def has_left(self) -> bool:
        """Whether the peer has closed this connection of a socket that others still use."""
        if not self._shared.was_shared:
            return False
        with self._shared.lock:
            with contextlib.suppress(OSError, PeerGone, TransportError):
                while self._shared.read(self, self._socket, own=False):
                    pass
            return any(frame.kind == FAREWELL for frame in self._early)

    def _listens(self) -> bool:
        # What others that share the socket wait for may be why the peer takes nothing, and that
        # it has left this connection is told by a frame.
        return self._expects() or (self._blocked and self._shared.was_shared and not self._ending)

    def _transmit(self) -> bool:
        self._blocked = False
        try:
            with self._shared.lock:
                # Another channel's thread may have sent the rest.
                if self._sends:
                    self._shared.write(self, self._socket)
        except BlockingIOError:
            self._blocked = True
            return False
        return True

    def _pull(self) -> bool:
        with self._shared.lock:
            early = self._early
            if early and (self._expects() or early[0].kind == FAREWELL):
                self._take(early.popleft())
                return True
            return self._shared.read(self, self._socket)

    def _take(self, frame: Queued) -> None:
        """Do what a frame asks for that came before."""
        data, kind = frame
        if kind == FAREWELL:
            raise PeerGone(self.peer, self.name, data.tobytes().decode(errors="replace"))
        if not self._dropping:
            target, _ = self._recvs[0]
            refusal = self.refusal(data.size) if data.size != target.size else None
            if refusal is not None:
                raise refusal
            np.copyto(target, data)
            self._recvs.popleft()

    def _drop(self) -> None:
        with self._shared.lock:
            begun = self._shared.writes(self)
            while len(self._sends) > begun:
                self._sends.pop()
            self._recvs.clear()
            self._shared.forget(self)

    def send_farewell(self, text: str) -> bool:
        """Send no more but `text`: `Connection.send_farewell`."""
        # A message that is half sent is sent whole before it. Where it is not known how much has
        # gone there is no farewell: the peer would take it for data.
        try:
            return self._shared.torn or super().send_farewell(text)
        except PeerGone:
            return True

    def close(self) -> None:
        """End the connection; what was sent before still arrives."""
        if self._shared.shared and not self._ending:
            # The socket stays open, so its end does not tell.
            self.send_farewell("")
        with contextlib.suppress(OSError):
            if self._shared.torn:
                self._socket.shutdown(socket.SHUT_RDWR)
        with self._shared.lock:
            waiting = list(self._sends)[self._shared.writes(self) :]
            unsaid = next((item for item in waiting if item.kind == FAREWELL), None)
            if not self._shared.leave(self, unsaid):
                # Another connection's socket.
                self._sends.clear()
                self._recvs.clear()
                return
        with contextlib.suppress(OSError):
            # To close with something unread would take back what is not yet delivered. No more than
            # what can be there now: a peer may be sending still.
            self._socket.shutdown(socket.SHUT_WR)
            left = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
            while left > 0 and (count := len(self._socket.recv(SCRATCH.nbytes))):
                left -= count
        self.detach()
