"""Persistent requests: made once, started any number of times, over every transport."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from collectives import (
    CollectiveError,
    Group,
    TransportError,
)
from collectives.reducers import SumReducer
from tests.collectives.consistency.ranks import everywhere, run, start_and_wait
from tests.collectives.transport.thread_ranks import TIMEOUT


@everywhere
def test_requests_started_in_a_row_end_without_wait(way: str) -> None:
    def job(group: Group) -> None:
        tensors = [torch.full((count,), float(group.rank)) for count in (3, 100_000, 7, 7)]
        requests = [group.all_reduce_init(tensor) for tensor in tensors]
        for request in requests:
            request.start()
        deadline = time.monotonic() + TIMEOUT
        while not all(request.is_completed() for request in requests):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        for request, tensor in zip(requests, tensors, strict=True):
            request.wait()
            assert bool((tensor == 3.0).all())

    run(way, 3, job)


def test_start_with_a_buffer_that_overlaps_out_raises_and_starts_nothing() -> None:
    def job(group: Group) -> None:
        memory = torch.ones(12)
        request = group.reduce_scatter_init(torch.ones(12), out=memory[:4])
        with pytest.raises(ValueError, match=r"tensor .*out"):
            request.start(memory)
        request.start()
        assert torch.equal(request.wait(), torch.full((4,), 3.0))
        assert memory.tolist() == [3.0] * 4 + [1.0] * 8

    run("threads", 3, job)


@everywhere
def test_failure_in_flight_is_raised_by_wait(way: str) -> None:
    class Failing(SumReducer):
        def reduce(self, operands: Any) -> None:
            raise OverflowError("the cause")

    def job(group: Group) -> None:
        failing = group.all_reduce_init(torch.ones(4), Failing())
        other = group.all_reduce_init(torch.ones(4))
        failing.start()
        # A rank that the other one tells first raises that.
        with pytest.raises((OverflowError, CollectiveError)):
            failing.wait()
        with pytest.raises(TransportError, match="unusable since an earlier failure"):
            start_and_wait(other)

    run(way, 2, job, timeout=1.0)


def _shrunk(tensor: torch.Tensor) -> None:
    tensor.resize_(5)


MOVES: dict[str, Callable[[torch.Tensor], object]] = {
    "set_": lambda tensor: tensor.set_(torch.ones(8)),  # type: ignore[call-overload]
    "data": lambda tensor: setattr(tensor, "data", torch.ones(8)),
    "double": lambda tensor: setattr(tensor, "data", tensor.data.double()),
    "resize_": lambda tensor: tensor.resize_(4096),
    "shrunk": _shrunk,
    "strides": lambda tensor: setattr(tensor, "data", tensor.data.as_strided((8,), (0,))),
    "freed": lambda tensor: tensor.untyped_storage().resize_(0),
}


@everywhere
@pytest.mark.parametrize("move", MOVES)
def test_start_of_a_request_whose_buffer_was_moved_raises_and_starts_nothing(
    way: str, move: str
) -> None:
    """On one rank, whose next start is the one that the other waits for."""

    def job(group: Group) -> list[float]:
        flat = torch.ones(8)
        request = group.all_reduce_init(flat)
        assert start_and_wait(request) is flat
        if group.rank == 1:
            MOVES[move](flat)
            with pytest.raises(
                ValueError, match=r"other memory than when it was passed.*start\(\)"
            ):
                request.start()
        flat = torch.full((8,), group.rank + 1.0)
        request.start(flat)
        assert request.wait() is flat
        return flat.tolist()

    assert run(way, 2, job) == [[3.0] * 8] * 2
