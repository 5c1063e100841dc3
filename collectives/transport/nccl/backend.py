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
    """The communicators of one rank.

    `exchange` and `all_reduce` put work on the communication stream, which is the current one, and
    do not wait for it. A call that takes too long raises TimeoutError, with the ranks that it
    waited for, if known.

    Attributes:
        device: The GPU of the communicators; None if each message's own GPU is used.
        shared: Whether other code uses them, too. Then they are aborted only if work is under way.
    """

    device: torch.device | None
    shared: bool

    def open(self, host: Transport, device: torch.device, timeout: float) -> None:
        """Connect all ranks of `host` on a GPU, once, outside of a CUDA graph."""

    def stream(self, device: torch.device) -> CommunicationStream:
        """Return the communication stream of a GPU."""

    def exchange(self, sends: Messages, recvs: Messages, timeout: float) -> None:
        """Put non-empty messages on the stream, as one NCCL group."""

    def all_reduce(self, values: torch.Tensor, among: Any, timeout: float) -> None:
        """Put an in-place sum on the stream, among ranks or by torch's process group."""

    def check(self) -> None:
        """Raise NCCL's asynchronous error, if any. Safe to call during the other calls."""
        return

    def abort(self) -> str:
        """Abort what is under way, in bounded time; return the outcome for an error's text."""

    def close(self) -> None:
        """Destroy our communicators, in bounded time; do nothing after `abort` or `close`."""
        return

    def split(self, host: Transport) -> Backend:
        """Return a back end for a transport between some of the ranks."""


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
