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

    `open` connects all ranks on a GPU, once, outside of a CUDA graph. `exchange` puts non-empty
    messages on the communication stream, which is the current one, as one NCCL group, and
    `all_reduce` an in-place sum, among ranks or by torch's process group; neither waits for it. A
    call that takes too long raises TimeoutError, with the ranks that it waited for, if known.
    `abort` ends what is under way, in bounded time, and returns the outcome for an error's text.
    `split` is for a transport between some of the ranks.

    Attributes:
        device: The GPU of the communicators; None if each message's own GPU is used.
        shared: Whether other code uses them, too. Then they are aborted only if work is under way.
    """

    device: torch.device | None
    shared: bool

    def open(self, host: Transport, device: torch.device, timeout: float) -> None: ...
    def stream(self, device: torch.device) -> CommunicationStream: ...
    def exchange(self, sends: Messages, recvs: Messages, timeout: float) -> None: ...
    def all_reduce(self, values: torch.Tensor, among: Any, timeout: float) -> None: ...
    def abort(self) -> str: ...
    def split(self, host: Transport) -> Backend: ...

    def check(self) -> None:
        """Raise NCCL's asynchronous error, if any. Safe to call during the other calls."""
        return

    def close(self) -> None:
        """Destroy our communicators, in bounded time; do nothing after `abort` or `close`."""
        return


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
