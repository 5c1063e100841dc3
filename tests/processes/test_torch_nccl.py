"""CUDA tensors through torch's own NCCL, which a group takes unless NCCL was asked for.

Several ranks share one GPU where NCCL is 2.30 or newer, as in test_nccl.py.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

import collectives
from adasum import Adasum, DistributedOptimizer, OptimizerOrderError
from collectives import Sum
from collectives.transport import GlooTransport, NcclTransport
from collectives.transport.nccl.backend import TorchBackend
from tests.processes.harness import run_ranks
from tests.processes.test_nccl import ONE_GPU, TIMEOUT, check_told, need_nccl, told_of_a_silent_peer

pytestmark = pytest.mark.gpu


def _use_a_gpu(rank: int) -> torch.device:
    if torch.cuda.device_count() < int(os.environ["WORLD_SIZE"]):
        os.environ.update(ONE_GPU)
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def sums(rank: int) -> list[list[float]]:
    """Of a group as init makes it: a sum, and Adasum of what is parallel, which averages."""
    device = _use_a_gpu(rank)
    group = collectives.init(timeout=TIMEOUT)
    try:
        mine = torch.full((1001,), float(rank + 1), device=device)
        found = [group.all_reduce(mine, Sum, algorithm="rd").unique()]
        mine = torch.full((1001,), 1.0, device=device)
        found.append(group.all_reduce(mine, Adasum).unique())
        return [values.tolist() for values in found]
    finally:
        collectives.shutdown()


def test_sums() -> None:
    need_nccl(2)
    # The coefficients of two equal gradients are exactly a half.
    assert run_ranks(2, sums, timeout=120.0) == [[[3.0], [1.0]]] * 2


def owners(rank: int) -> str:
    """What a step says where backward has added to a gradient that was reduced onto its owner."""
    device = _use_a_gpu(rank)
    collectives.init(timeout=TIMEOUT)
    # Each rank owns one.
    parameters = [torch.nn.Parameter(torch.ones(8, device=device)) for _ in range(2)]
    named = [(f"p{i}", parameter) for i, parameter in enumerate(parameters)]
    optimizer = DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), named, mode="owners")
    try:
        for step in range(2):
            torch.stack([parameter.sum() for parameter in parameters]).sum().backward()
            if step:
                with pytest.raises(OptimizerOrderError) as caught:
                    optimizer.step()
            else:
                optimizer.step()
        return str(caught.value)
    finally:
        collectives.shutdown()


def test_owners_refuse_gradients_that_backward_has_added_to() -> None:
    need_nccl(2)
    said = run_ranks(2, owners, timeout=120.0)
    assert all("backward has added to the gradient of p" in each for each in said)


def shorts(rank: int) -> list[list[int]]:
    """Collectives of a dtype that torch's NCCL does not know."""
    device = _use_a_gpu(rank)
    group = collectives.init(timeout=TIMEOUT)
    try:
        mine = torch.full((1001,), rank + 1, dtype=torch.int16, device=device)
        gathered, total = group.all_gather(mine), group.all_reduce(mine, Sum)
        return [total.unique().tolist(), gathered.unique().tolist()]
    finally:
        collectives.shutdown()


def test_dtypes_that_torchs_nccl_does_not_know() -> None:
    need_nccl(2)
    assert run_ranks(2, shorts, timeout=120.0) == [[[3], [1, 2]]] * 2


def silent_peer(rank: int) -> tuple[str, float]:
    device = _use_a_gpu(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    assert dist.group.WORLD is not None
    backend = TorchBackend(dist.group.WORLD)
    transport = NcclTransport(GlooTransport(dist.group.WORLD), backend, timeout=TIMEOUT)
    return told_of_a_silent_peer(transport, device)


def test_a_silent_peer() -> None:
    need_nccl(2)
    check_told(run_ranks(2, silent_peer, timeout=120.0)[0])
