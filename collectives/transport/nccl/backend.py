"""What `NcclTransport` needs of the two ways to call NCCL: through cupy and through torch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import cuda

from collectives.errors import CollectiveError, TransportError
from collectives.transport.base import Messages, Transport
from collectives.transport.process_groups import first_line

# Status codes for which cupy raises a KeyError instead of an error with a text.
_STATUS = {
    7: "ncclInProgress: communicators must block, unset NCCL_COMM_BLOCKING",
    8: "ncclTimeout",
}


class CommunicationStream:
    """The stream of a device's messages, and the lock held while work is put on it or captured."""

    def __init__(self, device: torch.device) -> None:
        self.stream = cuda.Stream(device)
        # Reentrant: a capture posts steps.
        self.turn = threading.RLock()


class Backend(Protocol):
    """The communicators of one rank. Its calls put work on streams, and do not wait for it.

    Attributes:
        device: The GPU of the communicators; None if each message's own GPU is used.
        shared: Whether other code uses the communicators, too. An error then aborts them only if
            a step of ours is under way.
        sums: Whether `all_reduce` takes ranks; otherwise it takes a process group.
    """

    device: torch.device | None
    shared: bool
    sums: bool

    def open(self, host: Transport, device: torch.device, timeout: float) -> None:
        """Connect all ranks of `host` on a GPU, once, outside of a CUDA graph."""

    def stream(self, device: torch.device) -> CommunicationStream:
        """Return the communication stream of a GPU."""

    def exchange(self, sends: Messages, recvs: Messages, stream: Any, timeout: float) -> None:
        """Put non-empty messages on a stream, as one NCCL group.

        TimeoutError, with the ranks that it waited for if known, if that takes too long.
        """

    def all_reduce(self, values: torch.Tensor, among: Any, stream: Any, timeout: float) -> None:
        """Put an in-place sum on a stream: `Transport.all_reduce`. TimeoutError as above."""

    def abort(self) -> str:
        """Abort what is under way, in bounded time; return the outcome for an error's text."""

    def split(self, host: Transport, ranks: tuple[int, ...]) -> Backend:
        """Return a back end for the transport `host` between some of the ranks."""

    def check(self) -> None:
        """Raise NCCL's asynchronous error, if any. Safe to call during the other calls."""
        return

    def close(self) -> None:
        """Destroy our communicators, in bounded time; do nothing after `abort` or `close`."""


@contextmanager
def translate_errors(step: str) -> Iterator[None]:
    """Return a context that turns cupy's and torch's errors of NCCL into TransportErrors."""
    try:
        yield
    except CollectiveError:
        raise
    except (RuntimeError, KeyError) as error:
        text = first_line(error)
        if isinstance(error, KeyError):
            text = f"status {error}, {_STATUS.get(error.args[0], 'unknown to cupy')}"
        raise TransportError(f"NCCL failed in {step}: {text}") from error
