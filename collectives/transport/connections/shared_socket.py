"""One TCP socket to a peer, which the connections of a group and of its parts share.

A group that is split would else open a socket to every peer again, and a process may open only so
many. Each connection is a channel of the socket, of the number that frames carry. A rank that reads
reads whatever comes: what is for another channel goes straight to where that waits for it, else to
memory until it asks, and the other channel's thread is woken. So no frame keeps another one from
coming, in whatever order threads use the groups; what a peer has sent ahead takes memory meanwhile.
A rank that writes first sends the rest of the frame that another channel has begun.

A lock is held for one system call at a time, none of which waits. An interrupt within that leaves
the socket torn, since it is not known how much has passed: that ends all its channels, as the end
of the peer's process does. A channel that ends by itself says so in a frame, and the socket is
closed with the last one.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque
from typing import Protocol

import numpy as np

from collectives.errors import TransportError
from collectives.transport.connections.connection import (
    CLOSED,
    DATA,
    EMPTY,
    FAREWELL_BYTES,
    KIND_SHIFT,
    LENGTH_MASK,
    Bytes,
    PeerGone,
    Queued,
)

LINE_BYTES = 64
# What every frame begins with, so that bytes of anything else are not taken for one; then how many
# bytes follow, less the padding, with the kind above them; the channel.
_FRAME = 0x6D61_7573_6164_AD03
_HEADER = struct.Struct(f"<QQQ{LINE_BYTES - 24}x")
# Of a frame that nothing waits for, so much memory is taken at a time: as much as has come.
_PIECE_BYTES = 1 << 20
_PADDING = memoryview(bytes(LINE_BYTES))
# Where padding is written, and what is dropped; never read.
SCRATCH = memoryview(bytearray(1 << 16))


class Channel(Protocol):
    """What a connection is to its socket."""

    peer: int
    name: int
    number: int

    def first(self) -> Queued:
        """Return what is to be sent next."""

    def sent(self) -> None:
        """Forget what was first: it has gone out."""

    def place(self, length: int) -> Bytes | None:
        """Return where a message goes straight to; None where it does not."""

    def refusal(self, length: int) -> Exception | None:
        """Return what a message that is not the one expected next raises, if anything."""

    def placed(self) -> None:
        """Take note that a message has come to where it goes."""

    def drops(self, kind: int) -> bool:
        """Return whether frames of this kind are not wanted."""

    def put(self, frame: Queued) -> None:
        """Keep a frame until the connection's own thread asks."""

    def wake(self) -> None:
        """Let the connection's own thread look again."""


class SharedSocket:
    """The state of a socket that channels share; each of them holds the socket itself.

    Attributes:
        lock: To be held for every method.
        was_shared: Whether there has been more than one channel at this end.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        # Whether an interrupt came before it was noted how much the kernel took or gave, or what
        # came was no frame.
        self._torn = False
        self._why_torn = ""
        self._channels: dict[int, Channel] = {}
        self.was_shared = False
        # Frames for channels that this rank has not opened yet, and channels that it has closed.
        self._unopened: dict[int, deque[Queued]] = {}
        self._closed: set[int] = set()
        # What is left of the frame that has begun to go out, and whose it is; last words of
        # channels that have closed meanwhile.
        self._outgoing: list[memoryview] = []
        self._writer: Channel | None = None
        self._last_words: deque[list[memoryview]] = deque()
        # What comes next is dropped, so many bytes; then what is left to come of a header, or of a
        # message and its padding.
        self._unwanted = 0
        self._header = memoryview(bytearray(LINE_BYTES))
        self._next = [self._header]
        self._incoming = self._next
        # Whose message comes straight to where it goes; or the frame that comes, to be kept.
        self._placed: Channel | None = None
        self._kept: _Kept | None = None

    @property
    def torn(self) -> bool:
        """Whether the socket has become useless."""
        return self._torn

    @property
    def shared(self) -> bool:
        """Whether there is more than one channel now."""
        return len(self._channels) > 1

    def open(self, channel: Channel) -> deque[Queued]:
        """Add a channel; return the frames that have come for it."""
        self._channels[channel.number] = channel
        self.was_shared = self.was_shared or self.shared
        return self._unopened.pop(channel.number, deque())

    def leave(self, channel: Channel, last_word: Queued | None) -> bool:
        """Remove a channel, which has still to say something; True where it was the last one."""
        self._channels.pop(channel.number, None)
        self._closed.add(channel.number)
        if last_word is not None:
            self._last_words.append(_frame(last_word, channel.number))
        if self._writer is channel:
            self._writer = None
        self.forget(channel)
        return not self._channels

    def writes(self, channel: Channel) -> bool:
        """Return whether a frame of the channel has begun to go out."""
        return self._torn or (bool(self._outgoing) and self._writer is channel)

    def forget(self, channel: Channel) -> None:
        """Drop the rest of a message that is on its way to where the channel wanted it."""
        if self._placed is channel:
            self._placed = None
            self._unwanted = sum(part.nbytes for part in self._incoming)
            self._incoming = self._next

    def write(self, channel: Channel, sock: socket.socket) -> None:
        """Send what can be of the frame under way, else of the channel's next; OSError as send."""
        if self._torn:
            raise self._gone(channel)
        outgoing, writer = self._outgoing, self._writer
        late = not outgoing and bool(self._last_words)
        if late:
            outgoing, writer = self._last_words[0], None
        elif not outgoing:
            outgoing, writer = _frame(channel.first(), channel.number), channel
        self._torn = True
        try:
            count = sock.sendmsg(outgoing)
        except OSError:
            self._torn = False
            raise
        outgoing = _behind(outgoing, count)
        self._outgoing, self._writer = outgoing, writer if outgoing else None
        if late:
            self._last_words.popleft()
        if not outgoing and writer is not None:
            # Its own thread, where it waits to send, sees that the socket takes more.
            writer.sent()
        self._torn = False

    def read(self, reader: Channel, sock: socket.socket, *, own: bool = True) -> bool:
        """Receive what has come, for whichever channel; whether anything had.

        Args:
            reader: Whose thread this is.
            sock: The socket.
            own: Whether that thread waits for messages: what the reader cannot take is then an
                error, rather than kept.

        Raises:
            PeerGone: The other end is closed, or the socket is torn.
            TransportError: A message for the reader has another length than it expects, or what
                has come is no frame at all.
        """
        if self._torn:
            raise self._gone(reader)
        self._torn, unwanted = True, self._unwanted
        try:
            count = sock.recvmsg_into([SCRATCH[:unwanted]] if unwanted else self._incoming)[0]
        except BlockingIOError:
            self._torn = False
            return False
        except CLOSED:
            count = 0
        except OSError:
            self._torn = False
            raise
        error: Exception | None = None
        begun = False
        if not count:
            error = PeerGone(reader.peer, reader.name)
        elif unwanted:
            self._unwanted = unwanted - count
        else:
            self._incoming = _behind(self._incoming, count)
            if not self._incoming and self._kept is not None and self._kept.left:
                self._incoming = self._kept.grow()
            elif not self._incoming:
                self._incoming = self._next
                if self._placed is None and self._kept is None:
                    error = self._begin(reader, own)
                    begun = self._placed is not None
                else:
                    self._end(reader, own)
        self._torn = bool(self._why_torn)
        if error is not None:
            raise error
        if begun:
            # Most often the message has come with its header.
            self.read(reader, sock, own=own)
        return True

    def _gone(self, channel: Channel) -> PeerGone:
        interrupted = f"an interrupt has torn the connection to rank {channel.name}"
        return PeerGone(channel.peer, channel.name, self._why_torn or interrupted)

    def _begin(self, reader: Channel, own: bool) -> Exception | None:
        """Take note of the header that has come; return what the reader is to raise."""
        begins, field, number = _HEADER.unpack(self._header)
        kind, length = field >> KIND_SHIFT, field & LENGTH_MASK
        if begins != _FRAME or (kind != DATA and length > FAREWELL_BYTES):
            self._why_torn = (
                f"what came over the connection to rank {reader.name} is no message of a rank: "
                "something else has written to it, or a part was lost on the way"
            )
            return TransportError(self._why_torn)
        channel = self._channels.get(number)
        if kind == DATA and channel is not None:
            target = channel.place(length)
            if target is not None:
                self._placed = channel
                self._incoming = [target.data, SCRATCH[: -length % LINE_BYTES]]
                return None
        error: Exception | None = None
        unwanted = number in self._closed if channel is None else channel.drops(kind)
        if kind == DATA and channel is reader and own and not unwanted:
            error = channel.refusal(length)
        if unwanted or error is not None:
            self._unwanted = length + -length % LINE_BYTES
            return error
        self._kept = _Kept(number, kind, length)
        if length:
            self._incoming = self._kept.grow()
        else:
            self._end(reader, own)
        return None

    def _end(self, reader: Channel, own: bool) -> None:
        """Hand over the frame that has come."""
        channel = self._placed
        if channel is not None:
            self._placed = None
            channel.placed()
        else:
            assert self._kept is not None
            number, frame, self._kept = self._kept.number, self._kept.frame(), None
            channel = self._channels.get(number)
            if channel is not None:
                channel.put(frame)
            elif number not in self._closed:
                self._unopened.setdefault(number, deque()).append(frame)
        if channel is not None and (channel is not reader or not own):
            channel.wake()


class _Kept:
    """A frame that comes before anything waits for it: no more memory than has come, and a piece.

    Args:
        number: Its channel's.
        kind: Its kind.
        length: Of its message, as its header says.

    Attributes:
        number: As given.
        left: Bytes of the message for which there is no memory yet.
    """

    def __init__(self, number: int, kind: int, length: int) -> None:
        self.number, self._kind = number, kind
        self._padding = -length % LINE_BYTES
        self._pieces: list[Bytes] = []
        self.left = length

    def grow(self) -> list[memoryview]:
        """Return where the next piece goes, the last one with the padding."""
        piece = np.empty(min(self.left, _PIECE_BYTES), np.uint8)
        self._pieces.append(piece)
        self.left -= piece.size
        return [piece.data] if self.left else [piece.data, SCRATCH[: self._padding]]

    def frame(self) -> Queued:
        """Return the frame, which has come."""
        if len(self._pieces) == 1:
            return Queued(self._pieces[0], self._kind)
        data = np.concatenate(self._pieces) if self._pieces else EMPTY
        return Queued(data, self._kind)


def _frame(item: Queued, number: int) -> list[memoryview]:
    """What goes out for a message, or for one of the other kinds."""
    size = item.data.size
    header = _HEADER.pack(_FRAME, size | item.kind << KIND_SHIFT, number)
    parts = [memoryview(header), item.data.data, _PADDING[: -size % LINE_BYTES]]
    return parts if size else parts[:1]


def _behind(parts: list[memoryview], count: int) -> list[memoryview]:
    """The parts without their first `count` bytes."""
    for number, part in enumerate(parts):
        if count < part.nbytes:
            return [part[count:], *parts[number + 1 :]]
        count -= part.nbytes
    return []
