"""The interface of transports: what exchanges one step's messages between ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from collectives.errors import TransportError
from collectives.transport.shared_memory.symmetric_memory import SymmetricMemory

# Ranks by which errors call a group.
_MAX_NAMES = 16


class Message(NamedTuple):
    """A contiguous tensor to or from `peer` (a rank of the transport)."""

    peer: int
    tensor: torch.Tensor


Messages = Sequence[Message]


class Transport(ABC):
    """Point-to-point messages between `size` ranks.

    Messages of one ordered pair of ranks arrive in the order in which they were posted. Receives
    must have the sender's byte count; empty tensors are not sent at all.

    What only some transports can do is declared here, too, with the answer of those that cannot.

    Attributes:
        rank: This rank's number.
        size: How many ranks there are.
        names: What errors call the ranks, where these are some of a larger group's: their numbers
            there, which users know them by.
        device: The GPU whose tensors the transport carries, where it is bound to one.
        process_group: What torch.distributed's own collectives run on, where there is one.
        sums_on_gpu: Whether the vendor's library sums CUDA tensors (`all_reduce`).
        shares_gpu: Whether this process has other communicators on the GPU, torch's or of groups
            split from this one; whoever makes them sets it. NCCL wants those of one GPU called in
            one order on all ranks: calls of CUDA tensors then reach it in the caller's order.
        steps: How many steps of calls have ended, by which whoever waits sees that they progress.
    """

    rank: int
    size: int
    names: Sequence[int] = ()
    device: torch.device | None = None
    process_group: dist.ProcessGroup | None = None
    sums_on_gpu: bool = False
    shares_gpu: bool = False
    steps: int = 0
    _interrupted = ""

    def name(self, rank: int) -> int:
        """Return what errors call a rank."""
        return self.names[rank] if self.names else rank

    def named(self, ranks: Iterable[int]) -> str:
        """Return what errors call ranks, such as "rank 1, rank 3"."""
        return ", ".join(f"rank {self.name(rank)}" for rank in ranks)

    @property
    def me(self) -> str:
        """What errors call this rank."""
        return f"rank {self.name(self.rank)}"

    @property
    def of_ranks(self) -> str:
        """What errors call these ranks where they are some of a group's: " of ranks 1, 3"."""
        if not self.names:
            return ""
        shown = [str(name) for name in self.names[:_MAX_NAMES]]
        more = f" and {self.size - _MAX_NAMES} more" if self.size > _MAX_NAMES else ""
        return f" of rank{'' if self.size == 1 else 's'} {', '.join(shown)}{more}"

    @property
    def symmetric_memory(self) -> SymmetricMemory | None:
        """What all ranks share; None where they do not, or the transport cannot be used."""
        return None

    @abstractmethod
    def check_device(self, device: torch.device) -> None:
        """Raise ValueError, naming the device and the fix, where tensors on it cannot travel."""

    @abstractmethod
    def exchange(self, sends: Messages, recvs: Messages, step: str, timeout: float) -> None:
        """Post all messages at once; return when all have arrived and the sent ones may be reused.

        For CUDA tensors: on the current stream. The host does not wait for messages between GPUs
        (but for the oldest of too many): one that never comes is an error of `check_streams`, and
        of the next exchange.

        Args:
            sends: What this rank sends.
            recvs: Where what it receives is written.
            step: What an error calls this exchange.
            timeout: In seconds.

        Raises:
            CollectiveTimeoutError: A peer is gone or too slow; names the peer and the step.
            TransportError: The transport itself failed.
        """

    def posts_ahead(self, device: torch.device) -> bool:
        """Return whether `post` returns before the messages of such tensors have arrived."""
        return False

    def post(
        self, sends: Messages, recvs: Messages, step: str, timeout: float
    ) -> Callable[[], None]:
        """`exchange` in two parts: what is returned has to be called before messages are used."""
        self.exchange(sends, recvs, step, timeout)
        return lambda: None

    def check_streams(self) -> None:
        """Raise what ended messages or sums that were left on the streams, if anything did.

        What they would have written is then undefined.

        Raises:
            CollectiveTimeoutError: A peer was gone or too slow; names the peer and the step.
            TransportError: The transport itself failed.
        """
        return

    def gone(self, peers: Collection[int] | None = None) -> int | None:
        """Return a rank whose end is closed, of `peers` where given; None where none is known.

        Any thread may call it at any time, as it may `interrupt`, and no other method.
        """
        return None

    def why_gone(self, peer: int) -> str:
        """Say why the end of a rank that is gone was closed."""
        return f"rank {self.name(peer)} has ended"

    def all_reduce(
        self,
        flat: torch.Tensor,
        among: tuple[int, ...] | dist.ProcessGroup | None,
        step: str,
        timeout: float,
    ) -> None:
        """Sum a contiguous CUDA tensor in place by the vendor's library, as `exchange` does.

        Args:
            flat: The tensor.
            among: The ranks to sum over, in ascending order; all for None. Every rank calls it,
                with the ranks that it is among. Or a process group of some of the ranks, whose sum
                torch.distributed makes.
            step: What an error calls this sum.
            timeout: In seconds.

        Raises:
            TypeError: The library does not add this dtype.
        """
        raise TransportError(f"{self!r}: there is no library that sums")

    @abstractmethod
    def split(self, ranks: Sequence[int], timeout: float) -> Transport:
        """Return a transport of its own between some ranks: its rank i is `ranks[i]` of this one.

        A collective of exactly these ranks, which several can make at a time where they have no
        rank in common. The two may then be used at the same time, from different threads.

        Args:
            ranks: The ranks, in the order of the new transport.
            timeout: Seconds that the other ranks may take to come.
        """

    def interrupt(self, reason: str) -> None:
        """Let a thread that waits in `exchange` or in shared memory raise a TransportError soon.

        Any thread may call it at any time. What cannot be interrupted ends by its timeout, or by
        its messages' arrival, and raises then.
        """
        self._interrupted = reason

    def check_interrupt(self, step: str) -> None:
        """Raise TransportError where a thread has called `interrupt`. step: what is under way."""
        if self._interrupted:
            raise TransportError(f"{self.me} was stopped in {step}: {self._interrupted}")

    def abort(self, reason: str) -> None:
        """End what is under way and become unusable; tell the peers why, where that can be."""
        return

    @abstractmethod
    def close(self) -> None:
        """Let go of what the transport holds; it cannot be used afterwards."""


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's memory as bytes, so that every dtype travels."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() == 1:
        # Contiguous with any stride, but bytes are asked for by one of 1.
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8)
