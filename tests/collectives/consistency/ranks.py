"""Groups of ranks that are threads, over each transport, and their requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from collectives import Group
from collectives.requests import Request
from collectives.schedules.topology import Topology
from collectives.transport import ThreadTransport, ThreadWorld
from tests.collectives.transport.thread_ranks import TIMEOUT, connect, together

# Over what the ranks reach each other, and what they negotiate through.
WAYS = ("threads", "messages", "shm", "tcp")
everywhere = pytest.mark.parametrize("way", WAYS)


class WithoutSharedMemory(ThreadTransport):
    """A transport whose ranks negotiate by messages."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        super().__init__(world, rank)
        self.symmetric_memory = None  # type: ignore[assignment]

    def abort(self, reason: str) -> None:
        """There is nothing to withdraw from."""


def transports(way: str, size: int) -> list[Any]:
    if way in ("shm", "tcp"):
        return connect(size, kinds=(way,))
    world = ThreadWorld(size)
    kind = ThreadTransport if way == "threads" else WithoutSharedMemory
    return [kind(world, rank) for rank in range(size)]


def run(
    way: str,
    size: int,
    job: Callable[[Group], Any],
    timeout: float = TIMEOUT,
    topology: Topology | None = None,
) -> list[Any]:
    """Run `job` on ranks that are threads; return the answers by rank."""
    ranks = transports(way, size)

    def main(transport: Any) -> Any:
        own = {"local_rank": transport.rank, "local_size": size, "topology": topology}
        group = Group(transport, timeout=timeout, **own)
        try:
            return job(group)
        finally:
            group.close()

    return together(*(lambda each=each: main(each) for each in ranks))


def start_and_wait(request: Request) -> Any:
    request.start()
    return request.wait()
