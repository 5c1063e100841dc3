"""Optimizers of ranks that are threads and share one GPU.

`bench.collectives.one_gpu` checks what every schedule makes of CUDA tensors there.
"""

from __future__ import annotations

import pytest
import torch

from adasum import Adasum, DistributedOptimizer
from collectives import Group, run_threads

DEVICE = "cuda"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


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
