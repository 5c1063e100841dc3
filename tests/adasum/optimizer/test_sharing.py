"""Parameters that several optimizers, several backward passes or a copied model have in common."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import adasum as hvd
from adasum import OptimizerOrderError
from collectives import Group, run_threads
from tests.adasum.definition import flat, loss_of, make_model
from tests.adasum.jobs import take_steps, ways


def wrapped(parameters: Any, **options: Any) -> Any:
    return hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), **options)


WAYS = ways("average", "owners", "delta")


@pytest.mark.parametrize("way", WAYS)
def test_a_reloaded_optimizer_trains_while_the_old_one_is_still_held(way: str) -> None:
    def run(group: Group, held: bool) -> Tensor:
        model = make_model()
        optimizers = []
        for _ in range(3):
            optimizers.append(wrapped(model.parameters(), **WAYS[way]))
            take_steps(model, optimizers[-1], 2)
            if not held:
                optimizers.clear()
        return flat(model)

    got = run_threads(2, lambda group: run(group, True))
    want = run_threads(2, lambda group: run(group, False))
    assert torch.equal(got[0], got[1]) and torch.equal(got[0], want[0])


@pytest.mark.parametrize("way", ["average", "delta"])
def test_a_discriminators_gradients_zeroed_by_its_module_name_the_optimizers_zero_grad(
    way: str,
) -> None:
    def run(group: Group) -> None:
        model = make_model()
        optimizer = wrapped(model.parameters(), **WAYS[way])

        def train_discriminator() -> None:
            loss_of(model, group.rank, 1).backward()
            optimizer.step()

        loss_of(model, group.rank, 0).backward()
        model.zero_grad()
        with pytest.raises(OptimizerOrderError, match=r"GAN's .* optimizer\.zero_grad\(\) and not"):
            train_discriminator()
        optimizer.synchronize()
        optimizer.zero_grad()
        loss_of(model, group.rank, 1).backward()
        optimizer.step()

    run_threads(2, run)
