"""A connection: this rank's end of a channel to one other rank.

Every message carries a code, which says what call it belongs to (`base.call_code`). A receive that
expects another one raises RanksDiffer and writes nothing. Then all ranks flush: each sends a marker
on every connection and drops what comes before the peer's marker, so that no message is under way
afterwards.

A rank that has waited for a while sends a probe, which is a code without a message: two ranks in
different calls may each wait for the other without having sent it anything. The peer may be in a
later call when it reads the probe; only one of the same number tells it that the ranks differ.
"""

from __future__ import annotations

import select
import socket
from abc import ABC, abstractmethod
from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from collectives.transport.base import same_number
from collectives.transport.shared_memory.symmetric_memory import RanksDiffer

__all__ = [
    "ACCEPT_SECONDS",
    "CLOSED",
    "DATA",
    "FAREWELL",
    "KIND_SHIFT",
    "LENGTH_MASK",
    "MARKER",
    "PROBE",
    "Bytes",
    "Connection",
    "Incoming",
    "Outgoing",
    "PeerGone",
]

Bytes = npt.NDArray[np.uint8]
# What is sent, in the highest bits of its length.
DATA, PROBE, MARKER, FAREWELL = range(4)
KIND_SHIFT = 62
LENGTH_MASK = (1 << KIND_SHIFT) - 1
# What the kernel says where the peer's end is closed.
CLOSED = (BrokenPipeError, ConnectionResetError)
_EMPTY = np.empty(0, np.uint8)
# What an answer may take while connections are opened: all ranks wait for each other afterwards,
# and an error comes within 5 s of the timeout.
ACCEPT_SECONDS = 4.0


class PeerGone(Exception):
    """The peer's end is closed; the text is its farewell, or that it has ended."""

    def __init__(self, peer: int, farewell: str = "") -> None:
        super().__init__(farewell or f"rank {peer} has ended")
        self.peer = peer


class Outgoing(NamedTuple):
    """What is to be sent: a message, or one of the other kinds."""

    data: Bytes
    code: int = 0
    kind: int = DATA


class Incoming(NamedTuple):
    """Where a message is to be written, and the code that it must carry."""

    target: Bytes
    code: int = 0


class Connection(ABC):
    """One end. Messages of one direction arrive in the order in which they were posted.

    Args:
        peer: The other rank.
        sock: Connected to it.
        near: Whether it runs on this machine, and so may need this rank's processor.

    Attributes:
        shares_memory: Whether messages go through memory that both ranks share.
    """

    shares_memory = False

    def __init__(self, peer: int, sock: socket.socket, *, near: bool) -> None:
        sock.setblocking(False)
        self.peer = peer
        self.near = near
        self._socket = sock
        self._sends: deque[Outgoing] = deque()
        self._recvs: deque[Incoming] = deque()
        # Whether what comes before the peer's marker is dropped, and whether the marker has come.
        self._flushing = self._marked = False
        # Whether the socket's queue was full when something was to be sent.
        self._blocked = False

    def fileno(self) -> int:
        """Return the socket's descriptor, for select.poll."""
        return self._socket.fileno()

    def send(self, data: Bytes, code: int = 0) -> None:
        """Post a message, which must not change while the connection is busy."""
        self._sends.append(Outgoing(data, code))

    def receive(self, target: Bytes, code: int = 0) -> None:
        """Post a receive of exactly the message's length."""
        self._recvs.append(Incoming(target, code))

    def probe(self, code: int) -> None:
        """Tell the peer which call this rank waits in, unless a message that says so is queued."""
        if self._sends:
            return
        self._sends.append(Outgoing(_EMPTY, code, PROBE))
        try:
            if not self._transmit():
                # This rank must not wait until the peer takes what it does not need.
                self._sends.clear()
                self._blocked = False
        except OSError:
            # The peer has ended, perhaps because it has sent all that this rank waits for.
            self._sends.clear()

    def _take_probe(self, code: int) -> None:
        """RanksDiffer where the peer waits in another call of the same number as this rank's."""
        posted = self._recvs or self._sends
        if posted and code != posted[0].code and same_number(code, posted[0].code):
            raise RanksDiffer

    def begin_flush(self) -> None:
        """Drop what was posted, and post the marker: `busy` until the peer's has come, too."""
        self._drop()
        self._flushing = True
        self._sends.append(Outgoing(_EMPTY, 0, MARKER))

    def end_flush(self) -> None:
        """Go on, once both markers have passed."""
        self._flushing = self._marked = False

    @property
    def busy(self) -> bool:
        """Whether anything that was posted is still under way."""
        return bool(self._sends) or self._expects()

    @property
    def events(self) -> int:
        """Flags of select.poll: what the connection waits for on its socket."""
        return (select.POLLIN if self._listens() else 0) | (select.POLLOUT if self._blocked else 0)

    def _expects(self) -> bool:
        """Whether a message or the peer's marker has to come."""
        return bool(self._recvs) or (self._flushing and not self._marked)

    def _listens(self) -> bool:
        """Whether something that comes could help."""
        return self._expects()

    def why_gone(self) -> str:
        """Say why the peer's end, which is closed, was: the farewell it sent, if any."""
        return str(self._gone())

    def _gone(self) -> PeerGone:
        """Return why the peer takes no more: behind its messages may be a farewell."""
        self._drop()
        self._flushing = True
        try:
            while self._pull():
                pass
        except PeerGone as gone:
            return gone
        return PeerGone(self.peer)

    def _push(self) -> bool:
        """As `_transmit`; PeerGone where the peer's end is closed."""
        try:
            return self._transmit()
        except CLOSED:
            raise self._gone() from None

    @abstractmethod
    def _transmit(self) -> bool:
        """Send what can be of the first that is posted; whether any was."""

    @abstractmethod
    def _pull(self) -> bool:
        """Receive what has come of the next message; whether any had."""

    @abstractmethod
    def _drop(self) -> None:
        """Forget what is posted, but for the rest of a message of which the peer has a part."""

    @abstractmethod
    def advance(self) -> bool:
        """Do what can be done without waiting; return whether anything was.

        Raises PeerGone where the peer's end is closed and something is still under way,
        RanksDiffer where a message has another code than its receive, or the peer flushes,
        TransportError where a message has another length than its receive.
        """

    @abstractmethod
    def send_farewell(self, text: str) -> bool:
        """Send no more but `text`, which the peer's PeerGone says, where it still listens.

        True when that is done; else to be called again after a wait for `events`.
        """

    @abstractmethod
    def close(self) -> None:
        """End the connection; what was sent before still arrives."""

    @abstractmethod
    def detach(self) -> None:
        """In a forked child: close this process's socket and leave the parent's alone."""
