"""NCCL through torch.distributed, whose communicators belong to a process group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from collectives.transport.base import Messages, Transport, as_bytes
from collectives.transport.nccl.backend import Backend, CommunicationStream
from collectives.transport.process_groups import abort_nccl


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
