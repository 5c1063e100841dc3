"""What a transport is: something that exchanges one step's messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from collectives.transport.shared_memory.symmetric_memory import SymmetricMemory


class Message(NamedTuple):
    """A contiguous tensor to or from `peer` (a rank of the transport)."""

    peer: int
    tensor: torch.Tensor


class Transport(Protocol):
    """Point-to-point messages between `size` ranks.

    Messages of one ordered pair of ranks arrive in the order in which they were posted. Receives
    must have the sender's byte count; empty tensors are not sent at all.
    """

    rank: int
    size: int

    @property
    def symmetric_memory(self) -> SymmetricMemory | None:
        """What all ranks share; None where they do not, or the transport cannot be used."""
        ...

    def check_device(self, device: torch.device) -> None:
        """Raise ValueError, naming the device and the fix, where tensors on it cannot travel."""
        ...

    def exchange(
        self, sends: Sequence[Message], recvs: Sequence[Message], step: str, timeout: float
    ) -> None:
        """Post all messages at once; return when all have arrived and the sent ones may be reused.

        `step` is what an error calls this exchange, `timeout` is in seconds. Raises
        CollectiveTimeoutError naming the peer and the step when a peer is gone or too slow,
        TransportError when the transport itself failed.
        """
        ...

    def split(self, ranks: Sequence[int], timeout: float) -> Transport:
        """A transport of its own between some of the ranks: its rank i is `ranks[i]` of this one.

        A collective of exactly these ranks, which several can make at a time where they have no
        rank in common. The two may then be used at the same time, from different threads.
        timeout: seconds that the other ranks may take to come.
        """
        ...

    def close(self) -> None:
        """Let go of what the transport holds; it cannot be used afterwards."""
        ...
