"""Parameters frozen, made trainable and added between steps, passes and calls of one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import adasum as hvd
import collectives
from adasum import DistributedOptimizer, OptimizerOrderError
from tests.adasum.definition import flat, loss_of, make_model, relative_error, trajectory_tolerance

SIZE = 2
Train = Callable[[torch.nn.Module, Any, Callable[[int, int], None]], None]


def _equals_one_process(train: Train, passes: int = 1) -> None:
    """`train(model, optimizer, backward(step, turn))` on ranks, and on one that has all batches."""

    def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def run(group: collectives.Group) -> torch.Tensor:
        model = make_model()
        optimizer = DistributedOptimizer(
            sgd(model), op=hvd.Sum, backward_passes_per_step=passes, groups=1
        )
        train(model, optimizer, lambda *batch: loss_of(model, group.rank, *batch).backward())
        return flat(model)

    alone = make_model()

    def backward(*batch: int) -> None:
        torch.stack([loss_of(alone, rank, *batch) for rank in range(SIZE)]).sum().backward()

    train(alone, sgd(alone), backward)
    for result in collectives.run_threads(SIZE, run):
        assert relative_error(result, flat(alone)) <= trajectory_tolerance(3)


def test_parameter_unfrozen_before_backward_is_reduced() -> None:
    """The bucket waits for it, though it was frozen when the step began."""

    def train(model: Any, optimizer: Any, backward: Callable[[int, int], None]) -> None:
        backward(0, 0)
        optimizer.step()
        for step in (1, 2):
            model[0].requires_grad_(False)
            optimizer.zero_grad()
            model[0].requires_grad_(True)
            backward(step, 0)
            optimizer.step()

    _equals_one_process(train)


def test_parameter_frozen_before_backward_leaves_the_others_final() -> None:
    def run(group: collectives.Group) -> None:
        model = make_model()
        optimizer: Any = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        optimizer.zero_grad()
        model[0].requires_grad_(False)
        loss_of(model, group.rank, 0).backward()
        (total,) = hvd.grouped_allgather([model[2].weight.grad.reshape(1, -1)])
        assert torch.equal(total[0], total[1])
        optimizer.step()

    collectives.run_threads(SIZE, run)


@pytest.mark.parametrize("trainable", [True, False])
def test_parameter_frozen_or_unfrozen_between_passes_keeps_ranks_equal(trainable: bool) -> None:
    """What one pass left is reduced, also of a parameter that is frozen by then."""

    def train(model: Any, optimizer: Any, backward: Callable[[int, int], None]) -> None:
        model[0].requires_grad_(trainable)
        optimizer.zero_grad()
        backward(0, 0)
        model[0].requires_grad_(not trainable)
        backward(0, 1)
        optimizer.step()

    _equals_one_process(train, passes=2)


def test_param_group_added_after_backward_with_gradients_of_this_rank_raises() -> None:
    def run(group: collectives.Group) -> None:
        model = make_model()
        first, *others = model.parameters()
        optimizer: Any = DistributedOptimizer(torch.optim.SGD(others, lr=0.1))
        loss_of(model, group.rank, 0).backward()
        optimizer.add_param_group({"params": [first]})
        with pytest.raises(OptimizerOrderError, match="put into param_groups, between backward"):
            optimizer.step()
        first.grad = None
        optimizer.step()

    collectives.run_threads(SIZE, run)


@pytest.mark.parametrize("size", [{"groups_size": 1}, {"memory_size": 1e-4}], ids=str)
def test_param_group_added_later_is_divided_by_the_same_size(size: Any) -> None:
    def run(group: collectives.Group) -> None:
        model, added = make_model(), make_model()
        optimizer: Any = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **size)
        optimizer.add_param_group({"params": list(added.parameters())})
        optimizer.step()
        assert [len(each.members) for each in optimizer._adasum.backward.buckets] == [1] * 8

    collectives.run_threads(SIZE, run)


def test_parameter_unfrozen_after_its_bucket_was_sent_is_still_reduced() -> None:
    def run(group: collectives.Group) -> None:
        model = make_model()
        optimizer: Any = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), groups=4)
        model[0].weight.requires_grad_(False)
        loss_of(model, group.rank, 0).backward()
        model.requires_grad_(False)
        model[0].weight.requires_grad_(True)
        with pytest.raises(OptimizerOrderError, match="would be left out of the reduction"):
            loss_of(model, group.rank, 1).backward()
        optimizer.zero_grad()
        model.requires_grad_(True)
        loss_of(model, group.rank, 1).backward()
        optimizer.step()

    collectives.run_threads(SIZE, run)
