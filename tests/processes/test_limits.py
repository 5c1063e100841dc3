"""Ranks whose address space is limited: what they cannot do is an error that says so, at once."""

from __future__ import annotations

import resource
import threading
import time
from pathlib import Path

import pytest
import torch

import collectives
from collectives import CollectiveError, CollectiveTimeoutError, TransportError
from collectives.transport.process_groups import failed
from tests.processes.harness import run_ranks

# Less than the stack of a thread, of another size than those that the C library keeps.
LITTLE, STACK = 1 << 20, 1 << 26
# Enough for the threads that look for the other ranks, and not for gloo's.
SOME = 60 << 20
TIMEOUT = 4.0


def limit(more: int) -> None:
    """Leave this process so many bytes of address space; -1: as many as there are."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.RLIM_INFINITY if more < 0 else pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limits, resource.RLIM_INFINITY))


def _without_a_thread(rank: int) -> None:
    group = collectives.init(timeout=TIMEOUT)
    request = group.all_reduce_init(torch.ones(3))
    threading.stack_size(STACK)
    limit(LITTLE)
    for start in (lambda: group.all_reduce(torch.ones(3), async_op=True), request.start):
        with pytest.raises(RuntimeError, match="can't start new thread"):
            start()
    # In this thread it goes on, and once there is memory in another, too.
    assert group.all_reduce(torch.ones(3)).tolist() == [group.size] * 3
    limit(-1)
    request.start()
    assert request.wait().tolist() == [group.size] * 3
    collectives.shutdown()


@pytest.mark.parametrize("size", [1, 2])
def test_group_whose_thread_cannot_be_started_raises_and_stays_usable(size: int) -> None:
    run_ranks(size, _without_a_thread)


def _start(rank: int) -> tuple[str, float]:
    begin = time.monotonic()
    if rank == 1:
        limit(SOME)
    try:
        collectives.init(timeout=TIMEOUT)
    except CollectiveError as error:
        said = f"{type(error).__name__}: {error}"
    limit(-1)
    return said, time.monotonic() - begin


def test_rank_without_memory_in_init_is_told_so_and_no_timeout() -> None:
    others, mine = run_ranks(2, _start)
    assert mine[0].startswith("TransportError") and "this rank's system has no memory" in mine[0]
    # From its start; the other one waits for it.
    assert mine[1] < TIMEOUT
    assert others[0].startswith("CollectiveTimeoutError") and "rank 1" in others[0]


def test_other_failures_of_torch_are_timeouts() -> None:
    for text, kind in {
        "errno == 0. Cannot allocate memory\nits C++ stack": TransportError,
        "Resource temporarily unavailable": TransportError,
        "[enforce fail] DefaultCPUAllocator: can't allocate memory": TransportError,
        "Timed out waiting 4000ms for recv operation": CollectiveTimeoutError,
    }.items():
        error = failed("rank 0 waited for rank 1", RuntimeError(text))
        assert type(error) is kind
        assert "rank 0 waited for rank 1: " in str(error) and "stack" not in str(error)
    error = failed("rank 0 waited for rank 1", RuntimeError("writev [127.0.0.1]:12: Bad address"))
    assert type(error) is OSError and "this rank's own tensor" in str(error)
    assert "rank 1" not in str(error)
