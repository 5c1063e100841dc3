"""Messages through torch.distributed: gloo for CPU tensors, torch's own NCCL for CUDA tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from collectives.errors import CollectiveError
from collectives.stall import Stall
from collectives.transport.base import Messages, Transport, as_bytes
from collectives.transport.nccl.torch_nccl import TorchNccl
from collectives.transport.process_groups import extend_timeout, failed, leave, subgroup


class GlooTransport(Transport):
    """Point-to-point messages of a `torch.distributed` process group.

    Args:
        process_group: What the messages travel on.
        owned: Whether closing this transport destroys it.
        names: As `Transport.names`.
    """

    process_group: dist.ProcessGroup

    def __init__(
        self, process_group: dist.ProcessGroup, *, owned: bool = False, names: Sequence[int] = ()
    ) -> None:
        self.names = names
        self.process_group = process_group
        self._owned = owned
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)
        self._config = dist.get_backend_config(process_group)
        # By device type.
        parts = [part.split(":", 1) for part in self._config.split(",")]
        self._backends = {part[0]: part[-1] for part in parts if len(part) == 2}
        if self._backends.get("cpu") != "gloo":
            raise ValueError(
                f"process_group must carry CPU tensors over gloo, its backends are "
                f'{self._backends}: make it with backend="gloo" or "cpu:gloo,cuda:nccl"'
            )
        self._nccl = TorchNccl(process_group, self.rank, names)
        if owned:
            extend_timeout(process_group)

    def __repr__(self) -> str:
        return "GlooTransport()"

    def check_device(self, device: torch.device) -> None:
        """Raise ValueError where the process group has no backend for the device."""
        backend = self._backends.get(device.type)
        if (device.type, backend) not in (("cpu", "gloo"), ("cuda", "nccl")):
            raise ValueError(
                f"tensor is on {device}, which this process group's backends "
                f"({self._backends}) do not carry; move it to the CPU, or initialise "
                'torch.distributed with backend="cpu:gloo,cuda:nccl"'
            )

    def exchange(self, sends: Messages, recvs: Messages, step: str, timeout: float) -> None:
        """Exchange a step's messages: `Transport.exchange`."""
        if any(message.tensor.device.type == "cuda" for message in (*sends, *recvs)):
            self._nccl.exchange(sends, recvs, step, timeout)
            return
        deadline = time.monotonic() + timeout
        posted: list[tuple[int, dist.Work]] = []
        peer = self.rank
        try:
            for post, messages in (
                (self.process_group.recv, recvs),
                (self.process_group.send, sends),
            ):
                for peer, tensor in messages:
                    if tensor.numel():
                        posted.append((peer, post([as_bytes(tensor)], peer, 0)))
            with Stall(self.name(self.rank), step, timeout, lambda: self.named([peer])).within():
                for other, work in posted:
                    peer = other
                    work.wait(timedelta(seconds=max(deadline - time.monotonic(), 1e-3)))
            self.check_interrupt(step)
        except CollectiveError:
            raise
        except RuntimeError as error:
            waited = timeout - (deadline - time.monotonic())
            raise failed(
                f"{self.me} got no answer from {self.named([peer])} in {step} (stopped "
                f"after {waited:.1f} s of {timeout:g} s)",
                error,
            ) from error

    def posts_ahead(self, device: torch.device) -> bool:
        """Only messages between GPUs, which are on a stream of torch's NCCL.

        gloo could be posted ahead, too. But its thread and the rank's reductions would take turns
        on the host's memory and processors, and a rank has nothing else to do.
        """
        return device.type == "cuda"

    def post(
        self, sends: Messages, recvs: Messages, step: str, timeout: float
    ) -> Callable[[], None]:
        """Start a step's messages: `Transport.post`. CPU tensors have arrived already."""
        if any(message.tensor.device.type == "cuda" for message in (*sends, *recvs)):
            return self._nccl.post(sends, recvs, step, timeout)
        return super().post(sends, recvs, step, timeout)

    def check_streams(self) -> None:
        """Raise what ended CUDA messages under way: `Transport.check_streams`."""
        self._nccl.pending.raise_error()

    def follow(
        self,
        works: Sequence[dist.Work],
        process_group: dist.ProcessGroup,
        device: torch.device,
        step: str,
        timeout: float,
    ) -> None:
        """Watch works of torch's NCCL: `Transport.follow`."""
        self._nccl.follow(works, process_group, device, step, timeout)

    def ask(self, peers: Transport) -> None:
        """Find out from `peers` who is gone, which gloo does not tell."""
        self._nccl.ask(peers)

    def abort(self, reason: str) -> None:
        """End the CUDA messages under way. Those over gloo end by their timeouts."""
        self._nccl.abort(reason)

    def split(self, ranks: Sequence[int], timeout: float) -> GlooTransport:
        """Make a process group of some of the ranks, whose gloo connects those that use it."""
        part = subgroup(self.process_group, ranks, self._config, timeout, lazy=True)
        return GlooTransport(part, owned=True, names=tuple(map(self.name, ranks)))

    def close(self) -> None:
        """Wait for CUDA messages under way; destroy the process group, if it is owned."""
        try:
            self._nccl.close()
        finally:
            if self._owned:
                leave(self.process_group)
