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
# The kinds of what is sent: a message, or the reason why the sender ends. The kind is in the two
# highest bits of the length.
DATA, REASON = range(2)
KIND_SHIFT = 62
LENGTH_MASK = (1 << KIND_SHIFT) - 1
# A longer reason is cut off, because it has to fit into one record of shm.py.
REASON_BYTES = 4096
# The kernel's errors after the peer has closed its end.
CLOSED = (BrokenPipeError, ConnectionResetError, ConnectionRefusedError)
EMPTY = np.empty(0, np.uint8)


class PeerGone(Exception):
    """The peer has closed its end; the text is the reason that it gave, or else a likely cause."""

    def __init__(self, peer: int, name: int, reason: str = "") -> None:
        # The network may also reset a connection while the rank lives on.
        cause = f"rank {name} has ended, or the connection to it was closed on the way"
        super().__init__(reason or cause)
        self.peer = peer
        self.reason = reason


class Queued(NamedTuple):
    """Bytes to send, or memory to write a message to; and the kind."""

    data: Bytes
    kind: int = DATA


class Connection(ABC):
    """This rank's end. Messages of one direction arrive in the order in which they were posted.

    Without a socket the peer has yet to connect.

    Attributes:
        name: The peer's number in errors.
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
        # Whether the socket's queue was full at the last attempt to send.
        self._blocked = False
        # Whether messages that arrive are dropped, to get at the reason that follows them.
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
        """Post a message, whose data must not change while the connection is busy."""
        self._sends.append(Queued(data))

    def receive(self, target: Bytes) -> None:
        """Post a receive of exactly the message's length."""
        self._recvs.append(Queued(target))

    @property
    def busy(self) -> bool:
        """Whether anything that was posted has not ended."""
        return bool(self._sends or self._recvs)

    @property
    def events(self) -> int:
        """The events, as flags of select.poll, for which the connection waits on its socket."""
        return (select.POLLIN if self._listens() else 0) | (select.POLLOUT if self._blocked else 0)

    def _listens(self) -> bool:
        """Whether the connection can go on when something arrives."""
        return bool(self._recvs) or self._dropping

    def gone(self) -> PeerGone:
        """Return the error for a peer that has closed its end, with the reason it sent, if any.

        Reads what has arrived, and drops messages that come before the reason.
        """
        self._drop()
        self._dropping = True
        try:
            while self._pull():
                pass
        except PeerGone as gone:
            return gone
        except (OSError, TransportError):
            # Nothing more can be read, or what is left is no message, as after a receive of ours
            # that was interrupted. That the peer has ended is known all the same, and is the error;
            # only its reason is not.
            pass
        return PeerGone(self.peer, self.name)

    def advance(self) -> bool:
        """Do what can be done without waiting; return whether anything was done.

        Raises:
            PeerGone: The peer has closed its end, and something is still under way.
            TransportError: A message has another length than its receive.
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
        """Send as much of the posted messages as goes without waiting; return whether any went."""

    @abstractmethod
    def _pull(self) -> bool:
        """Receive as much of the expected messages as has arrived; return whether any had."""

    @abstractmethod
    def _drop(self) -> None:
        """Forget what is posted, except for the rest of a message of which a part was sent."""

    def send_reason(self, text: str) -> bool:
        """Send `text` as the reason, which the peer's PeerGone then has, and nothing after it.

        Return whether that is done, or the peer is gone; if not, call it again after a wait for
        `events`.
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
        """Close the connection; what was sent before still arrives."""
        self.detach()

    def detach(self) -> None:
        """In a forked child: close this process's copy of the socket; the parent's stays open."""
        if self._socket is not None:
            self._socket.close()
        self._sends.clear()
        self._recvs.clear()
