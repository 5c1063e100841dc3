"""The pool of requests that are started at every step. Ranks are threads."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import numpy as np
import torch

from adasum import Adasum, Sum
from adasum.request_pool import RequestPool, StartedRequest
from collectives import Group, Reducer, run_threads
from collectives.requests import Request
from tests.adasum.jobs import on_ranks

NUMEL = 1000


def start(
    pool: RequestPool, group: Group, buffer: torch.Tensor, op: Reducer = Sum, name: str = "bucket"
) -> StartedRequest:
    make = partial(
        group.all_reduce_init, buffer, op, name=name, segments=[0, 10, NUMEL], negotiate=False
    )
    return pool.start(group, (op.name, name), make, buffer)


def num_requests() -> int:
    gc.collect()
    return sum(type(each) is Request for each in gc.get_objects())


@on_ranks(2)
def test_pool_after_wait_holds_no_buffer(group: Group) -> None:
    pool = RequestPool()
    for _ in range(2):
        memory = np.ones(NUMEL, np.float32)
        freed, buffer = weakref.ref(memory), torch.from_numpy(memory)
        reduction = start(pool, group, buffer, Adasum)
        reduction.wait()
        del memory, buffer, reduction
        # The communication thread may still be on its way out of that call, not of the next.
        group.barrier()
        gc.collect()
        assert freed() is None


@on_ranks(2)
def test_pool_with_two_equal_reductions_in_flight_keeps_them_apart(group: Group) -> None:
    pool = RequestPool()
    for _ in range(2):
        buffers = [torch.full((NUMEL,), float(i)) for i in range(2)]
        for reduction in [start(pool, group, buffer) for buffer in buffers]:
            reduction.wait()
        assert [buffer[0].item() for buffer in buffers] == [0.0, 2.0]


def test_pool_of_a_closed_group_is_freed() -> None:
    pool = RequestPool()
    before = num_requests()

    def run(group: Group) -> None:
        start(pool, group, torch.ones(NUMEL)).wait()

    run_threads(1, run)
    assert num_requests() == before
