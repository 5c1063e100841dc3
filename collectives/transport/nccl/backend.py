"""What `NcclTransport` needs of a way to call NCCL, and that through torch.distributed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import cuda

from collectives.errors import CollectiveError, TransportError
from collectives.transport.base import Messages, Transport, as_bytes
from collectives.transport.process_groups import (
    abort_nccl,
    first_line,
    nccl_of,
    own_nccl,
    run_beside,
)

# How long the end of communicators may wait for the other ranks.
CLOSE_SECONDS = 5.0
# Status codes for which cupy raises a KeyError instead of an error with a text.
_STATUS = {
    7: "ncclInProgress: communicators must block, unset NCCL_COMM_BLOCKING",
    8: "ncclTimeout",
}


class CommunicationStream:
    """The stream of a device's messages, and the lock held while work is put on it or captured.

    It goes before the caller's streams: other ranks wait for what is on it.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = cuda.Stream(device, priority=-1)
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

    They are nobody else's. device: Their GPU; None if each message's own GPU is used.
    """

    device: torch.device | None

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


class TorchBackend(Backend):
    """torch's NCCL on the GPU of each message, with communicators of its own.

    Those of the process group may be the user's, and cannot be captured with: torch would wait for
    our graphs where the user destroys them. torch's watchdog ends the process when a rank is gone,
    but only long afterwards: before that a step's timeout, or the end of a peer, aborts what is
    under way. `open` connects all ranks, outside of a CUDA graph; if a rank is gone by then, torch
    waits without a limit.
    """

    device = None

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._process_group = process_group
        self._streams: dict[torch.device, CommunicationStream] = {}
        self._nccl: Any = None
        # Those of process groups that `all_reduce` was asked for.
        self._others: list[Any] = []

    def open(self, host: Transport, device: torch.device, timeout: float) -> None:
        """Make torch create its communicator of all ranks, by a sum in which all take part."""
        if self._nccl is None:
            self._nccl = own_nccl(self._process_group, timeout)
        self._nccl.allreduce([torch.zeros(1, device=device)]).wait()

    def stream(self, device: torch.device) -> CommunicationStream:
        """Return our own stream, which waits for torch's works: an event there comes after them."""
        if device not in self._streams:
            self._streams[device] = CommunicationStream(device)
        return self._streams[device]

    def exchange(self, sends: Messages, recvs: Messages, timeout: float) -> None:
        nccl = self._nccl
        nccl._start_coalescing()
        try:
            # As bytes: torch's NCCL does not send int16, for one.
            for post, messages in ((nccl.recv, recvs), (nccl.send, sends)):
                for peer, tensor in messages:
                    post([as_bytes(tensor)], peer, 0)
        finally:
            # Also of one that failed, which is open until then.
            work = nccl._end_coalescing()
        # The stream waits; the host does not.
        work.wait()

    def all_reduce(self, values: torch.Tensor, among: Any, timeout: float) -> None:
        nccl = self._nccl
        if among is not self._process_group:
            nccl = nccl_of(among)
            if nccl not in self._others:
                self._others.append(nccl)
        nccl.allreduce([values]).wait()

    def abort(self) -> str:
        made = [each for each in (self._nccl, *self._others) if each is not None]
        return "; ".join({abort_nccl(each): None for each in made}) or "NCCL was not in use"

    def close(self) -> None:
        nccl, self._nccl = self._nccl, None
        # From Python 3.12 on no thread starts when the interpreter ends, which ends it as well.
        with suppress(RuntimeError):
            if nccl is not None:
                run_beside(nccl.shutdown, "nccl-close", CLOSE_SECONDS)

    def split(self, host: Transport) -> TorchBackend:
        assert host.process_group is not None
        return TorchBackend(host.process_group)
