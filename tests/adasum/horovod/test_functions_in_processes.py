"""The checks that other tests make in threads, made in processes, with join."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import adasum as hvd
from collectives import default_group
from tests.adasum.horovod.test_alltoall_and_reducescatter import everything
from tests.adasum.horovod.test_autograd import linear_functions
from tests.adasum.test_sparse import every_case
from tests.processes.harness import run_ranks


def joined(rank: int, size: int) -> None:
    """A rank that has joined sends nothing and gets nothing."""
    if rank:
        rows, counts = hvd.alltoall(torch.full((size - 1,), rank), [0, *[1] * (size - 1)])
        assert counts.tolist() == [0, *[1] * (size - 1)]
        assert rows.tolist() == list(range(1, size))
        total = hvd.reducescatter(torch.ones(size), op=hvd.Sum)
        assert total.tolist() == [size - 1.0]
    assert hvd.join() == size - 1


def process(rank: int, size: int) -> list[Any]:
    hvd.init(timeout=60.0)
    everything(rank, size)
    bits = every_case(rank)
    if size < 4:
        linear_functions(default_group())
    joined(rank, size)
    built = [hvd.gloo_built(), hvd.gloo_enabled(), hvd.mpi_built(), hvd.mpi_enabled()]
    hvd.shutdown()
    return [bits, built]


@pytest.mark.parametrize("size", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_every_function_in_processes_is_right(size: int) -> None:
    first, *others = run_ranks(size, process, size)
    assert first[1] == [True, True, False, False]
    assert all(other == first for other in others)


def elsewhere(rank: int) -> list[Any]:
    """Run functions under a default device that the transport refuses, as gloo does GPUs."""
    hvd.init(timeout=60.0)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.sum().backward()
    optimizer.step()
    places = torch.tensor([[rank]])
    gradient = torch.sparse_coo_tensor(places, torch.ones(1), (2,), check_invariants=True)
    with torch.device("meta"):
        said = [hvd.broadcast_object({"rank": rank}, 1), hvd.allgather_object(rank)]
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        total = hvd.sparse_allreduce_async(gradient, name="sparse", op=hvd.Sum)()
        said.append(hvd.alltoall(torch.ones(2, device="cpu"), [1, 1])[1].tolist())
    said.append(total.to_dense().tolist())
    hvd.shutdown()
    return said


def test_functions_under_another_default_device_work() -> None:
    assert run_ranks(2, elsewhere) == [[{"rank": 1}, [0, 1], [1, 1], [1.0, 1.0]]] * 2
