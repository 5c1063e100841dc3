"""Ranks of one host as threads of one process, joined by real connections."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from collectives.transport import ConnectionTransport, Message, ThreadWorld

TIMEOUT = 20.0
NO_MEMFD = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="shared memory between ranks needs Linux's memfd"
)
both = pytest.mark.parametrize("kind", [pytest.param("shm", marks=NO_MEMFD), "tcp"])


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Each call in a thread of its own; their results, or the first one's error."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.result(timeout=60.0) for future in futures]


def connect(
    size: int, unwilling: tuple[int, ...] = (), kinds: tuple[str, ...] = ("shm",)
) -> list[ConnectionTransport]:
    """The ranks' transports, found as processes find each other; threads' where there is none."""
    world = ThreadWorld(size)

    def find(rank: int) -> ConnectionTransport:
        offered = () if rank in unwilling else kinds
        return ConnectionTransport(world.transport(rank), TIMEOUT, kinds=offered)

    return together(*(lambda rank=rank: find(rank) for rank in range(size)))


def exchange(
    transport: ConnectionTransport,
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
