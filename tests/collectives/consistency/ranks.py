"""Groups of ranks that are threads, over each transport, and their requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from collectives import Group
from collectives.requests import Request
from collectives.schedules.topology import Topology
from tests.collectives.transport.thread_ranks import TIMEOUT, connect, together
from tests.collectives.transport.thread_ranks import WithoutSharedMemory as WithoutSharedMemory

# Over what the ranks reach each other, and what they negotiate through.
WAYS = ("threads", "messages", "shm")
everywhere = pytest.mark.parametrize("way", WAYS)


def run(
    way: str,
    size: int,
    job: Callable[[Group], Any],
    timeout: float = TIMEOUT,
    topology: Topology | None = None,
) -> list[Any]:
    """Run `job` on ranks that are threads; return the answers by rank."""
    ranks = connect(size, way)

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
