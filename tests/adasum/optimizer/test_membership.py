"""Parameters that users put into an optimizer's groups or take from them, freeze or thaw."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import adasum as hvd
from adasum import DistributedOptimizer, OptimizerOrderError
from collectives import CollectiveMismatchError, Group, run_threads
from tests.adasum.definition import loss_of, make_model
from tests.adasum.jobs import on_ranks, ways

WAYS = ways("average", "gradient", "owners", "delta", "delta in backward")


class Scene:
    """Points and a colour, of which the points are replaced as a scene grows."""

    def __init__(self, way: str, **options: Any) -> None:
        self.points = torch.nn.Parameter(torch.linspace(-1, 1, 12).view(4, 3))
        self.colour = torch.nn.Parameter(torch.linspace(1, 2, 3))
        self.optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.Adam([{"params": [self.points]}, {"params": [self.colour]}], lr=0.1),
            [("points", self.points), ("colour", self.colour)],
            **WAYS[way],
            **options,
        )

    def backward(self, rank: int) -> None:
        (self.points @ self.colour - rank).square().mean().backward()

    def step(self, rank: int) -> None:
        self.optimizer.zero_grad()
        self.backward(rank)
        self.optimizer.step()

    def steps(self, count: int, rank: int) -> None:
        for _ in range(count):
            self.step(rank)

    def replace(self, rows: int = 5) -> None:
        old = self.points
        self.points = torch.nn.Parameter(torch.cat([old.detach(), old.detach()])[:rows])
        self.optimizer.param_groups[0]["params"][0] = self.points
        self.optimizer.state.pop(old, None)


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_replaced_on_one_rank_alone_raises_on_all(way: str, checked: bool) -> None:
    def run(group: Group) -> str:
        scene = Scene(way, check_parameters=checked)
        for _ in range(2):
            scene.step(group.rank)
        if group.rank == 1:
            scene.replace()
        with pytest.raises(CollectiveMismatchError) as caught:
            scene.steps(2, group.rank)
        return str(caught.value)

    assert len(set(run_threads(2, run))) == 1


def test_parameters_that_differ_when_they_come_are_told_apart_from_a_forgotten_broadcast() -> None:
    def run(group: Group) -> str:
        scene = Scene("average")
        scene.step(group.rank)
        scene.replace()
        with torch.no_grad():
            scene.points.add_(group.rank)
        with pytest.raises(CollectiveMismatchError) as caught:
            scene.step(group.rank)
        return str(caught.value)

    text, other = run_threads(2, run)
    assert text == other
    assert "points on ranks [1]" in text and "put into param_groups after the first step" in text


@on_ranks(2)
def test_param_group_added_after_backward_with_gradients_of_this_rank_raises(group: Group) -> None:
    model = make_model()
    first, *others = model.parameters()
    optimizer: Any = DistributedOptimizer(torch.optim.SGD(others, lr=0.1))
    loss_of(model, group.rank, 0).backward()
    optimizer.add_param_group({"params": [first]})
    with pytest.raises(OptimizerOrderError, match="added to param_groups, between backward"):
        optimizer.step()
    first.grad = None
    optimizer.step()
