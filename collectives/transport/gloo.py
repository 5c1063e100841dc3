"""Messages through torch.distributed: gloo for CPU tensors, torch's own NCCL for CUDA tensors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist

from collectives.errors import CollectiveTimeoutError
from collectives.transport.base import Message, Transport
from collectives.transport.nccl.torch_nccl import TorchNccl
from collectives.transport.process_groups import extend_timeout, first_line, leave, subgroup

__all__ = ["GlooTransport"]


def _backends(config: str) -> dict[str, str]:
    """Return the backends of a process group's configuration, by device type."""
    pairs = (part.split(":", 1) for part in config.split(",") if ":" in part)
    return dict(pairs)


class GlooTransport(Transport):
    """Point-to-point messages of a `torch.distributed` process group.

    Args:
        process_group: What the messages travel on.
        owned: Whether closing this transport destroys it.
    """

    process_group: dist.ProcessGroup

    def __init__(self, process_group: dist.ProcessGroup, *, owned: bool = False) -> None:
        self.process_group = process_group
        self._owned = owned
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)
        self._config = dist.get_backend_config(process_group)
        self._backends = _backends(self._config)
        if self._backends.get("cpu") != "gloo":
            raise ValueError(
                f"process_group must carry CPU tensors over gloo, its backends are "
                f'{self._backends}: make it with backend="gloo" or "cpu:gloo,cuda:nccl"'
            )

        self._nccl: TorchNccl | None = None
        if self._backends.get("cuda") == "nccl":
            self._nccl = TorchNccl(process_group, self.rank)
            if owned:
                extend_timeout(process_group)

    def __repr__(self) -> str:
        return "GlooTransport()"

    def check_device(self, device: torch.device) -> None:
        """Raise ValueError where the process group has no backend for the device."""
        if device.type not in self._backends or (
            device.type == "cuda" and self._backends["cuda"] != "nccl"
        ):
            raise ValueError(
                f"tensor is on {device}, which this process group's backends "
                f"({self._backends}) do not carry; move it to the CPU, or initialise "
                'torch.distributed with backend="cpu:gloo,cuda:nccl"'
            )

    def exchange(
        self,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        step: str,
        timeout: float,
        code: int = 0,
    ) -> None:
        """Exchange a step's messages: `Transport.exchange`."""
        device = (sends or recvs)[0].tensor.device if sends or recvs else torch.device("cpu")
        if self._nccl is not None and device.type == "cuda":
            self._nccl.exchange(sends, recvs, step, timeout)
            return
        deadline = time.monotonic() + timeout
        posted: list[tuple[int, dist.Work]] = []
        peer = self.rank
        try:
            for message in recvs:
                if message.tensor.numel():
                    peer = message.peer
                    work = self.process_group.recv([_bytes(message.tensor)], peer, 0)
                    posted.append((peer, work))
            for message in sends:
                if message.tensor.numel():
                    peer = message.peer
                    work = self.process_group.send([_bytes(message.tensor)], peer, 0)
                    posted.append((peer, work))
            for other, work in posted:
                peer = other
                left = max(deadline - time.monotonic(), 1e-3)
                work.wait(timedelta(seconds=left))
        except RuntimeError as error:
            waited = timeout - (deadline - time.monotonic())
            raise CollectiveTimeoutError(
                f"rank {self.rank} got no answer from rank {peer} in {step} (stopped after "
                f"{waited:.1f} s of {timeout:g} s): {first_line(error)}"
            ) from error

    def deferred(self) -> AbstractContextManager[None]:
        """Put off waiting for CUDA messages to the end: `TorchNccl.deferred`."""
        return nullcontext() if self._nccl is None else self._nccl.deferred()

    def abort(self, reason: str) -> None:
        """End the CUDA messages under way. Those over gloo end by their timeouts."""
        if self._nccl is not None:
            self._nccl.abort()

    def split(self, ranks: Sequence[int], timeout: float) -> GlooTransport:
        """Make a process group of some of the ranks."""
        part = subgroup(self.process_group, ranks, self._config, timeout)
        return GlooTransport(part, owned=True)

    def close(self) -> None:
        """Destroy the process group, if it is owned."""
        if self._owned:
            leave(self.process_group)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's memory as bytes, so that every dtype travels."""
    return tensor.reshape(-1).view(torch.uint8)
