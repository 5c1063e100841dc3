"""The interface through which `NcclTransport` calls NCCL, and its version by torch.distributed."""

from __future__ import annotations

import threading
from contextlib import suppress
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

# Destroying communicators may wait so long for the other ranks.
CLOSE_SECONDS = 5.0
# cupy raises a KeyError for these status codes, instead of an error with a text.
_STATUS = {
    7: "ncclInProgress: communicators must block, unset NCCL_COMM_BLOCKING",
    8: "ncclTimeout",
}


class CommunicationStream:
    """The stream of a device's messages, and the lock held while work is put on it or captured.

    It has a higher priority than the caller's streams, since other ranks wait for its messages.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = cuda.Stream(device, priority=-1)
        # Reentrant: a capture posts steps.
        self.turn = threading.RLock()


class Backend(Protocol):
    """The communicators of one rank.

    Only this transport uses these communicators. `open` connects all ranks on a GPU, once, outside
    of a CUDA graph. While the communication stream is the current one, `exchange` puts non-empty
    messages on it as one NCCL group, and `all_reduce` an in-place sum, among ranks or by a process
    group; the host waits for neither. A call that takes too long raises TimeoutError, with the
    ranks that it waited for, if known. `abort` ends all work under way, in bounded time, and
    returns the outcome for an error's text. `split` returns the backend of a transport between
    some of the ranks.

    device: The communicators' GPU; None if each message's own GPU is used.
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


class translate_errors:
    """A context that turns cupy's and torch's errors of NCCL into TransportErrors.

    A class, since every step enters one: a generator's context takes three times as long.
    """

    def __init__(self, step: str) -> None:
        self._step = step

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, RuntimeError | KeyError) or isinstance(error, CollectiveError):
            return
        text = first_line(error)
        if isinstance(error, KeyError):
            text = f"status {error}, {_STATUS.get(error.args[0], 'unknown to cupy')}"
        raise TransportError(f"NCCL failed in {self._step}: {text}") from error


class TorchBackend(Backend):
    """torch's NCCL on the GPU of each message, with communicators of our own.

    The process group's communicators may be the user's, and our CUDA graphs cannot use those: when
    the user destroys the group, torch would wait for the graphs. torch's watchdog ends the process
    when ranks are gone, but only long afterwards: before that, the steps under way are aborted
    because of a timeout or a peer that has ended. `open` connects all ranks, outside of a CUDA
    graph; if one is gone by then, torch waits without a limit.
    """

    device = None

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._process_group = process_group
        self._streams: dict[torch.device, CommunicationStream] = {}
        self._nccl: Any = None
        # The NCCL backends of process groups that `all_reduce` has summed by.
        self._others: list[Any] = []

    def open(self, host: Transport, device: torch.device, timeout: float) -> None:
        """Make torch create its communicator of all ranks, by a sum of all of them."""
        if self._nccl is None:
            self._nccl = own_nccl(self._process_group, timeout)
        self._nccl.allreduce([torch.zeros(1, device=device)]).wait()

    def stream(self, device: torch.device) -> CommunicationStream:
        """Return our stream. It waits for torch's work, so later events on it follow that work."""
        if device not in self._streams:
            self._streams[device] = CommunicationStream(device)
        return self._streams[device]

    def exchange(self, sends: Messages, recvs: Messages, timeout: float) -> None:
        nccl = self._nccl
        nccl._start_coalescing()
        try:
            # As bytes, since torch's NCCL does not send some dtypes, such as int16.
            for post, messages in ((nccl.recv, recvs), (nccl.send, sends)):
                for peer, tensor in messages:
                    post([as_bytes(tensor)], peer, 0)
        finally:
            # After a failure, too: the group stays open until this call.
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
        # From Python 3.12 on no thread starts while the interpreter exits; the exit ends NCCL, too.
        with suppress(RuntimeError):
            if nccl is not None:
                run_beside(nccl.shutdown, "nccl-close", CLOSE_SECONDS)

    def split(self, host: Transport) -> TorchBackend:
        assert host.process_group is not None
        return TorchBackend(host.process_group)
