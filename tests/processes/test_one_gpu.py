"""Ranks as threads that share one GPU: every schedule on CUDA tensors, and no NCCL."""

from __future__ import annotations

from concurrent import futures

import pytest
import torch

from adasum import Adasum, DistributedOptimizer
from collectives import Group, Reducer, Sum, run_threads
from collectives.execution.executor import CallContext, Workspace, execute
from collectives.schedules import halving, ring
from collectives.transport import ThreadWorld
from tests.adasum import definition

NUMEL = 100_003
SIZES = [2, 3, 4]
DTYPES = [torch.float32, torch.bfloat16]
DEVICE = "cuda"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def reduced(make, op: Reducer, terms: list[torch.Tensor]) -> list[torch.Tensor]:
    """Every rank's answer, on the CPU."""
    world = ThreadWorld(len(terms))

    def rank_main(rank: int) -> torch.Tensor:
        buffer = terms[rank].to(DEVICE, copy=True)
        transport = world.transport(rank)
        try:
            execute(
                make(len(terms)),
                buffer,
                op,
                CallContext(transport, "a test", 100.0, Workspace()),
                segments=(0, 5, 40_000, NUMEL),
            )
        finally:
            transport.close()
        return buffer.cpu()

    with futures.ThreadPoolExecutor(len(terms)) as pool:
        return list(pool.map(rank_main, range(len(terms))))


def inputs(size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    return [torch.randn(NUMEL, generator=generator).to(dtype) for _ in range(size)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [ring.all_reduce, halving.all_reduce, halving.doubling])
def test_sum(make, dtype, size):
    terms = inputs(size, dtype)
    answers = reduced(make, Sum, terms)
    stacked = torch.stack(terms).double()
    # n - 1 additions, each rounding to the dtype once.
    bound = (size - 1) * torch.finfo(dtype).eps * stacked.abs().sum(0)
    assert ((answers[0].double() - stacked.sum(0)).abs() <= bound).all()
    assert all(torch.equal(answer, answers[0]) for answer in answers)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [halving.all_reduce, halving.doubling])
def test_adasum_of_segments(make, dtype, size):
    terms = inputs(size, dtype)
    answers = reduced(make, Adasum, terms)
    for low, high in ((0, 5), (5, 40_000), (40_000, NUMEL)):
        expected = definition.tree([term[low:high] for term in terms])
        error = definition.relative_error(answers[0][low:high], expected)
        assert error <= definition.tolerance(dtype)
    assert all(torch.equal(answer, answers[0]) for answer in answers)


def test_optimizers_that_reduce_in_backward_are_refused_and_those_that_do_in_steps_run():
    def train(group: Group) -> torch.Tensor:
        parameter = torch.nn.Parameter(torch.ones(8, device=DEVICE))
        plain, named = torch.optim.SGD([parameter], lr=0.1), [("p", parameter)]
        with pytest.raises(ValueError, match="share autograd's one thread of a GPU"):
            DistributedOptimizer(plain, named)
        optimizer = DistributedOptimizer(plain, named, op=Adasum)
        for _ in range(2):
            optimizer.zero_grad()
            (parameter * (group.rank + 1.0)).sum().backward()
            optimizer.step()
        return parameter.detach().cpu()

    # Parallel steps are averaged.
    for answer in run_threads(2, train):
        torch.testing.assert_close(answer, torch.full((8,), 0.7))
