"""What a link is: this rank's end of a way to one other rank."""

from __future__ import annotations

import select
import socket
from abc import ABC, abstractmethod
from collections import deque

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
# What ranks that have been called, or have called, may take to say so while links are opened: all
# wait for them again afterwards, and an error comes within 5 s of the timeout.
ANSWER_SECONDS = 4.0


class PeerGone(Exception):
    """The peer's end is closed; the text is what it said last, or that it has ended."""

    def __init__(self, peer: int, last_words: str = "") -> None:
        super().__init__(last_words or f"rank {peer} has ended")
        self.peer = peer


class Link(ABC):
    """One end. Messages of one direction arrive in the order in which they were posted.

    sock: connected to the peer. near: whether that runs on this machine, and so may need this
    rank's processor.
    """

    def __init__(self, peer: int, sock: socket.socket, *, near: bool) -> None:
        sock.setblocking(False)
        self.peer = peer
        self.near = near
        self._socket = sock
        self._sends: deque[Bytes] = deque()
        self._recvs: deque[Bytes] = deque()
        # Whether the socket's queue was full when something was to be sent.
        self._blocked = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, data: Bytes) -> None:
        """Post a message, which must not change while the link is busy."""
        self._sends.append(data)

    def receive(self, target: Bytes) -> None:
        """Post a receive of exactly the message's length."""
        self._recvs.append(target)

    @property
    def busy(self) -> bool:
        """Whether anything that was posted is still under way."""
        return bool(self._sends or self._recvs)

    @property
    def events(self) -> int:
        """What the link waits for on its socket: flags of select.poll."""
        return (select.POLLIN if self._listens() else 0) | (select.POLLOUT if self._blocked else 0)

    def _listens(self) -> bool:
        """Whether something that comes could help."""
        return bool(self._recvs)

    @abstractmethod
    def advance(self) -> bool:
        """Do what can be done without waiting; return whether anything was.

        Raises PeerGone where the peer's end is closed and something is still under way,
        TransportError where a message has another length than its receive.
        """

    @abstractmethod
    def last_words(self) -> str:
        """Why the peer's end, which is closed, was: what it sent before can still be received."""

    @abstractmethod
    def part(self, farewell: str) -> bool:
        """Send no more but `farewell`, which the peer's PeerGone says, where it still listens.

        True when that is done; else to be called again after a wait for `events`.
        """

    @abstractmethod
    def close(self) -> None:
        """End the link; what was sent before still arrives."""

    @abstractmethod
    def forsake(self) -> None:
        """In a forked child: let go of it and leave the parent's alone."""
