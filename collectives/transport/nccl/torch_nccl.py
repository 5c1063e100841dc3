"""Messages of CUDA tensors through torch.distributed's own NCCL.

Not yet run on a GPU: shown over a stand-in for torch's calls alone, in
tests/collectives/transport/test_torch_nccl.py. tests/processes/test_torch_nccl.py is for where
there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import cuda

from collectives.errors import CollectiveTimeoutError, TransportError
from collectives.transport.base import Messages
from collectives.transport.nccl.pending import Pending, Posted, arrives
from collectives.transport.process_groups import abort_nccl, first_line


class TorchNccl:
    """Exchanges CUDA tensors over a process group and waits on the host, each step its timeout.

    torch would let the stream alone wait, and end the process long after a rank was gone. Within
    `deferred()` steps are put on the stream and waited for at the end. Nothing waits while the
    stream is captured in a CUDA graph, which has to come after a first exchange outside. That one
    connects all ranks of the group, so every rank has to make it, if with empty messages; torch
    sets it no limit where a rank is gone by then.

    Args:
        process_group: What the messages travel on.
        rank: This rank, for errors.
    """

    def __init__(self, process_group: dist.ProcessGroup, rank: int) -> None:
        self._process_group = process_group
        self._rank = rank
        self._connected: set[torch.device] = set()
        self._pending = Pending()

    def exchange(self, sends: Messages, recvs: Messages, step: str, timeout: float) -> None:
        """Exchange a step's messages: `Transport.exchange`."""
        both = [*recvs, *sends]
        if not both:
            return
        device = both[0].tensor.device
        peers = tuple(sorted({peer for peer, tensor in both if tensor.numel()}))
        try:
            self._connect(device)
            if not peers:
                return
            ops = [
                dist.P2POp(op, tensor, group=self._process_group, group_peer=peer)
                for op, messages in ((dist.irecv, recvs), (dist.isend, sends))
                for peer, tensor in messages
                if tensor.numel()
            ]
            event = behind(dist.batch_isend_irecv(ops), device)
        except RuntimeError as error:
            raise TransportError(f"NCCL failed in {step}: {first_line(error)}") from error
        if event is None:
            return
        with self.deferred():
            self._pending.put_off(Posted(event, peers, step, timeout), self._await)

    def deferred(self) -> AbstractContextManager[None]:
        """Put off waiting within; leaving waits for all steps, each up to its timeout."""
        return self._pending.deferred(self._await)

    def abort(self) -> None:
        """End what an error left under way, for which peers may never come.

        Else the GPU would wait for them, and whoever closes the process group for the GPU.
        """
        under_way = [*self._pending.items]
        self._pending.items.clear()
        # CUDA itself may have failed: the error that brought this about is the one to raise.
        with suppress(RuntimeError):
            if not all(posted.event.query() for posted in under_way):
                abort_nccl(self._process_group)

    def _connect(self, device: torch.device) -> None:
        """Let torch make its communicator: one of all ranks, whoever has messages."""
        if device in self._connected or cuda.is_current_stream_capturing():
            return
        self._process_group.allreduce([torch.zeros(1, device=device)]).wait()
        self._connected.add(device)

    def _await(self, posted: Posted, start: float) -> None:
        if arrives(posted, start):
            return
        self._pending.items.clear()
        reason = abort_nccl(self._process_group)
        names = f"rank {posted.peers[0]}" if len(posted.peers) == 1 else f"ranks {posted.peers}"
        raise CollectiveTimeoutError(
            f"rank {self._rank} got no answer from {names} in {posted.step} (stopped after "
            f"{posted.timeout:g} s): {reason}"
        )


def behind(works: Sequence[Any], device: torch.device) -> cuda.Event | None:
    """Put the current stream behind the works; return an event there, None in a capture."""
    for work in works:
        # The stream waits; the host does not.
        work.wait()
    with cuda.device(device):
        if cuda.is_current_stream_capturing():
            return None
        return cuda.current_stream(device).record_event()
