"""What the transport of some of the ranks takes from that of all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from collectives.transport.connections.tcp import TcpConnection
from collectives.transport.connections.waker import Waker
from collectives.transport.members import Members

# A channel's number: the count of the rank that gave it, below that rank.
_COUNT_BITS = 32


class Shared(NamedTuple):
    """What a part has of the transport that it is split from.

    Attributes:
        members: Its ranks, over the whole's messages.
        numbers: Of new channels.
        connections: Through the whole's sockets, by peer.
        waker: Of the thread that uses the part; None without such connections.
    """

    members: Members
    numbers: Iterator[int]
    connections: Mapping[int, TcpConnection]
    waker: Waker | None


def channel_numbers(rank: int) -> Iterator[int]:
    """Return numbers for channels, which no other rank's count has; 0 is every socket's first."""
    return itertools.count((rank << _COUNT_BITS) + 1)
