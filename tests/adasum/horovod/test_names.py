"""A name may be under way once, as in Horovod."""

from __future__ import annotations

import inspect
import pickle
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import adasum as hvd
from collectives import Group, run_threads
from tests.adasum.jobs import on_ranks

TIMEOUT = 60.0
SPARSE = torch.eye(4).to_sparse()
# Each takes a name, of which it has one table with those it is listed with.
CALLS: list[list[Callable[..., Any]]] = [
    [
        partial(hvd.allreduce_async, torch.ones(4)),
        lambda name: hvd.allreduce_async_(torch.ones(4), name=name),
    ],
    [
        partial(hvd.grouped_allreduce_async, [torch.ones(4)] * 2),
        lambda name: hvd.grouped_allreduce_async_([torch.ones(4)], name=name),
    ],
    [partial(hvd.allgather_async, torch.ones(4))],
    [partial(hvd.broadcast_async, torch.ones(4), 0)],
    [partial(hvd.alltoall_async, torch.ones(4))],
    [partial(hvd.reducescatter_async, torch.ones(4))],
    [partial(hvd.sparse_allreduce_async, SPARSE, op=hvd.Sum)],
]


def test_name_that_is_under_way_is_refused_and_free_again_after_it() -> None:
    both = threading.Barrier(2)

    def run(group: Group) -> None:
        for calls in CALLS:
            for first in calls:
                for second in calls:
                    # No other rank has this call yet, so it cannot end.
                    handle = first(name="gradient") if group.rank == 0 else None
                    if group.rank == 0:
                        with pytest.raises(ValueError, match="'gradient' is in use by another"):
                            second(name="gradient")
                    both.wait(TIMEOUT)
                    handle = handle or first(name="gradient")
                    hvd.synchronize(handle)
                    hvd.synchronize(second(name="gradient"))

    run_threads(2, run)


@on_ranks(2)
def test_name_that_is_under_way_is_free_elsewhere(group: Group) -> None:
    """In another kind of call, in another process set, and where none was given."""
    pair = hvd.add_process_set([0, 1])
    handles = [calls[0](name="gradient") for calls in CALLS]
    handles += [hvd.allreduce_async(torch.ones(4), name="gradient", process_set=pair)]
    handles += [hvd.allreduce_async(torch.ones(4)) for _ in range(2)]
    for handle in handles:
        hvd.synchronize(handle)
    assert all(hvd.poll(handle) for handle in handles)


def test_functions_are_pickled_by_the_modules_that_define_them() -> None:
    for name in hvd.__all__:
        value = getattr(hvd, name)
        if inspect.isfunction(value):
            assert pickle.loads(pickle.dumps(value)) is value
