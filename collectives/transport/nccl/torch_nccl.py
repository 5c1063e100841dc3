"""Messages of CUDA tensors through torch.distributed's own NCCL.

Not yet run on a GPU: shown over a stand-in for torch's calls alone, in
tests/collectives/transport/test_torch_nccl.py. tests/processes/test_torch_nccl.py is for where
there is one.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import cuda

from collectives.errors import CollectiveError, TransportError
from collectives.transport.base import Messages, Transport
from collectives.transport.nccl.pending import Pending, Posted, Watchdog
from collectives.transport.process_groups import abort_nccl, first_line


class TorchNccl:
    """Puts messages of CUDA tensors over a process group on the stream, and watches them.

    torch would end the process long after a rank was gone. Here a step's own timeout, and a peer's
    end, abort what is under way before, and are errors (pending.py). Nothing is watched while the
    stream is captured in a CUDA graph, which has to come after a first exchange outside. That one
    connects all ranks of the group, so every rank has to make it, if with empty messages; torch
    sets it no limit where a rank is gone by then.

    Args:
        process_group: What the messages travel on.
        rank: This rank.
        names: As `Transport.names`.

    Attributes:
        pending: The steps under way.
    """

    def __init__(
        self, process_group: dist.ProcessGroup, rank: int, names: Sequence[int] = ()
    ) -> None:
        self._process_group = process_group
        self._connected: set[torch.device] = set()
        self._behind: dict[torch.device, cuda.Stream] = {}
        # Of what is under way, in the order in which it was first used.
        groups = self._groups = [process_group]
        asked = self._asked = _Asked()
        self.pending = Pending(rank, lambda: _abort(groups), asked.gone, names=names)
        self._watchdog = Watchdog(self.pending, self, f"nccl-watch-{rank}")

    def ask(self, peers: Transport) -> None:
        """Find out from `peers`, as long as it lives, which rank is gone."""
        self._asked.peers = weakref.ref(peers)

    def exchange(self, sends: Messages, recvs: Messages, step: str, timeout: float) -> None:
        """Exchange a step's messages: `Transport.exchange`."""
        self.post(sends, recvs, step, timeout)()

    def post(
        self, sends: Messages, recvs: Messages, step: str, timeout: float
    ) -> Callable[[], None]:
        """Put a step's messages on torch's stream, behind the caller's work: `Transport.post`."""
        both = [*recvs, *sends]
        if not both:
            return _nothing
        self.pending.check_usable(step)
        device = both[0].tensor.device
        peers = tuple(sorted({peer for peer, tensor in both if tensor.numel()}))
        try:
            self._connect(device)
            if not peers:
                return _nothing
            ops = [
                dist.P2POp(op, tensor, group=self._process_group, group_peer=peer)
                for op, messages in ((dist.irecv, recvs), (dist.isend, sends))
                for peer, tensor in messages
                if tensor.numel()
            ]
            works = dist.batch_isend_irecv(ops)
            tensors = [tensor for _, tensor in both]
            return self._put(works, device, tensors, peers, step, timeout)
        except CollectiveError:
            raise
        except RuntimeError as error:
            raise TransportError(f"NCCL failed in {step}: {first_line(error)}") from error

    def follow(
        self,
        works: Sequence[dist.Work],
        process_group: dist.ProcessGroup,
        device: torch.device,
        step: str,
        timeout: float,
    ) -> None:
        """Put the current stream behind works, and watch them: `Transport.follow`."""
        if process_group not in self._groups:
            self._groups.append(process_group)
        self._put(works, device, (), (), step, timeout)()

    def _put(
        self,
        works: Sequence[dist.Work],
        device: torch.device,
        tensors: Sequence[torch.Tensor],
        peers: tuple[int, ...],
        step: str,
        timeout: float,
    ) -> Callable[[], None]:
        """Watch works of some tensors; return what puts the caller's later work behind them.

        A stream of our own is put behind them at once: an event to watch has to be on one.
        """
        start = time.monotonic()
        with cuda.device(device):
            caller = cuda.current_stream(device)
            capturing = cuda.is_current_stream_capturing()
            if device not in self._behind:
                self._behind[device] = cuda.Stream(device)
            behind = self._behind[device]
            with cuda.stream(behind):
                for work in works:
                    # The stream waits; the host does not. torch keeps the tensors no longer.
                    work.wait()
            if not capturing:
                for tensor in tensors:
                    tensor.record_stream(behind)
            event = behind.record_event()
        if not capturing:
            self._watchdog.start()
            self.pending.add(Posted(event, peers, step, timeout, start))

        def wait() -> None:
            with cuda.device(device):
                caller.wait_event(event)

        return wait

    def abort(self, reason: str) -> None:
        """End what an error left under way, for which peers may never come.

        Else the GPU would wait for them, and whoever closes the process group for the GPU.
        """
        # CUDA itself may have failed: the error that brought this about is the one to raise.
        with suppress(RuntimeError):
            if not self.pending.is_idle():
                self.pending.abort(lambda how: TransportError(f"{reason} ({how})"))

    def close(self) -> None:
        """Wait for what is under way; raise what ended it where nobody was told before."""
        try:
            self.pending.finish()
        finally:
            self._watchdog.stop()

    def _connect(self, device: torch.device) -> None:
        """Let torch make its communicator: one of all ranks, whoever has messages."""
        if device in self._connected or cuda.is_current_stream_capturing():
            return
        self._process_group.allreduce([torch.zeros(1, device=device)]).wait()
        self._connected.add(device)


def _nothing() -> None:
    """Wait for no messages."""


class _Asked:
    """Whom the watchdog asks which rank is gone; it must keep none of them alive."""

    def __init__(self) -> None:
        self.peers: weakref.ref[Transport] | None = None

    def gone(self, peers: Collection[int] | None) -> int | None:
        transport = self.peers() if self.peers is not None else None
        return None if transport is None else transport.gone(peers)


def _abort(groups: Sequence[dist.ProcessGroup]) -> str:
    """Abort torch's NCCL in all of the groups; return how that went."""
    return "; ".join({abort_nccl(group): None for group in groups})
