"""Graphs of an NCCL transport's messages, over fakes that keep NCCL's and CUDA's rules."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from collectives import CollectiveTimeoutError, TransportError
from collectives.transport import Message
from collectives.transport.nccl import transport as nccl
from tests.fakes.fake_cuda import full
from tests.fakes.nccl_machine import Machine, all_good, swap, told

NUMEL = 5
Launch = Callable[[str, float], None]


def _swaps(machine: Machine, transport: nccl.NcclTransport, mine: Any, got: Any) -> None:
    """Send `mine` and add what comes, three times: each doubles the sum of both ranks' values."""
    for step in range(3):
        swap(transport, mine, got, f"step {step}")
        machine.put(lambda: mine.add_(got.as_subclass(torch.Tensor)), 0.002)


def _captured(machine: Machine, transport: nccl.NcclTransport) -> Launch:
    """Those of two ranks that are connected, as a graph."""
    mine, got = full(NUMEL, 1.0), full(NUMEL, 0.0)
    swap(transport, mine, got, "the first message connects")
    return transport.capture(lambda: _swaps(machine, transport, mine, got))


def test_a_launch_moves_what_is_there_then_between_other_messages(machine: Machine) -> None:
    """Messages before and behind a launch, of the caller's or of another stream, keep the order."""

    def work(transport: nccl.NcclTransport) -> None:
        mine, got, other = full(NUMEL, 0.0), full(NUMEL, 0.0), full(NUMEL, 0.0)
        swap(transport, mine, got, "the first message connects")
        launch = transport.capture(lambda: _swaps(machine, transport, mine, got))
        assert machine.read(mine)[0] == 0.0, "a capture does nothing"
        for turn in range(4):
            mine.fill_(1.0 + turn + transport.rank)
            launch("a launch", 10.0)
            # From another stream, which waits for nothing of the launch's.
            with machine.cuda.stream(machine.cuda.Stream()):
                swap(transport, mine, other, "a message behind it")
                assert machine.read(other)[0] == 4 * (3.0 + 2 * turn)
            assert machine.read(mine)[0] == 4 * (3.0 + 2 * turn)
        transport.check_streams()

    all_good(machine.run(2, work))


def test_graphs_that_are_kept_end_before_the_communicators(machine: Machine) -> None:
    kept = []

    def work(transport: nccl.NcclTransport) -> None:
        kept.append(_captured(machine, transport))
        kept[-1]("a launch", 10.0)

    all_good(machine.run(2, work))
    assert sorted(machine.nccl.destroyed) == [0, 1]
    with pytest.raises(TransportError, match="this NCCL transport was closed"):
        kept[0]("another launch", 10.0)


def test_a_launch_is_a_step_that_is_watched(machine: Machine) -> None:
    """A peer that never launches is a timeout, which names it and the call; all is over then."""

    def work(transport: nccl.NcclTransport) -> Any:
        launch = _captured(machine, transport)
        if transport.rank == 1:
            done.wait(20.0)
            return None
        launch("all_reduce 'a bucket' (call 7)", 0.3)
        error = told(transport.check_streams)
        with pytest.raises(TransportError, match=r"unusable since .*call 7"):
            launch("the next one", 10.0)
        done.set()
        return error

    done = threading.Event()
    error, _ = machine.run(2, work)
    assert isinstance(error, CollectiveTimeoutError)
    assert "no answer from rank 1 in all_reduce 'a bucket' (call 7)" in str(error)


def test_an_abort_from_another_thread_ends_a_launch(machine: Machine) -> None:
    def work(transport: nccl.NcclTransport) -> None:
        launch = _captured(machine, transport)
        if transport.rank == 0:
            launch("a launch", 20.0)
            began = time.monotonic()
            transport.interrupt("the user is done")
            assert time.monotonic() - began < 5.0
            with pytest.raises(TransportError, match="unusable since the user is done"):
                launch("the next one", 10.0)

    machine.run(2, work)
    assert machine.nccl.aborted


def test_a_capture_that_fails_raises_why_and_leaves_the_streams_usable(machine: Machine) -> None:
    def work(transport: nccl.NcclTransport) -> float:
        mine, got = full(NUMEL, 1.0), full(NUMEL, 0.0)
        swap(transport, mine, got, "the first message connects")

        def broken() -> None:
            # Posted ahead, and not waited for.
            peer = 1 - transport.rank
            transport.post([Message(peer, mine)], [Message(peer, got)], "a post", 10.0)
            raise RuntimeError("out of memory")

        with pytest.raises(RuntimeError, match="out of memory"):
            transport.capture(broken)
        assert not machine.cuda.is_current_stream_capturing()
        swap(transport, mine, got, "behind it")
        return machine.read(got)[0].item()

    assert all_good(machine.run(2, work)) == [1.0, 1.0]


def test_a_capture_that_cuda_has_ended_is_an_error_of_the_group(machine: Machine) -> None:
    """torch does not know that it has ended, and would keep memory for it for ever."""

    def work(transport: nccl.NcclTransport) -> None:
        def invalidated() -> None:
            graph = machine.cuda.current_stream().capture
            assert graph is not None
            # As another thread's synchronize() does.
            graph.counts[machine.cuda.Stream()] = 1

        with pytest.raises(TransportError, match=r"ended the capture .* ADASUM_CUDA_GRAPHS=0"):
            transport.capture(invalidated)

    all_good(machine.run(1, work))
