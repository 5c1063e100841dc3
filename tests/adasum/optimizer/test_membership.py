"""Parameters that users put into an optimizer's groups, or take from them, by hand."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import adasum as hvd
from collectives import CollectiveMismatchError, Group, run_threads

WAYS: dict[str, dict[str, Any]] = {
    "average": {"op": hvd.Average},
    "gradient": {"op": hvd.Adasum, "method": "gradient"},
    "owners": {"op": hvd.Average, "mode": "owners"},
    "delta": {"op": hvd.Adasum},
    "delta in backward": {"op": hvd.Adasum, "step_in_backward": True},
}


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


def everywhere(group: Group, tensor: Tensor, name: str) -> bool:
    rows = hvd.allgather(tensor.detach().reshape(1, -1), name=name)
    return all(torch.equal(row, rows[0]) for row in rows)


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


@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_replaced_between_backward_and_step_is_stepped_from_then_on(way: str) -> None:
    """As densification does it; what has no gradient yet is not stepped."""

    def run(group: Group) -> None:
        scene = Scene(way, groups=2)
        for number in range(4):
            scene.optimizer.zero_grad()
            scene.backward(group.rank)
            if number == 2:
                scene.replace()
            before = scene.points.detach().clone()
            scene.optimizer.step()
            assert torch.equal(before, scene.points) == (number == 2)
        assert everywhere(group, scene.points, "points")
        assert everywhere(group, scene.colour, "colour")
        assert set(scene.optimizer._parameter_names.values()) == {"points", "colour"}

    run_threads(3, run)


@pytest.mark.parametrize("way", WAYS)
def test_parameters_replaced_many_times_leave_nothing_behind(way: str) -> None:
    def run(group: Group) -> None:
        scene = Scene(way)
        gone: list[weakref.ref[Tensor]] = []
        for number in range(6):
            scene.step(group.rank)
            gone.append(weakref.ref(scene.points))
            scene.replace(5 + number)
        scene.step(group.rank)
        gc.collect()
        assert [each() is None for each in gone] == [True] * 6
        assert len(scene.optimizer._adasum.backward.buckets) <= 2

    run_threads(2, run)


@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_taken_out_and_put_back_before_the_step_is_reduced(way: str) -> None:
    def run(group: Group) -> None:
        scene = Scene(way)
        scene.step(group.rank)
        for number in range(2):
            scene.optimizer.zero_grad()
            params = scene.optimizer.param_groups[0]["params"]
            params.clear()
            if number:
                # Noticed in between.
                scene.optimizer.zero_grad()
            params.append(scene.points)
            scene.backward(group.rank)
            scene.optimizer.step()
        assert everywhere(group, scene.points, "points")

    run_threads(2, run)


def test_parameters_that_come_with_a_state_are_owned_where_it_is() -> None:
    def run(group: Group) -> None:
        scene = Scene("owners")
        scene.step(group.rank)
        owners = scene.optimizer._adasum.owners
        owner = owners[scene.points]
        for _ in range(3):
            old = scene.points
            state = scene.optimizer.state.get(old)
            scene.replace(len(old) + 1)
            if state is not None:
                assert group.rank == owner
                wide = {
                    key: torch.cat([value, value[:1]]) if value.dim() else value
                    for key, value in state.items()
                }
                scene.optimizer.state[scene.points] = wide
            scene.step(group.rank)
            assert owners[scene.points] == owner
            assert (scene.points in scene.optimizer.state) == (group.rank == owner)
        whole = scene.optimizer.consolidate_state_dict(to=None)
        assert whole is None
        assert scene.optimizer.state_dict()["state"][0]["step"].item() == 4.0

    run_threads(2, run)


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
