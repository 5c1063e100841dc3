"""Parameters frozen, made trainable and added between steps, passes and calls of one step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import collectives
from adasum import DistributedOptimizer, OptimizerOrderError
from tests.adasum.definition import loss_of, make_model

SIZE = 2


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
