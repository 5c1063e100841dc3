"""NCCL through torch.distributed, whose communicators belong to a process group.

Not yet run on a GPU: shown over a stand-in for torch's calls alone (tests/fakes/fake_torch.py).
tests/processes/test_torch_nccl.py is for where there is one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import cuda

from collectives.transport.base import Messages, Transport
from collectives.transport.nccl.backend import Backend
from collectives.transport.process_groups import abort_nccl


class TorchBackend(Backend):
    """A process group's NCCL, on whatever GPU a message is.

    torch would end the process long after a rank was gone. Here a step's own timeout, and a peer's
    end, abort what is under way before. The first exchange of a GPU connects all ranks of the group
    and is not to be in the capture of a CUDA graph; every rank has to make it, if with empty
    messages, and torch sets it no limit where a rank is gone by then.

    Args:
        process_group: What the messages travel on.
    """

    device = None
    # The process group may be the user's.
    shared = True
    sums = False

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._process_group = process_group
        self._streams: dict[torch.device, cuda.Stream] = {}
        # Of what is under way, in the order in which it was first used.
        self._groups = [process_group]

    def open(self, host: Transport, device: torch.device, timeout: float) -> None:
        """Let torch make its communicator: one of all ranks, whoever has messages."""
        self._process_group.allreduce([torch.zeros(1, device=device)]).wait()

    def stream(self, device: torch.device) -> cuda.Stream:
        """Return a stream of our own, behind which torch's works are put: an event is on one."""
        if device not in self._streams:
            self._streams[device] = cuda.Stream(device)
        return self._streams[device]

    def exchange(self, sends: Messages, recvs: Messages, stream: Any, timeout: float) -> None:
        ops = [
            dist.P2POp(op, tensor, group=self._process_group, group_peer=peer)
            for op, messages in ((dist.irecv, recvs), (dist.isend, sends))
            for peer, tensor in messages
        ]
        with cuda.stream(stream):
            for work in dist.batch_isend_irecv(ops):
                # The stream waits; the host does not.
                work.wait()

    def all_reduce(self, values: torch.Tensor, among: Any, stream: Any, timeout: float) -> None:
        """Sum over the ranks of a process group, which `abort` ends, too, from now on."""
        if among not in self._groups:
            self._groups.append(among)
        with cuda.stream(stream):
            work = dist.all_reduce(values, group=among, async_op=True)
            assert work is not None
            work.wait()

    def abort(self) -> str:
        return "; ".join({abort_nccl(group): None for group in self._groups})

    def close(self) -> None:
        """Leave the process group to whoever owns it."""

    def split(self, host: Transport, ranks: tuple[int, ...]) -> TorchBackend:
        assert host.process_group is not None
        return TorchBackend(host.process_group)
