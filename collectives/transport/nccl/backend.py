"""The interface of back ends of `NcclTransport`, which call NCCL through cupy or through torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import cuda

from collectives.errors import CollectiveError, TransportError
from collectives.transport.base import Messages, Transport
from collectives.transport.process_groups import first_line

# Status codes for which cupy has no text.
_STATUS = {
    7: "ncclInProgress: communicators must block, unset NCCL_COMM_BLOCKING",
    8: "ncclTimeout",
}


class Backend(Protocol):
    """The communicators of one rank. The host does not wait for their streams.

    A call that does not return in time raises futures.TimeoutError, with the ranks for which it
    waits as arguments, if they are known.

    Attributes:
        device: The GPU to which it is bound; None if each message's own GPU is used.
        shared: Whether other code uses its communicators, too. Then an error aborts them only if
            something of ours is under way.
        sums: Whether `all_reduce` takes ranks; if not, it takes a process group.
        turn: Held by the thread that puts work on the communication streams, or captures it.
    """

    device: torch.device | None
    shared: bool
    sums: bool
    turn: AbstractContextManager[object]

    def open(self, host: Transport, device: torch.device, timeout: float) -> None:
        """Make the communicator of all ranks of `host` on a GPU, once, outside of a CUDA graph."""

    def stream(self, device: torch.device) -> cuda.Stream:
        """Return the communication stream of a GPU."""

    def exchange(self, sends: Messages, recvs: Messages, stream: Any, timeout: float) -> None:
        """Put non-empty messages on the communication stream, as one NCCL group."""

    def all_reduce(self, values: torch.Tensor, among: Any, stream: Any, timeout: float) -> None:
        """Put an in-place sum on the communication stream: `Transport.all_reduce`."""

    def check(self) -> None:
        """Raise NCCL's asynchronous error, if any. May run at the same time as the other calls."""
        return

    def abort(self) -> str:
        """Abort what is under way, in bounded time; return the outcome, for an error's text."""

    def close(self) -> None:
        """Destroy the communicators, in bounded time. Does nothing after `abort` or `close`.

        Called at the latest when the interpreter exits.
        """

    def split(self, host: Transport, ranks: tuple[int, ...]) -> Backend:
        """Return a back end for the transport `host`, which is between some of the ranks."""


@contextmanager
def translate_errors(step: str) -> Iterator[None]:
    """Return a context that turns cupy's and torch's errors of NCCL into TransportErrors."""
    try:
        yield
    except CollectiveError:
        raise
    except RuntimeError as error:
        raise TransportError(f"NCCL failed in {step}: {first_line(error)}") from error
    except KeyError as error:
        # cupy raises this for a status code for which it has no text.
        if not error.args or not isinstance(error.args[0], int):
            raise
        text = _STATUS.get(error.args[0], "unknown to cupy")
        raise TransportError(f"NCCL failed in {step}: status {error.args[0]}, {text}") from error
