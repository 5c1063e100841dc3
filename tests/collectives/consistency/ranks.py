"""Groups of ranks that are threads, over each transport, and their requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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
    return run_over(connect(size, way), job, timeout, topology=topology)


def run_over(
    ranks: Sequence[Any],
    job: Callable[[Group], Any],
    timeout: float = TIMEOUT,
    *,
    local_size: int | None = None,
    topology: Topology | None = None,
) -> list[Any]:
    """The same over the ranks' transports, on one node unless given."""
    local = local_size or len(ranks)

    def main(transport: Any) -> Any:
        own = {"local_rank": transport.rank % local, "local_size": local, "topology": topology}
        group = Group(transport, timeout=timeout, **own)
        try:
            return job(group)
        finally:
            group.close()

    return together(*(partial(main, each) for each in ranks))


def start_and_wait(request: Request) -> Any:
    request.start()
    return request.wait()
