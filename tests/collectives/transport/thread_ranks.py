"""Ranks of one host as threads of one process: in a ThreadWorld, or as processes share memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from collectives.transport import Message, ThreadTransport, ThreadWorld, Transport
from collectives.transport.base import gather_objects
from collectives.transport.host import on_host
from collectives.transport.host_memory import host_place, share_memory

TIMEOUT = 20.0
NO_MEMFD = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="shared memory between processes needs Linux's memfd"
)
both = pytest.mark.parametrize("kind", ["threads", pytest.param("shm", marks=NO_MEMFD)])


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Each call in a thread of its own; their results, or the first one's error."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.result(timeout=60.0) for future in futures]


class WithoutSharedMemory(ThreadTransport):
    """A transport whose ranks negotiate by messages."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        super().__init__(world, rank)
        self.symmetric_memory = None


def connect(size: int, kind: str = "shm", hosts: Sequence[int] | None = None) -> list[Any]:
    """The ranks' transports: of a world of threads, or found as processes find each other ("shm").

    kind: Or "messages", for threads that share nothing but the channels of messages.
    hosts: By rank, a number for its host; all on one unless given.
    """
    world = ThreadWorld(size)
    if kind != "shm":
        own = ThreadTransport if kind == "threads" else WithoutSharedMemory
        return [own(world, rank) for rank in range(size)]

    def find(rank: int) -> Transport:
        far = world.transport(rank)
        gather = partial(gather_objects, transport=far, timeout=TIMEOUT)
        place = host_place() if hosts is None else hosts[rank]
        return on_host(far, share_memory(rank, size, place, gather))

    return together(*(lambda rank=rank: find(rank) for rank in range(size)))


def exchange(
    transport: Transport,
    sends: list[tuple[int, torch.Tensor]],
    recvs: list[tuple[int, torch.Tensor]],
    timeout: float = TIMEOUT,
) -> None:
    messages = [Message(*send) for send in sends], [Message(*recv) for recv in recvs]
    transport.exchange(*messages, "a step", timeout)


def noise(length: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator)


def poisoned(length: int) -> torch.Tensor:
    return torch.full((length,), 0xA5, dtype=torch.uint8)
