"""Steps in which some ranks' backward reaches every parameter, and that of others does not.

A rank of the first kind leaves backward with reduced gradients, one of the second kind with its
own, which step() reduces: what happens in between must not come to mean two things.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
def test_parameters_made_trainable_before_a_step_count_from_the_next(way: str, used: str) -> None:
    def train(group: Group) -> list[Tensor]:
        parameters = [Parameter(torch.ones(3)) for _ in range(4)]
        named = [(f"p{i}", each) for i, each in enumerate(parameters)]
        plain = torch.optim.SGD(parameters, lr=0.1)
        optimizer: Any = hvd.DistributedOptimizer(plain, named, groups=2, **WAYS[way])
        parameters[3].requires_grad_(False)
        for _ in range(2):
            chosen = [parameters[i] for i in USED[used][group.rank]]
            torch.stack([each.sum() for each in chosen]).sum().backward()
            parameters[3].requires_grad_(True)
            optimizer.step()
            optimizer.zero_grad()
        return [each.detach() for each in parameters]

    first, second = run_threads(2, train)
    assert all(map(torch.equal, first, second))
    # Once, and only if a rank uses it.
    assert (first[3].tolist() != [1.0] * 3) == (used == "all on one rank")


def test_a_batch_that_was_clipped_and_left_out_raises_nothing() -> None:
    def between(optimizer: Any, parameters: list[Parameter]) -> None:
        _clip(optimizer, parameters)
        optimizer.zero_grad()

    first, second = run_threads(2, partial(_train, "average", "all on one rank", between, False))
    assert torch.equal(first, second)


def _simple(**options: Any) -> tuple[list[Parameter], Any]:
    parameters = [Parameter(torch.ones(3)) for _ in range(5)]
    named = [(f"p{i}", each) for i, each in enumerate(parameters[:4])]
    plain = torch.optim.SGD(parameters[:4], lr=0.1)
    return parameters, hvd.DistributedOptimizer(plain, named, groups=2, **options)


def _require_equal(train: Callable[[Group], Tensor]) -> None:
    first, second = run_threads(2, train)
    assert torch.equal(first, second)


def _backward(parameters: list[Parameter], used: Sequence[int], group: Group) -> None:
    if used:
        terms = [parameters[i] * (group.rank + 1.0) for i in used]
        torch.stack(terms).sum().backward()


def test_gradients_that_a_tree_adds_are_not_changed_by_anybody() -> None:
    def train(group: Group) -> Tensor:
        options = {"op": hvd.Average, "order": "tree", "backward_passes_per_step": 2}
        parameters, optimizer = _simple(**options)
        for _ in range(2):
            _backward(parameters, [(0, 1, 2, 3), (1, 2)][group.rank], group)
        optimizer.step()
        return torch.stack([each.detach() for each in parameters])

    _require_equal(train)


@pytest.mark.parametrize("way", WAYS)
def test_parameters_frozen_for_a_backward_of_several_are_reduced(way: str) -> None:
    def train(group: Group) -> Tensor:
        parameters, optimizer = _simple(**WAYS[way])
        _backward(parameters, [(0, 1, 2, 3), (0,)][group.rank], group)
        parameters[1].requires_grad_(False)
        _backward(parameters, [(), (3,)][group.rank], group)
        parameters[1].requires_grad_(True)
        optimizer.step()
        return torch.stack([each.detach() for each in parameters])

    _require_equal(train)


@pytest.mark.parametrize("change", [_take_out, _put_in])
@pytest.mark.parametrize("way", WAYS)
def test_parameters_changed_where_one_rank_has_begun_the_step_are_told(
    way: str, change: Between
) -> None:
    """There they count from the next step, on a rank without a backward at once."""

    def train(group: Group) -> None:
        parameters, optimizer = _simple(**WAYS[way])
        _backward(parameters, (0, 1, 2, 3), group)
        optimizer.step()
        optimizer.zero_grad()
        _backward(parameters, [(1, 2), ()][group.rank], group)
        change(optimizer, parameters)
        optimizer.step()

    with pytest.raises(hvd.CollectiveMismatchError):
        run_threads(2, train)
