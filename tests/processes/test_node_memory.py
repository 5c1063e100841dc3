"""All-reduces in memory that GPUs share, in one launch a rank: one process a rank, on one GPU.

Ranks on one GPU need NCCL as in test_nccl.py, and torch to let them share it.
"""

from __future__ import annotations

import os
import time

import pytest
import torch

import collectives
import kernels
from adasum import Adasum
from collectives import Average, CollectiveError, Group, Sum
from tests.adasum import definition
from tests.processes.harness import run_ranks
from tests.processes.test_nccl import ONE_GPU, SHORT, TIMEOUT, need_nccl, start

SIZES = [2, 3, 4]
NUMELS = [1, 7, 5_000, 70_001, 1_000_003]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
pytestmark = pytest.mark.gpu


def group_of(rank: int, timeout: float = TIMEOUT) -> Group:
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    transport = start(rank)
    size = transport.size
    return Group(transport, timeout=timeout, local_rank=rank, local_size=size)


def terms(size: int, numel: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=made).to(dtype) for _ in range(size)]


def sums(rank: int) -> int:
    """Direct calls and requests, in turns, on several memories; how many results were looked at."""
    group, looked = group_of(rank), 0
    memories = {dtype: group.symmetric_empty(max(NUMELS) + 8, dtype) for dtype in DTYPES}
    for seed in range(3):
        for dtype, memory in memories.items():
            for numel in NUMELS:
                mine = [x.cuda() for x in terms(group.size, numel, dtype, seed)]
                x = memory[8 : 8 + numel]
                for op, factor in ((Sum, 1.0), (Average, 1 / group.size)):
                    wanted = kernels.sum_n(mine, scale=factor)
                    memory.fill_(float("nan"))
                    x.copy_(mine[rank])
                    assert torch.equal(group.all_reduce(x, op), wanted)
                    assert memory[:8].isnan().all()
                    assert memory[8 + numel :].isnan().all()
                    request = group.all_reduce_init(x, op)
                    for _ in range(3):
                        x.copy_(mine[rank])
                        request.start()
                        assert torch.equal(request.wait(), wanted)
                    request.close()
                    looked += 1
    assert len(group.transport.node_memories) == len(DTYPES)
    group.close()
    return looked


@pytest.mark.parametrize("size", SIZES)
def test_sums_have_the_bits_of_sum_n(size: int) -> None:
    need_nccl(size)
    expected = 3 * len(DTYPES) * len(NUMELS) * 2
    assert run_ranks(size, sums, timeout=150.0) == [expected] * size


def adasums(rank: int) -> tuple[int, float]:
    """Calls and requests; how many had the bits of `direct`, and the largest error in eps."""
    group, alike, worst = group_of(rank), 0, 0.0
    for dtype in DTYPES[:3]:
        memory = group.symmetric_empty(max(NUMELS) + 8, dtype)
        for numel in NUMELS:
            segments = [0, numel // 3, numel // 3, numel // 2, numel]
            mine = terms(group.size, numel, dtype, numel)
            exact = definition.tree(mine, segments)
            x, apart = memory[8 : 8 + numel], mine[rank].cuda()
            memory.fill_(float("nan"))
            x.copy_(apart)
            first = group.all_reduce(x, Adasum, segments=segments).clone()
            assert memory[:8].isnan().all()
            assert memory[8 + numel :].isnan().all()
            request = group.all_reduce_init(x, Adasum, segments=segments)
            for _ in range(3):
                x.copy_(apart)
                request.start()
                assert torch.equal(request.wait(), first)
            request.close()
            copies = [torch.empty_like(first) for _ in range(group.size)]
            for root, copy in enumerate(copies):
                copy.copy_(first)
                group.broadcast(copy, root)
                assert torch.equal(copy, first)
            direct = group.all_reduce(apart.clone(), Adasum, segments=segments, algorithm="direct")
            alike += torch.equal(direct, first)
            error = (first.cpu().double() - exact).abs().max() / exact.abs().max()
            worst = max(worst, error.item() / torch.finfo(dtype).eps)
    group.close()
    return alike, worst


@pytest.mark.parametrize("size", SIZES)
def test_adasum_is_what_it_is_defined_to_be_on_all_ranks(size: int) -> None:
    need_nccl(size)
    for _, worst in run_ranks(size, adasums, timeout=150.0):
        # The blend rounds once; the largest element's error is at most half an eps of it.
        assert worst <= 1.0


def silent_peer(rank: int) -> tuple[str, float]:
    """Rank 1 makes the call and never launches."""
    group = group_of(rank, SHORT)
    memory = group.symmetric_empty(1000)
    memory.fill_(1.0)
    assert group.all_reduce(memory)[0].item() == 2.0
    if rank == 1:
        group.transport.launch = lambda *args: None  # type: ignore[method-assign]
    start_time = time.monotonic()
    try:
        group.all_reduce(memory)
        torch.cuda.synchronize()
        group.all_reduce(memory)
        torch.cuda.synchronize()
        group.barrier()
        group.transport.check_streams()
    except CollectiveError as error:
        return str(error), time.monotonic() - start_time
    return "", time.monotonic() - start_time


def killed_peer(rank: int) -> tuple[str, float]:
    """Rank 1 ends while rank 0's kernel waits for it; what rank 0 is told, and when it is over."""
    os.environ.update({**ONE_GPU, "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"})
    torch.cuda.set_device(rank % torch.cuda.device_count())
    # Over connections, which tell at once that a process has ended.
    group = collectives.init(transport="nccl", timeout=TIMEOUT)
    memory = group.symmetric_empty(1000)
    group.all_reduce(memory)
    torch.cuda.synchronize()
    if rank == 1:
        group.transport.launch = lambda *args: None  # type: ignore[method-assign]
        group.all_reduce(memory)
        time.sleep(1.0)
        os._exit(0)
    begun, text = time.monotonic(), ""
    try:
        group.all_reduce(memory)
        while time.monotonic() < begun + TIMEOUT / 2:
            group.transport.check_streams()
            time.sleep(0.05)
    except CollectiveError as error:
        text = str(error)
    torch.cuda.synchronize()
    return text, time.monotonic() - begun


def test_killed_peer_is_named_and_the_kernel_that_waits_for_it_ends() -> None:
    need_nccl(2)
    text, seconds = run_ranks(2, killed_peer, timeout=90.0, may_die=frozenset({1}))[0]
    assert "rank 1" in text
    # Long before the timeout.
    assert seconds < TIMEOUT / 4


def test_silent_peer_is_an_error_and_no_hang() -> None:
    need_nccl(2)
    text, seconds = run_ranks(2, silent_peer, timeout=60.0)[0]
    assert "rank 1" in text
    assert seconds < 4 * SHORT


def anywhere(rank: int) -> tuple[int, int]:
    """Calls and requests of tensors that lie anywhere; how many were right, and the memories."""
    group, right = group_of(rank), 0
    for numel in NUMELS:
        mine = [x.cuda() for x in terms(group.size, numel, torch.float32, numel)]
        apart = mine[rank].clone()
        for op, scale in ((Sum, 1.0), (Average, 1 / group.size), (Adasum, 0.0)):
            request = group.all_reduce_init(apart, op)
            for turn in range(3):
                apart.copy_(mine[rank])
                if turn:
                    request.start()
                    request.wait()
                else:
                    group.all_reduce(apart, op)
                if op is Adasum:
                    exact = definition.tree([x.cpu() for x in mine], None)
                    bound = 2 * torch.finfo(torch.float32).eps * exact.abs().max()
                    right += bool((apart.cpu() - exact).abs().max() <= bound)
                else:
                    right += torch.equal(apart, kernels.sum_n(mine, scale=scale))
            request.close()
    memories = len(group.transport.node_memories)
    group.close()
    return right, memories


@pytest.mark.parametrize("size", SIZES)
def test_tensors_anywhere_are_copied_to_one_memory(size: int) -> None:
    need_nccl(size)
    assert run_ranks(size, anywhere, timeout=150.0) == [(3 * 3 * len(NUMELS), 1)] * size
