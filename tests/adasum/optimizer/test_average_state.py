"""The average of the optimizer's state; trainings.py resumes from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import adasum as hvd
import collectives
from adasum import DistributedOptimizer
from tests.adasum.definition import OPTIMIZERS, loss_of, make_model


@pytest.mark.parametrize("size", [2, 3, 4])
def test_average_state_of_equal_shapes_is_the_mean_over_ranks(size: int) -> None:
    def job(group: collectives.Group) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        model = make_model()
        optimizer: Any = DistributedOptimizer(OPTIMIZERS["adam"](model.parameters()), op=hvd.Adasum)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, group.rank, step).backward()
            optimizer.step()

        def state() -> list[torch.Tensor]:
            return [
                optimizer.state[p][key].clone()
                for p in model.parameters()
                for key in ("exp_avg", "exp_avg_sq", "step")
            ]

        before = state()
        optimizer.average_state()
        return before, state()

    results = collectives.run_threads(size, job)
    assert not torch.equal(results[0][0][0], results[1][0][0])
    for i, after in enumerate(results[0][1]):
        mean = torch.stack([before[i] for before, _ in results]).mean(0)
        # A sum of n terms rounds at most n times, each by half an eps of terms of either sign.
        scale = torch.stack([before[i].abs() for before, _ in results]).sum(0)
        assert ((after - mean).abs() <= size * torch.finfo(mean.dtype).eps * scale).all()
        assert all(torch.equal(other[i], after) for _, other in results)


def test_average_state_where_a_rank_has_none_gives_it_the_mean() -> None:
    def job(group: collectives.Group) -> torch.Tensor:
        parameter = torch.nn.Parameter(torch.zeros(3))
        optimizer: Any = DistributedOptimizer(
            torch.optim.SGD([parameter], lr=1.0, momentum=0.9), op=hvd.Adasum
        )
        if group.rank != 1:
            (parameter * (group.rank + 1.0)).sum().backward()
        optimizer.step()
        optimizer.average_state()
        return optimizer.state[parameter]["momentum_buffer"]

    for state in collectives.run_threads(3, job):
        assert torch.equal(state, torch.full((3,), (1.0 + 3.0) / 2))


def test_average_state_of_different_shapes_raises_on_every_rank() -> None:
    def job(group: collectives.Group) -> str:
        parameter = torch.nn.Parameter(torch.zeros(3))
        optimizer: Any = DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), op=hvd.Adasum)
        optimizer.state[parameter]["own"] = torch.zeros(2 + group.rank)
        with pytest.raises(ValueError, match="average_state: own of parameter 0") as error:
            optimizer.average_state()
        return str(error.value)

    first, second = collectives.run_threads(2, job)
    assert first == second
