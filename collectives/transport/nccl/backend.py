"""What `NcclTransport` asks of a library that calls NCCL: cupy (cupy_backend.py) or torch's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import cuda

from collectives.errors import CollectiveError, TransportError
from collectives.transport.base import Messages, Transport
from collectives.transport.process_groups import first_line

_STATUS = {
    7: "ncclInProgress: communicators must block, unset NCCL_COMM_BLOCKING",
    8: "ncclTimeout",
}


class Backend(Protocol):
    """The communicators of one rank, on streams that the host does not wait for.

    A call that does not return in time raises futures.TimeoutError, with the ranks that it waits
    for where it knows them.

    Attributes:
        device: The GPU that it is bound to; None where messages say it.
        shared: Whether others use its communicators, too. Then an error ends only what is under
            way on them.
        sums: Whether `all_reduce` takes ranks; else it takes a process group.
    """

    device: torch.device | None
    shared: bool
    sums: bool

    def open(self, host: Transport, device: torch.device, timeout: float) -> None:
        """Make the communicator of all ranks of `host` on a GPU: once, outside of a capture."""

    def stream(self, device: torch.device) -> cuda.Stream:
        """Return the communication stream of a GPU."""

    def exchange(self, sends: Messages, recvs: Messages, stream: Any, timeout: float) -> None:
        """Put messages on the communication stream, as one group; none of them is empty."""

    def all_reduce(self, values: torch.Tensor, among: Any, stream: Any, timeout: float) -> None:
        """Put a sum in place on the communication stream: `Transport.all_reduce`."""

    def check(self) -> None:
        """Raise NCCL's asynchronous error, if any is known. Called beside the other calls."""
        return

    def abort(self) -> str:
        """End what is under way, in bounded time; return how that went, for an error's text."""

    def close(self) -> None:
        """Let go of the communicators, in bounded time; a second time, or after `abort`, nothing.

        Runs at the latest when the interpreter exits.
        """

    def split(self, host: Transport, ranks: tuple[int, ...]) -> Backend:
        """Return one for the transport `host` between some of the ranks."""


@contextmanager
def translate_errors(step: str) -> Iterator[None]:
    """Raise NCCL's errors, as cupy and torch raise them, as TransportErrors with NCCL's text."""
    try:
        yield
    except CollectiveError:
        raise
    except RuntimeError as error:
        raise TransportError(f"NCCL failed in {step}: {first_line(error)}") from error
    except KeyError as error:
        # What cupy raises for codes that it has no text for.
        if not error.args or not isinstance(error.args[0], int):
            raise
        text = _STATUS.get(error.args[0], "unknown to cupy")
        raise TransportError(f"NCCL failed in {step}: status {error.args[0]}, {text}") from error
