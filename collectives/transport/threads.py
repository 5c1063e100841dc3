"""Ranks that are threads of one process, for tests, notebooks and debugging.

Messages of CUDA tensors are staged through the host's memory.
"""

from __future__ import annotations

import mmap
import sys
import threading
from collections import Counter
from collections.abc import Sequence

import torch

from collectives.transport.base import Message, Messages
from collectives.transport.host import HostTransport
from collectives.transport.host_memory import host_memory_bytes

# Linux's number, which Python names from 3.13 on.
_NORESERVE = 0x4000


class ThreadWorld:
    """The memory that `size` ThreadTransports share."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        self.size = size
        # Without NORESERVE Linux refuses to map more memory than the machine has, as a few hundred
        # ranks need.
        flags = {"flags": mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NORESERVE}
        self.memory = mmap.mmap(
            -1, host_memory_bytes(size), **(flags if sys.platform == "linux" else {})
        )
        # Worlds that not all of their ranks have asked for yet, and how many ranks have.
        self._parts: dict[tuple[tuple[int, ...], int], tuple[ThreadWorld, int]] = {}
        self._lock = threading.Lock()

    def transport(self, rank: int) -> ThreadTransport:
        """Return the transport of one rank."""
        return ThreadTransport(self, rank)

    def part(self, ranks: tuple[int, ...], number: int) -> ThreadWorld:
        """Return the `number`th world of these ranks, one object for all; each rank asks once."""
        key = ranks, number
        with self._lock:
            world, asked = self._parts.pop(key, (None, 0))
            world = world or ThreadWorld(len(ranks))
            # The last rank to ask removes it, so that closed groups do not stay in memory.
            if asked + 1 < len(ranks):
                self._parts[key] = world, asked + 1
            return world


class ThreadTransport(HostTransport):
    """One rank's end of a ThreadWorld."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        super().__init__(world.memory, rank, world.size, near=range(world.size))
        self._world = world
        self._made: Counter[tuple[int, ...]] = Counter()

    def check_device(self, device: torch.device) -> None:
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"tensor is on {device}; the threads transport carries cpu and cuda")

    def exchange(self, sends: Messages, recvs: Messages, step: str, timeout: float) -> None:
        """Exchange messages: `Transport.exchange`, but the host also waits for CUDA tensors."""
        if all(message.tensor.is_cpu for message in (*sends, *recvs)):
            super().exchange(sends, recvs, step, timeout)
            return
        staged = [Message(peer, torch.empty_like(each, device="cpu")) for peer, each in recvs]
        sends = [Message(peer, tensor.cpu()) for peer, tensor in sends]
        super().exchange(sends, staged, step, timeout)
        for (_, tensor), (_, copy) in zip(recvs, staged, strict=True):
            tensor.copy_(copy)

    def split(self, ranks: Sequence[int], timeout: float) -> ThreadTransport:
        members = tuple(ranks)
        self._made[members] += 1
        world = self._world.part(members, self._made[members])
        part = world.transport(members.index(self.rank))
        part.names = tuple(map(self.name, members))
        return part
