"""CUDA tensors through torch's own NCCL, which a group takes unless NCCL was asked for.

Several ranks share one GPU where NCCL is 2.30 or newer, as in test_nccl.py.
"""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

import collectives
from adasum import Adasum
from collectives import CollectiveTimeoutError, Sum
from collectives.transport import GlooTransport, Message

from .harness import run_ranks
from .test_nccl import ONE_GPU, why_not

TIMEOUT = 60.0
SHORT = 3.0


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
    if reason := why_not(2):
        pytest.skip(reason)
    # The coefficients of two equal gradients are exactly a half.
    assert run_ranks(2, sums, timeout=120.0) == [[[3.0], [1.0]]] * 2


def silent_peer(rank: int) -> tuple[str, float]:
    """Rank 1 never posts: what rank 0 is told and after how long."""
    device = _use_a_gpu(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    assert dist.group.WORLD is not None
    transport = GlooTransport(dist.group.WORLD)
    message = Message(1 - rank, torch.ones(1 << 16, device=device))
    got = Message(1 - rank, torch.empty(1 << 16, device=device))
    transport.exchange([message], [got], "step 0", TIMEOUT)
    if rank == 1:
        time.sleep(SHORT + 6.0)
        return "", 0.0
    begin = time.monotonic()
    with pytest.raises(CollectiveTimeoutError) as caught:
        transport.exchange([message], [got], "step 1", SHORT)
    return str(caught.value), time.monotonic() - begin


def test_a_silent_peer() -> None:
    if reason := why_not(2):
        pytest.skip(reason)
    text, waited = run_ranks(2, silent_peer, timeout=120.0)[0]
    assert "rank 0 got no answer from rank 1 in step 1" in text
    assert SHORT <= waited <= SHORT + 5.0
