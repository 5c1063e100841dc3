"""Parameters that several optimizers, several backward passes or a copied model have in common."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import adasum as hvd
from adasum import OptimizerOrderError
from collectives import Group, run_threads
from tests.adasum.definition import flat, loss_of, make_model


def wrapped(parameters: Any, **options: Any) -> Any:
    return hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), **options)


WAYS: dict[str, dict[str, Any]] = {
    "average": {"op": hvd.Average},
    "owners": {"op": hvd.Average, "mode": "owners"},
    "delta": {"op": hvd.Adasum},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_reloaded_optimizer_trains_while_the_old_one_is_still_held(way: str) -> None:
    def run(group: Group, held: bool) -> Tensor:
        model = make_model()
        optimizers = []
        for _ in range(3):
            optimizers.append(wrapped(model.parameters(), **WAYS[way]))
            for step in range(2):
                optimizers[-1].zero_grad()
                loss_of(model, group.rank, step).backward()
                optimizers[-1].step()
            if not held:
                optimizers.clear()
        return flat(model)

    got = run_threads(2, lambda group: run(group, True))
    want = run_threads(2, lambda group: run(group, False))
    assert torch.equal(got[0], got[1]) and torch.equal(got[0], want[0])


class Trunk(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = make_model(1)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(3, 2).double() for _ in range(2))
        with torch.no_grad():
            for each in self.heads.parameters():
                each.fill_(0.25)

    def parameters_for(self, head: int) -> list[Tensor]:
        return [*self.trunk.parameters(), *self.heads[head].parameters()]

    def loss(self, head: int, rank: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * rank + 10 * step + head)
        x = torch.randn(4, 6, generator=generator, dtype=torch.float64)
        return (self.heads[head](self.trunk(x)) - 1).square().mean()


def test_two_optimizers_by_the_delta_method_share_a_trunk() -> None:
    """Both step it by their own losses' gradients, one after the other, as plain ones do."""

    def run(group: Group) -> Tensor:
        model = Trunk()
        both = [wrapped(model.parameters_for(head), op=hvd.Adasum) for head in range(2)]
        for step in range(3):
            for head, optimizer in enumerate(both):
                optimizer.zero_grad()
                model.loss(head, 0, step).backward()
                optimizer.step()
        return flat(model)

    def plain() -> Tensor:
        model = Trunk()
        both = [torch.optim.SGD(model.parameters_for(head), lr=0.1) for head in range(2)]
        for step in range(3):
            for head, optimizer in enumerate(both):
                optimizer.zero_grad()
                model.loss(head, 0, step).backward()
                optimizer.step()
        return flat(model)

    # Adasum of what is equal on both ranks is that, to the rounding of a level.
    results = run_threads(2, run)
    assert torch.equal(*results)
    assert torch.allclose(results[0], plain(), rtol=100 * torch.finfo(torch.float64).eps)


def test_two_optimizers_by_gradients_that_share_a_trunk_raise_at_the_older_ones_step() -> None:
    def run(group: Group) -> None:
        model = Trunk()
        first, second = (wrapped(model.parameters_for(head), op=hvd.Average) for head in range(2))
        model.loss(0, group.rank, 0).backward()
        with pytest.raises(OptimizerOrderError, match=r"reduced twice.* go into one optimizer"):
            first.step()
        second.step()

    run_threads(2, run)


def test_a_delta_optimizer_beside_a_newer_one_that_reduces_gradients_raises() -> None:
    def run(group: Group) -> None:
        model = make_model()
        delta = wrapped(model.parameters(), op=hvd.Adasum)
        newer = wrapped(model.parameters(), op=hvd.Average)
        loss_of(model, group.rank, 0).backward()
        with pytest.raises(OptimizerOrderError, match="reduced twice"):
            delta.step()
        newer.step()

    run_threads(2, run)


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


def test_a_layer_that_reentrant_checkpoints_share_steps_by_the_delta_method() -> None:
    class Shared(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layer = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
            with torch.no_grad():
                for each in self.parameters():
                    each.copy_(torch.linspace(-0.5, 0.5, each.numel()).view_as(each))

        def forward(self, x: Tensor, reentrant: bool) -> Tensor:
            x = self.first(x)
            for _ in range(3):
                x = checkpoint(self.layer, x, use_reentrant=True) if reentrant else self.layer(x)
            return x

    def run(group: Group, reentrant: bool) -> Tensor:
        model = Shared()
        optimizer = wrapped(model.parameters(), op=hvd.Adasum)
        for step in range(2):
            optimizer.zero_grad()
            data = torch.full((2, 6), 1.0 + group.rank + step)
            model(data, reentrant).square().mean().backward()
            optimizer.step()
        return flat(model)

    shared = run_threads(2, lambda group: run(group, True))
    whole = run_threads(2, lambda group: run(group, False))
    assert torch.equal(*shared)
    # Three parts of a gradient, added in another order; each of two steps passes that on.
    assert torch.allclose(shared[0], whole[0], rtol=1e3 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("way", WAYS)
def test_a_copied_model_trains_by_an_optimizer_of_its_own(way: str) -> None:
    """As a teacher, or an average of weights, that is made in the middle of training."""

    def run(group: Group, copied: bool) -> Tensor:
        model = make_model()
        optimizer = wrapped(model.parameters(), **WAYS[way])
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, group.rank, step).backward()
            optimizer.step()
        other = copy.deepcopy(model) if copied else model
        mine = wrapped(other.parameters(), **WAYS[way])
        for step in range(2):
            mine.zero_grad()
            loss_of(other, group.rank, step).backward()
            mine.step()
        if copied:
            # Both go on, each with its own.
            loss_of(model, group.rank, 2).backward() if way != "owners" else None
            optimizer.step()
        return flat(other)

    got = run_threads(2, lambda group: run(group, True))
    want = run_threads(2, lambda group: run(group, False))
    assert torch.equal(got[0], got[1]) and torch.equal(got[0], want[0])


def test_a_copied_optimizer_raises_and_says_how() -> None:
    def run(group: Group) -> None:
        optimizer = wrapped(make_model().parameters())
        with pytest.raises(TypeError, match=r"cannot be copied .* state_dict\(\)"):
            copy.deepcopy(optimizer)

    run_threads(1, run)
