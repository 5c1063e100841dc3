"""A connection: this rank's end of a channel to one other rank."""

from __future__ import annotations

import contextlib
import select
import socket
from abc import ABC, abstractmethod
from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from collectives.errors import TransportError

Bytes = npt.NDArray[np.uint8]
# What is sent, in the highest bits of its length: a message, or why the sender ends.
DATA, REASON = range(2)
KIND_SHIFT = 62
LENGTH_MASK = (1 << KIND_SHIFT) - 1
# Of a longer reason the peer gets the beginning.
REASON_BYTES = 4096
# What the kernel says where the peer's end is closed.
CLOSED = (BrokenPipeError, ConnectionResetError, ConnectionRefusedError)
EMPTY = np.empty(0, np.uint8)


class PeerGone(Exception):
    """The peer's end is closed; the text is the reason it gave, else what may have closed it.

    Args:
        peer: The rank.
        name: What errors call it.
        reason: What it gave.
    """

    def __init__(self, peer: int, name: int, reason: str = "") -> None:
        # A network resets connections, too, whose ranks live on.
        cause = f"rank {name} has ended, or the connection to it was closed on the way"
        super().__init__(reason or cause)
        self.peer = peer
        self.reason = reason


class Queued(NamedTuple):
    """What is to be sent, or where a message is to be written; and of which kind it is."""

    data: Bytes
    kind: int = DATA


class Connection(ABC):
    """One end. Messages of one direction arrive in the order in which they were posted.

    Args:
        peer: The other rank.
        sock: Connected to it; None where the peer has yet to connect.

    Attributes:
        name: What errors call the peer.
        shares_memory: Whether messages go through memory that both ranks share.
    """

    shares_memory = False

    def __init__(self, peer: int, sock: socket.socket | None) -> None:
        self.peer = self.name = peer
        self._socket = sock
        if sock is not None:
            sock.setblocking(False)
        self._sends: deque[Queued] = deque()
        self._recvs: deque[Queued] = deque()
        # Whether the socket's queue was full when something was to be sent.
        self._blocked = False
        # Whether all messages that come are dropped, for the reason behind them.
        self._dropping = False
        self._ending = False

    @property
    def is_open(self) -> bool:
        """Whether there is a socket to poll."""
        return self._socket is not None

    def fileno(self) -> int:
        """Return the socket's descriptor, for select.poll."""
        assert self._socket is not None
        return self._socket.fileno()

    def send(self, data: Bytes) -> None:
        """Post a message, which must not change while the connection is busy."""
        self._sends.append(Queued(data))

    def receive(self, target: Bytes) -> None:
        """Post a receive of exactly the message's length."""
        self._recvs.append(Queued(target))

    @property
    def busy(self) -> bool:
        """Whether anything that was posted is still under way."""
        return bool(self._sends or self._recvs)

    @property
    def events(self) -> int:
        """Flags of select.poll: what the connection waits for on its socket."""
        return (select.POLLIN if self._listens() else 0) | (select.POLLOUT if self._blocked else 0)

    def _listens(self) -> bool:
        """Whether something that comes could help."""
        return bool(self._recvs) or self._dropping

    def gone(self) -> PeerGone:
        """Return why the peer's end, which is closed, was: the reason it sent, if any."""
        self._drop()
        self._dropping = True
        try:
            while self._pull():
                pass
        except PeerGone as gone:
            return gone
        except (OSError, TransportError):
            # Nothing is left that can be read: it ended without a reason.
            pass
        return PeerGone(self.peer, self.name)

    def advance(self) -> bool:
        """Do what can be done without waiting; return whether anything was.

        Raises PeerGone where the peer's end is closed and something is still under way,
        TransportError where a message has another length than its receive.
        """
        if self._socket is None:
            return False
        try:
            sent = bool(self._sends) and self._transmit()
            return (self._listens() and self._pull()) or sent
        except CLOSED:
            raise self.gone() from None
        except OSError as error:
            broken = f"the connection to rank {self.name} broke: {error.strerror}"
            raise PeerGone(self.peer, self.name, broken) from None

    @abstractmethod
    def _transmit(self) -> bool:
        """Send what can be of what is posted; whether any was."""

    @abstractmethod
    def _pull(self) -> bool:
        """Receive what has come of what is expected; whether any had."""

    @abstractmethod
    def _drop(self) -> None:
        """Forget what is posted, but for the rest of a message of which the peer has a part."""

    def send_reason(self, text: str) -> bool:
        """Send no more but `text`, which the peer's PeerGone gives, where it still listens.

        True when that is done; else to be called again after a wait for `events`.
        """
        if self._socket is None:
            return True
        if not self._ending:
            self._ending = True
            self._drop()
            data = np.frombuffer(text.encode()[:REASON_BYTES], np.uint8)
            self._sends.append(Queued(data, REASON))
        # The peer may be gone already.
        with contextlib.suppress(OSError):
            while self._sends:
                if not self._transmit():
                    return False
        return True

    def close(self) -> None:
        """End the connection; what was sent before still arrives."""
        self.detach()

    def detach(self) -> None:
        """In a forked child: close this process's socket and leave the parent's alone."""
        if self._socket is not None:
            self._socket.close()
        self._sends.clear()
        self._recvs.clear()
