"""A rank that dies or stalls: the others get the promised error in time, naming it."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

import collectives
from collectives import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    Group,
    Operands,
    Sum,
    TransportError,
)
from tests.processes.conformance import start
from tests.processes.harness import run_ranks

TIMEOUT = 3.0


def _abort(rank: int, transport: str) -> tuple[str, float]:
    """Rank 2 aborts the call that it and rank 1 wait in; rank 0 comes later."""
    group = start(transport, TIMEOUT)
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


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_abort_is_told_to_all_ranks_at_once_but_over_gloo(transport: str) -> None:
    results = run_ranks(3, _abort, transport, timeout=60.0)
    for text, waited in results:
        if transport == "gloo":
            assert waited < TIMEOUT + 5.0
        else:
            assert "rank 2 called abort(): enough" in text
            assert waited < TIMEOUT / 2
    assert "rank 2 called abort(): enough" in results[2][0]


class Failing(type(Sum)):  # type: ignore[misc]
    """A sum that fails on rank 1, in the middle of a call."""

    name = "Failing"
    reduces_in_shared_memory = False

    def __init__(self, error: BaseException | None) -> None:
        self._error = error

    def reduce(self, operands: Operands) -> None:
        if self._error is not None:
            raise self._error
        super().reduce(operands)


def _interrupted(rank: int, transport: str, error: BaseException) -> tuple[str, float]:
    group = start(transport, 20.0)
    begin = time.monotonic()
    with pytest.raises(BaseException) as caught:
        group.all_reduce(torch.ones(10), Failing(error if rank == 1 else None), algorithm="xring")
    waited = time.monotonic() - begin
    with pytest.raises(TransportError, match=r"unusable since an earlier failure: .+"):
        group.all_reduce(torch.ones(10))
    if rank == 1:
        assert caught.type is type(error)
    else:
        assert caught.type is CollectiveTimeoutError
    return str(caught.value), waited


@pytest.mark.parametrize("error", [ValueError("the cause"), KeyboardInterrupt()])
def test_a_rank_that_fails_within_a_call_tells_the_others(error: BaseException) -> None:
    """At once, not after the timeout; and what they call next is no answer to its next call."""
    results = run_ranks(3, _interrupted, "shm", error)
    for said, waited in (results[0], results[2]):
        assert str(error) in said and "step" in said and "rank" in said
        assert waited < 5.0


def _unlike(rank: int) -> tuple[str, float]:
    with pytest.raises(CollectiveMismatchError) as caught:
        collectives.init(timeout=20.0, transport="gloo" if rank == 1 else "shm")
    group = collectives.init(timeout=20.0)
    return str(caught.value), float(group.all_reduce(torch.ones(1)))


def test_ranks_that_start_with_other_options_are_told() -> None:
    """Some would connect while the others go on to their first call."""
    said = (
        "ranks disagree: rank 0 calls init() with transport=shm, "
        "rank 1 calls init() with transport=gloo"
    )
    assert run_ranks(3, _unlike) == [(said, 3.0)] * 3


def test_a_failed_thread_is_what_the_caller_sees() -> None:
    def main(group: Group) -> None:
        if group.rank == 1:
            raise KeyError("the cause")
        group.barrier()

    with pytest.raises(KeyError, match="the cause"):
        collectives.run_threads(3, main)


def _die_in_mid_call(rank: int) -> tuple[str, float] | None:
    """Rank 6 is killed as the call's own messages begin."""
    group = start("shm", TIMEOUT)
    group.all_reduce(torch.ones(10))
    transport = group.transport
    exchange = transport.exchange

    def struck(sends: Any, recvs: Any, step: str, timeout: float) -> None:
        if "psgpu" in step:
            os.kill(os.getpid(), signal.SIGKILL)
        exchange(sends, recvs, step, timeout)

    if rank == 6:
        transport.exchange = struck  # type: ignore[method-assign]
    begun = time.monotonic()
    with pytest.raises(CollectiveTimeoutError) as caught:
        group.all_reduce(torch.ones(100_000), algorithm="psgpu")
    return str(caught.value), time.monotonic() - begun


def test_rank_killed_within_a_call_is_named_by_all_others() -> None:
    results = run_ranks(8, _die_in_mid_call, timeout=100.0, may_die=frozenset({6}))
    for text, waited in (result for rank, result in enumerate(results) if rank != 6):
        assert "rank 6 has ended" in text and "psgpu" in text
        assert waited < TIMEOUT + 5.0
