"""Training steps, optimizers and reductions that torch.compile reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import adasum as hvd
import collectives
from tests.adasum.jobs import WAYS
from tests.processes.harness import run_ranks

STEPS = 4
# Compiled forward and backward passes may round otherwise than eager ones, once an operation, and
# the steps, of less than the parameters' size, carry that on.
TOLERANCE = 1e3 * STEPS * torch.finfo(torch.float32).eps


def train(way: str, compiled: Callable[[Any], Any], whole: bool, by_graph: bool = False) -> Tensor:
    """Return the parameters and the ranks' mean losses after some steps.

    whole: compile the whole step, or the optimizer's alone. by_graph: use compiled autograd.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.01), model.named_parameters(), **WAYS[way]
    )
    optimizer_step = optimizer.step if whole else compiled(optimizer.step)
    group = collectives.default_group()

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer_step()
        mean = hvd.allreduce(loss.detach(), name="loss")
        total = group.all_reduce(loss.detach().reshape(1).clone(), name="total of losses")
        return mean, total

    run = compiled(step) if whole else step
    generator = torch.Generator().manual_seed(hvd.rank())
    context = (
        torch._dynamo.utils.maybe_enable_compiled_autograd(True, fullgraph=False)
        if by_graph
        else nullcontext()
    )
    losses = []
    with context:
        for _ in range(STEPS):
            losses += run(torch.randn(3, 4, generator=generator))
    parts = [*(p.detach() for p in model.parameters()), *losses]
    return torch.cat([each.reshape(-1) for each in parts])


def job(
    rank: int, ways: list[str], backend: str, wholes: Sequence[bool], by_graph: bool = False
) -> list[float]:
    """Return how far each way's compiled steps are from its eager ones."""
    hvd.init(timeout=120.0)
    errors = []
    for way in ways:
        eager = train(way, lambda function: function, True)
        for whole in wholes:
            got = train(way, lambda f: torch.compile(f, backend=backend), whole, by_graph)
            errors.append(float((got - eager).abs().max()))
    hvd.shutdown()
    return errors


AT_NIGHT = [
    pytest.param(*each, marks=pytest.mark.slow) for each in [("average", False), ("delta", True)]
]


@pytest.mark.parametrize(("way", "whole"), [("average", True), ("delta", False), *AT_NIGHT])
def test_a_compiled_step_is_the_eager_one(way: str, whole: bool) -> None:
    """The whole step compiled, or only the optimizer's."""
    for errors in run_ranks(2, job, [way], "aot_eager", [whole], timeout=150.0):
        assert max(errors) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("by_graph", [False, True], ids=["backward", "compiled autograd"])
@pytest.mark.parametrize(
    "ways", [["average", "gradient", "delta"], ["owners", "delta in backward"]]
)
def test_a_step_compiled_by_inductor_is_the_eager_one(ways: list[str], by_graph: bool) -> None:
    wholes = [True] if by_graph else [False, True]
    for errors in run_ranks(2, job, ways, "inductor", wholes, by_graph, timeout=500.0):
        assert max(errors) <= TOLERANCE
