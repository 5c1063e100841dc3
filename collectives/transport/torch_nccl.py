"""Messages of CUDA tensors through torch.distributed's own NCCL.

Not yet run on a GPU: shown over a stand-in for torch's calls alone, in
tests/collectives/test_torch_nccl.py. tests/multi_rank/test_torch_nccl.py is for where there is one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import cuda

from ..errors import CollectiveTimeoutError, TransportError
from .base import Message
from .nccl_pending import MOST_PENDING, Posted, arrives


class _UnderWay(NamedTuple):
    posted: Posted
    works: Sequence[Any]


class TorchNccl:
    """`exchange` of a process group's CUDA tensors, which waits on the host, each step its timeout.

    torch would let the stream wait alone, and end the process long after a rank was gone. Within
    `deferred()` steps are put on the stream and waited for at the end. Nothing waits where the
    stream is captured in a CUDA graph. Connecting two ranks, at their first message, is bounded by
    the process group's own timeout.
    """

    def __init__(self, process_group: dist.ProcessGroup, rank: int) -> None:
        self._process_group = process_group
        self._rank = rank
        self._deferring = False
        self._under_way: list[_UnderWay] = []

    def exchange(
        self, sends: Sequence[Message], recvs: Sequence[Message], step: str, timeout: float
    ) -> None:
        start = time.monotonic()
        group = self._process_group
        sends = [message for message in sends if message.tensor.numel()]
        recvs = [message for message in recvs if message.tensor.numel()]
        both = [*recvs, *sends]
        if not both:
            return
        peers = tuple(sorted({message.peer for message in both}))
        device = both[0].tensor.device
        try:
            ops = [dist.P2POp(dist.irecv, t, group=group, group_peer=peer) for peer, t in recvs]
            ops += [dist.P2POp(dist.isend, t, group=group, group_peer=peer) for peer, t in sends]
            works = dist.batch_isend_irecv(ops)
            for work in works:
                # The stream waits; the host does not.
                work.wait()
        except RuntimeError as error:
            raise TransportError(f"NCCL failed in {step}: {_first_line(error)}") from error
        with cuda.device(device):
            if cuda.is_current_stream_capturing():
                return
            event = cuda.Event()
            event.record(cuda.current_stream(device))
        item = _UnderWay(Posted(event, peers, step, timeout), works)
        if not self._deferring:
            self._await(item, start)
            return
        self._under_way.append(item)
        self._settle(MOST_PENDING)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Steps within do not wait on the host; leaving waits for all, each up to its timeout."""
        if self._deferring:
            yield
            return
        self._deferring = True
        try:
            yield
            self._settle(0)
        finally:
            self._deferring = False
            self._under_way.clear()

    def _settle(self, most: int) -> None:
        while len(self._under_way) > most:
            self._await(self._under_way.pop(0), time.monotonic())

    def _await(self, item: _UnderWay, start: float) -> None:
        posted = item.posted
        if arrives(posted, start):
            return
        reason = "it is still under way"
        try:
            for work in item.works:
                # Aborts NCCL's communicator, which frees the GPU, and raises.
                work.wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            reason = _first_line(error)
        names = f"rank {posted.peers[0]}" if len(posted.peers) == 1 else f"ranks {posted.peers}"
        raise CollectiveTimeoutError(
            f"rank {self._rank} got no answer from {names} in {posted.step} (gave up after "
            f"{posted.timeout:g} s): {reason}"
        )


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
