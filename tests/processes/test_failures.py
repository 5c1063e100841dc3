"""Ranks that end a group: by abort over gloo, which tells nobody else, and by a failed thread."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import collectives
from collectives import Group, TransportError
from tests.processes.conformance import start
from tests.processes.harness import run_ranks

TIMEOUT = 3.0


def _abort(rank: int) -> tuple[str, float]:
    """Rank 2 aborts the call that it and rank 1 wait in; rank 0 comes later."""
    group = start("gloo", TIMEOUT)
    group.all_reduce(torch.ones(10))
    if rank == 2:
        threading.Timer(0.3, group.abort, ("enough",)).start()
    if rank == 0:
        time.sleep(0.8)
    began = time.monotonic()
    with pytest.raises(collectives.CollectiveError) as caught:
        group.all_reduce(torch.ones(100_000))
    waited = time.monotonic() - began
    with pytest.raises(TransportError, match="unusable since an earlier failure"):
        group.barrier()
    return str(caught.value), waited


def test_abort_over_gloo_ends_the_group_on_all_ranks() -> None:
    results = run_ranks(3, _abort, timeout=60.0)
    assert all(waited < TIMEOUT + 5.0 for _, waited in results)
    assert "rank 2 called abort(): enough" in results[2][0]


def test_a_failed_thread_is_what_the_caller_sees() -> None:
    def main(group: Group) -> None:
        if group.rank == 1:
            raise KeyError("the cause")
        group.barrier()

    with pytest.raises(KeyError, match="the cause"):
        collectives.run_threads(3, main)
