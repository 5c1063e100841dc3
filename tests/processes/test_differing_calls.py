"""Calls of ranks that share memory: differences, joins, deaths, messages."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch

import collectives
from collectives import CollectiveTimeoutError, Group
from tests.processes.conformance import start
from tests.processes.differing_calls import CHECKS
from tests.processes.harness import run_ranks

TIMEOUT = 3.0


@pytest.mark.parametrize(
    "size", [2, 3, 8, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 5))]
)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_threads(check: Callable[[Group], None], size: int) -> None:
    collectives.run_threads(size, check)


def _all_checks(rank: int) -> None:
    """On groups of 2 to 5 of the processes, each with symmetric memory of its own."""
    group = start("shm")
    for size in (5, 4, 3, 2):
        part = group.split(range(size))
        if part is not None:
            for check in CHECKS:
                check(part)
            part.close()
    group.barrier()
    collectives.shutdown()


@pytest.mark.slow
def test_processes() -> None:
    run_ranks(5, _all_checks)


def _survive(rank: int, sent: int) -> tuple[str, float]:
    group = start("shm", TIMEOUT)
    for call in range(30):
        before = time.monotonic()
        try:
            group.all_reduce(torch.ones(1000), name="w")
        except CollectiveTimeoutError as error:
            return f"{call}: {error}", time.monotonic() - before
        if rank == 2 and call == 20:
            os.kill(os.getpid(), sent)
    raise AssertionError("rank 2 was gone, and all calls were answered")


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_stops_in_the_midst(sent: signal.Signals) -> None:
    results = run_ranks(3, _survive, sent, timeout=60.0, may_die=frozenset({2}))[:2]
    assert any("rank 2" in text for text, _ in results)
    for text, waited in results:
        # Late by less than a call: what rank 2 sent before is still taken.
        assert text.startswith(("20:", "21:")) and "step" in text and "all_reduce 'w'" in text
        assert waited < (TIMEOUT + 5.0 if sent == signal.SIGSTOP else TIMEOUT / 2), text
