"""What `NcclTransport` needs of a way to call NCCL, and that through torch.distributed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import cuda

from collectives.errors import CollectiveError, TransportError
from collectives.transport.base import Messages, Transport, as_bytes
from collectives.transport.process_groups import abort_nccl, first_line

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


class TorchBackend(Backend):
    """The NCCL of a process group, which may be the user's, on the GPU of each message.

    torch's watchdog ends the process when a rank is gone, but only long afterwards: before that a
    step's timeout, or the end of a peer, aborts what is under way. The first exchange on a GPU
    connects all ranks of the group: every rank has to make it, if only with empty messages, and
    outside of a CUDA graph. If a rank is gone by then, torch waits without a limit.
    """

    device = None
    shared = True

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._process_group = process_group
        self._streams: dict[torch.device, CommunicationStream] = {}
        # The process groups to abort, in the order of their first use: those of `all_reduce`, too.
        self._groups = [process_group]

    def open(self, host: Transport, device: torch.device, timeout: float) -> None:
        """Make torch create its communicator of all ranks, by a sum in which all take part."""
        self._process_group.allreduce([torch.zeros(1, device=device)]).wait()

    def stream(self, device: torch.device) -> CommunicationStream:
        """Return our own stream, which waits for torch's works: an event there comes after them."""
        if device not in self._streams:
            self._streams[device] = CommunicationStream(device)
        return self._streams[device]

    def exchange(self, sends: Messages, recvs: Messages, timeout: float) -> None:
        group = self._process_group
        # As bytes: torch's NCCL does not send int16, for one.
        ops = [
            dist.P2POp(op, as_bytes(tensor), group=group, group_peer=peer)
            for op, messages in ((dist.irecv, recvs), (dist.isend, sends))
            for peer, tensor in messages
        ]
        for work in dist.batch_isend_irecv(ops):
            # The stream waits; the host does not.
            work.wait()

    def all_reduce(self, values: torch.Tensor, among: Any, timeout: float) -> None:
        if among not in self._groups:
            self._groups.append(among)
        work = dist.all_reduce(values, group=among, async_op=True)
        assert work is not None
        work.wait()

    def abort(self) -> str:
        return "; ".join({abort_nccl(group): None for group in self._groups})

    def split(self, host: Transport) -> TorchBackend:
        assert host.process_group is not None
        return TorchBackend(host.process_group)
