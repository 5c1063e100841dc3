"""The interface of transports, and gathering of every rank's bytes over any of them."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from collectives.errors import TransportError
from collectives.transport.symmetric_memory import SymmetricMemory

if TYPE_CHECKING:
    # node_memory imports the kernels that it launches.
    from collectives.transport.nccl.node_memory import NodeMemory

# An error lists at most so many of a group's ranks, to stay within two lines.
_MAX_NAMES = 16
# Maximum length of one rank's report; even calls with a million tensors have shorter descriptions.
# A larger length means a broken message: it is rejected before memory is allocated for it.
_MAX_BYTES = 1 << 26


class Message(NamedTuple):
    """A contiguous tensor to or from `peer`, one of the transport's ranks."""

    peer: int
    tensor: torch.Tensor


Messages = Sequence[Message]


class Transport(ABC):
    """Point-to-point messages between `size` ranks.

    Messages from one rank to another arrive in the order they were posted. A receive must have the
    byte count of the send; empty tensors are not sent at all. Capabilities of only some transports
    are declared here, too, with a default for the others.

    Attributes:
        rank: This rank's number.
        size: How many ranks there are.
        names: In a group that was split from a larger one, the ranks' numbers in the larger group,
            by which users know the ranks; errors use them. Empty otherwise.
        device: The GPU whose tensors the transport carries, if it is bound to one.
        process_group: The process group for torch.distributed's own collectives, if there is one.
        sums_on_gpu: Whether the vendor's library sums CUDA tensors (`all_reduce`).
        node_memories: The memories made by `add_node_memory`, in order of creation.
        shares_gpu: Whether this process has other communicators on the GPU, either torch's or ones
            of groups split from this one. NCCL requires that communicators of one GPU are used in
            the same order on all ranks: calls with CUDA tensors then have to reach NCCL in the
            caller's order.
        steps: How many steps of calls have ended, so that a waiting thread sees progress.
    """

    rank: int
    size: int
    names: Sequence[int] = ()
    device: torch.device | None = None
    process_group: dist.ProcessGroup | None = None
    sums_on_gpu: bool = False
    node_memories: Sequence[NodeMemory] = ()
    shares_gpu: bool = False
    steps: int = 0
    _interrupted = ""

    def name(self, rank: int) -> int:
        """Return a rank's number for error texts."""
        return self.names[rank] if self.names else rank

    def named(self, ranks: Iterable[int]) -> str:
        """Return a list of ranks for error texts, such as "rank 1, rank 3"."""
        return ", ".join(f"rank {self.name(rank)}" for rank in ranks)

    @property
    def me(self) -> str:
        """This rank's name in error texts, such as "rank 1"."""
        return f"rank {self.name(self.rank)}"

    @property
    def of_ranks(self) -> str:
        """If split from a larger group, " of ranks 1, 3" and the like for errors, otherwise ""."""
        if not self.names:
            return ""
        shown = [str(name) for name in self.names[:_MAX_NAMES]]
        more = f" and {self.size - _MAX_NAMES} more" if self.size > _MAX_NAMES else ""
        return f" of rank{'' if self.size == 1 else 's'} {', '.join(shown)}{more}"

    @property
    def symmetric_memory(self) -> SymmetricMemory | None:
        """The memory that all ranks share; None if they share none or the transport is unusable."""
        return None

    @abstractmethod
    def check_device(self, device: torch.device) -> None:
        """Raise ValueError, with the fix, if the transport cannot carry tensors of this device."""

    @abstractmethod
    def exchange(self, sends: Messages, recvs: Messages, step: str, timeout: float) -> None:
        """Post all messages at once; return when all have arrived and the sent ones may be reused.

        With CUDA tensors, the current stream waits for the messages, and the host does not unless
        too many exchanges are under way: if one never arrives, `check_streams` or the next
        exchange raise the error.

        Args:
            sends: The tensors that this rank sends.
            recvs: The tensors to write received messages to.
            step: The name of this exchange in errors.
            timeout: In seconds.

        Raises:
            CollectiveTimeoutError: A peer is gone or too slow; the text names it and the step.
            TransportError: The transport itself failed.
        """

    def posts_ahead(self, device: torch.device) -> bool:
        """Return whether `post` returns before messages of this device's tensors have arrived."""
        return False

    def post(
        self, sends: Messages, recvs: Messages, step: str, timeout: float
    ) -> Callable[[], None]:
        """Start an `exchange`; call the returned function before the messages are used."""
        self.exchange(sends, recvs, step, timeout)
        return lambda: None

    def captures(self, device: torch.device) -> bool:
        """Return whether `capture` can take messages of this device's tensors."""
        return False

    def capture(self, work: Callable[[], Any]) -> Callable[[str, float], None]:
        """Capture the work that `work` puts on the current stream in a CUDA graph; run nothing yet.

        All ranks capture the same steps and call the returned function equally often. It puts the
        graph on the current stream, as one step; its arguments are the step's name in errors and
        its timeout in seconds, and it raises the errors of `exchange`.

        Raises:
            RuntimeError: `work` cannot be captured.
        """
        raise TransportError(f"{self!r}: there are no CUDA graphs")

    def check_streams(self) -> None:
        """Raise the error of messages or sums that failed on the streams, if any.

        The tensors they write to are then undefined. It raises the same errors as `exchange`.
        """
        return

    def gone(self, peers: Collection[int] | None = None) -> int | None:
        """Return one of the ranks, or of `peers`, that has left or ended; None if all are present.

        Any thread may call this and `interrupt` at any time, but no other method.
        """
        return None

    def why_gone(self, peer: int) -> str:
        """Return the reason why `peer` is gone, for error texts."""
        return f"rank {self.name(peer)} has ended"

    def all_reduce(
        self,
        flat: torch.Tensor,
        among: tuple[int, ...] | dist.ProcessGroup | None,
        step: str,
        timeout: float,
    ) -> None:
        """Sum a contiguous CUDA tensor in place by the vendor's library, on the current stream.

        As for `exchange`, the host does not wait.

        Args:
            flat: The tensor.
            among: The ranks to sum over, in ascending order, or None for all: every rank of the
                transport calls this, with its own set of ranks. Or a process group of some of the
                ranks, for a sum by torch.distributed.
            step: The name of this sum in errors.
            timeout: In seconds.

        Raises:
            TypeError: The library does not add this dtype.
        """
        raise TransportError(f"{self!r}: there is no library that sums")

    def shares_gpu_memory(self, device: torch.device) -> bool:
        """Return whether `add_node_memory` can be called for this device."""
        return False

    def add_node_memory(
        self,
        nbytes: int,
        device: torch.device | None,
        node: tuple[int, ...],
        process_group: dist.ProcessGroup | None,
        timeout: float,
    ) -> NodeMemory:
        """Allocate memory on each GPU that kernels on all GPUs of its node can use; a collective.

        It lives as long as the transport. If one rank cannot allocate it, all ranks raise
        TransportError with the reason.

        Args:
            nbytes: Bytes of memory per GPU.
            device: This rank's GPU.
            node: The ranks of this rank's node, which have consecutive numbers; all ranks on one
                node.
            process_group: The process group of these ranks.
            timeout: Seconds that a `launch` may wait for a peer.
        """
        raise TransportError(f"{self!r}: there is no memory that GPUs share")

    def launch(
        self,
        number: int,
        work: Callable[[], None],
        tensors: Sequence[torch.Tensor],
        step: str,
        timeout: float,
    ) -> None:
        """Launch kernels that work on a node's memory, as one step; the host does not wait.

        All ranks of the node make the same launches. Errors are raised as by `exchange`.

        Args:
            number: The memory's index in `node_memories`.
            work: Launches the kernels on the current stream.
            tensors: This rank's tensors that the kernels read and write.
            step: The name of the step in errors.
            timeout: In seconds.
        """
        raise TransportError(f"{self!r}: there is no memory that GPUs share")

    @abstractmethod
    def split(self, ranks: Sequence[int], timeout: float) -> Transport:
        """Return a new transport between some of the ranks; its rank i is `ranks[i]` of this one.

        A collective of exactly these ranks. Disjoint sets of ranks may split at the same time. Both
        transports may then be used at the same time, from different threads.

        Args:
            ranks: The ranks, in the order of the new transport.
            timeout: Seconds to wait for the other ranks.
        """

    def interrupt(self, reason: str) -> None:
        """Make a thread that waits in `exchange` or in shared memory raise a TransportError soon.

        Any thread may call it at any time. A wait that cannot be interrupted raises when its
        messages have arrived, or at its timeout.
        """
        self._interrupted = reason
        memory = self.symmetric_memory
        if memory is not None:
            memory.withdraw()

    def check_interrupt(self, step: str) -> None:
        """Raise TransportError if a thread has called `interrupt`. step: its name in errors."""
        if self._interrupted:
            raise TransportError(f"{self.me} was stopped in {step}: {self._interrupted}")

    def abort(self, reason: str) -> None:
        """End all messages under way and become unusable; tell the peers why, if possible."""
        return

    @abstractmethod
    def close(self) -> None:
        """Release the transport's resources; it cannot be used afterwards."""


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's memory as bytes, so that tensors of every dtype can be sent."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() == 1:
        # One element is contiguous with any stride, but view(uint8) requires a stride of 1.
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8)


def as_tensor(payload: bytes) -> torch.Tensor:
    """Copy the bytes to a 1-D uint8 tensor on the CPU."""
    return torch.from_numpy(np.frombuffer(bytearray(payload), np.uint8))


def gather_bytes(
    payload: bytes,
    transport: Transport,
    step: str,
    timeout: float,
    ranks: Sequence[int] | None = None,
) -> list[bytes]:
    """Return every rank's bytes, by rank; lengths may differ. A collective.

    ranks: The transport's ranks that take part, in the order of the result; all unless given.

    It takes about log2 n rounds. Each rank holds its own bytes and the bytes of the ranks after it,
    and the number of ranks it holds doubles in each round. So each exchanges messages with only
    about 2 log2 n ranks, at distances that are powers of two.
    """
    members = range(transport.size) if ranks is None else ranks
    rank, size = members.index(transport.rank), len(members)
    known = [payload]
    while (distance := len(known)) < size:
        count = min(distance, size - distance)
        peer, target = members[(rank + distance) % size], members[(rank - distance) % size]

        def swap(
            mine: torch.Tensor,
            theirs: torch.Tensor,
            what: str,
            peer: int = peer,
            target: int = target,
        ) -> None:
            sends, recvs = [Message(target, mine)], [Message(peer, theirs)]
            transport.exchange(sends, recvs, f"{step} ({what})", timeout)

        lengths = torch.empty(count, dtype=torch.int64, device="cpu")
        swap(torch.tensor([len(each) for each in known[:count]], device="cpu"), lengths, "lengths")
        for number, length in enumerate(lengths.tolist()):
            if not 0 <= length <= _MAX_BYTES:
                name = transport.name(members[(rank + distance + number) % size])
                raise TransportError(
                    f"{step}: rank {name} says that it sends {length} bytes, which is not from 0 "
                    f"to {_MAX_BYTES}"
                )
        theirs = torch.empty(int(lengths.sum()), dtype=torch.uint8, device="cpu")
        swap(as_tensor(b"".join(known[:count])), theirs, "contents")
        known += [each.numpy().tobytes() for each in theirs.split(lengths.tolist())]
    return [known[(each - rank) % size] for each in range(size)]


def gather_objects(
    value: Any, transport: Transport, timeout: float, ranks: Sequence[int] | None = None
) -> list[Any]:
    """Return the values of all or some ranks at start-up, by `gather_bytes`; JSON carries them."""
    payload = json.dumps(value).encode()
    return read_objects(
        gather_bytes(payload, transport, "start-up", timeout, ranks), transport, ranks
    )


def read_objects(
    reports: Sequence[bytes], transport: Transport, ranks: Sequence[int] | None = None
) -> list[Any]:
    """Decode ranks' reports from JSON, by rank; TransportError names the rank of a broken one."""
    read = []
    for rank, each in zip(ranks or range(transport.size), reports, strict=True):
        try:
            read.append(json.loads(each))
        except (ValueError, RecursionError) as error:
            raise TransportError(
                f"rank {transport.name(rank)} sent a report that is not JSON: {error}"
            ) from None
    return read
