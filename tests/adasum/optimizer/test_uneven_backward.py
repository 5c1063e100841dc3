"""Steps in which some ranks' backward reaches every parameter, and that of others does not.

A rank of the first kind leaves backward with reduced gradients, one of the second kind with its
own, which step() reduces: what happens in between must not come to mean two things.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import adasum as hvd
from collectives import Group, run_threads

# Asked for, and known.
pytestmark = pytest.mark.filterwarnings("ignore:.*without optimizer.skip_synchronize")

WAYS: dict[str, dict[str, Any]] = {
    "average": {"op": hvd.Average},
    "gradient": {"op": hvd.Adasum, "method": "gradient"},
    "owners": {"op": hvd.Average, "mode": "owners"},
}
# The parameters that each rank's backward reaches: all on some rank, or on none.
USED = {"all on one rank": [(0, 1, 2, 3), (1, 2)], "all on no rank": [(0, 1), (1, 2)]}
Between = Callable[[Any, list[Parameter]], None]


def _train(way: str, used: str, between: Between, ready: bool, group: Group) -> Tensor:
    """All parameters after three steps; `between` is called between backward and the second step.

    ready: whether all gradients are reduced before that.
    """
    random = torch.Generator().manual_seed(0)
    parameters = [Parameter(torch.randn(5, 3, generator=random)) for _ in range(5)]
    named = [(f"p{i}", each) for i, each in enumerate(parameters[:4])]
    plain = torch.optim.SGD([each for _, each in named], lr=0.1)
    optimizer: Any = hvd.DistributedOptimizer(plain, named, groups=2, **WAYS[way])
    for step in range(3):
        optimizer.zero_grad()
        random.manual_seed(10 * step + group.rank)
        terms = [
            parameters[i] * torch.randn(5, 3, generator=random) for i in USED[used][group.rank]
        ]
        torch.stack(terms).sum().backward()
        if step == 1:
            if ready:
                optimizer.synchronize()
            between(optimizer, parameters)
        optimizer.step()
    return torch.cat([each.detach().view(-1) for each in parameters])


def _halve(optimizer: Any, parameters: list[Parameter]) -> None:
    for each in parameters:
        if each.grad is not None:
            each.grad.mul_(0.5)


def _replace(optimizer: Any, parameters: list[Parameter]) -> None:
    for each in parameters:
        if each.grad is not None:
            each.grad = each.grad * 0.5


def _clip(optimizer: Any, parameters: list[Parameter]) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, 0.1)


@pytest.mark.parametrize("change", [_halve, _replace, _clip])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_changed_before_a_reduction_on_one_rank_and_after_it_on_another_raise(
    way: str, change: Between
) -> None:
    with pytest.raises(hvd.OptimizerOrderError, match=r"p2 was changed between backward and step"):
        run_threads(2, partial(_train, way, "all on one rank", change, False))


@pytest.mark.parametrize("change", [_halve, _replace, _clip])
@pytest.mark.parametrize(("way", "used", "ready"), [
    *((way, "all on one rank", True) for way in WAYS),
    *((way, "all on no rank", False) for way in WAYS),
])  # fmt: skip
def test_gradients_changed_alike_on_all_ranks_leave_them_equal(
    way: str, used: str, ready: bool, change: Between
) -> None:
    first, second = run_threads(2, partial(_train, way, used, change, ready))
    assert torch.equal(first, second)


def _reorder(optimizer: Any, parameters: list[Parameter]) -> None:
    optimizer.param_groups[0]["params"].reverse()


def _freeze(optimizer: Any, parameters: list[Parameter]) -> None:
    parameters[3].requires_grad_(False)
    parameters[1].requires_grad_(False)


def _take_out(optimizer: Any, parameters: list[Parameter]) -> None:
    optimizer.param_groups[0]["params"] = parameters[:3]


def _put_in(optimizer: Any, parameters: list[Parameter]) -> None:
    optimizer.param_groups[0]["params"] = parameters


def _add_group(optimizer: Any, parameters: list[Parameter]) -> None:
    optimizer.add_param_group({"params": parameters[4:]})


@pytest.mark.parametrize("used", USED)
@pytest.mark.parametrize("change", [_reorder, _freeze, _take_out, _put_in, _add_group])
@pytest.mark.parametrize("way", WAYS)
def test_parameters_changed_before_a_step_leave_the_ranks_equal(
    way: str, change: Between, used: str
) -> None:
    late, early = (run_threads(2, partial(_train, way, used, change, r)) for r in (False, True))
    assert all(torch.equal(each, early[0]) for each in early + late)


@pytest.mark.parametrize("used", USED)
@pytest.mark.parametrize("way", WAYS)
def test_parameters_made_trainable_before_a_step_are_reduced_in_it(way: str, used: str) -> None:
    def train(group: Group) -> list[Tensor]:
        parameters = [Parameter(torch.ones(3)) for _ in range(4)]
        named = [(f"p{i}", each) for i, each in enumerate(parameters)]
        plain = torch.optim.SGD(parameters, lr=0.1)
        optimizer: Any = hvd.DistributedOptimizer(plain, named, groups=2, **WAYS[way])
        parameters[3].requires_grad_(False)
        chosen = [parameters[i] for i in USED[used][group.rank]]
        torch.stack([each.sum() for each in chosen]).sum().backward()
        parameters[3].requires_grad_(True)
        if group.rank:
            parameters[3].grad = torch.full((3,), 4.0)
        optimizer.step()
        return [each.detach() for each in parameters]

    first, second = run_threads(2, train)
    assert all(map(torch.equal, first, second))
    assert first[3].tolist() != [1.0] * 3


def test_a_batch_that_was_clipped_and_left_out_raises_nothing() -> None:
    def between(optimizer: Any, parameters: list[Parameter]) -> None:
        _clip(optimizer, parameters)
        optimizer.zero_grad()

    first, second = run_threads(2, partial(_train, "average", "all on one rank", between, False))
    assert torch.equal(first, second)
