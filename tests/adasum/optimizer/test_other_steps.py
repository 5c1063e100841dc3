"""Optimizers that step by another name, hooks and arguments of steps, and steps of the wrapped."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import adasum as hvd
from adasum import OptimizerOrderError
from collectives import Group, run_threads
from tests.adasum.definition import flat, loss_of, make_model
from tests.adasum.jobs import on_ranks, ways, wrapped

BY_GRADIENTS = ways("average", "gradient")
BY_STEPS = ways("delta", "owners")
WAYS = {**BY_GRADIENTS, **BY_STEPS}


class TwoSteps(torch.optim.SGD):
    """Climbs, then steps from where it was by the gradient found there, as SAM does."""

    @torch.no_grad()
    def climb(self, rho: float = 0.05) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    self.state[each]["old"] = each.clone()
                    each.add_(each.grad, alpha=rho)

    @torch.no_grad()
    def descend(self) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                if "old" in self.state[each]:
                    each.copy_(self.state[each].pop("old"))
        torch.optim.SGD.step(self)

    def described(self) -> str:
        return "TwoSteps"

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        assert closure is not None
        closure()
        self.climb()
        self.zero_grad()
        loss = closure()
        self.descend()
        return loss


class Averaged(torch.optim.SGD):
    """Evaluates at other parameters than it trains at."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


@pytest.mark.parametrize("way", BY_GRADIENTS)
def test_two_steps_by_other_names_by_reduced_gradients_are_those_of_one_rank(way: str) -> None:
    """With equal data the ranks' reduction is what each has."""

    def run(group: Group) -> Tensor:
        model = make_model()
        optimizer = wrapped(model, partial(TwoSteps, lr=0.1), **WAYS[way])
        for step in range(3):
            for half in (optimizer.climb, optimizer.descend):
                optimizer.zero_grad()
                loss_of(model, group.rank if group.size > 1 else 0, step).backward()
                half()
        return flat(model)

    results = run_threads(2, run)
    assert torch.equal(*results)
    assert not torch.equal(results[0], run_threads(1, run)[0])


@pytest.mark.parametrize("way", BY_STEPS)
@on_ranks(2)
def test_a_step_by_another_name_that_would_reduce_nothing_raises(group: Group, way: str) -> None:
    model = make_model()
    optimizer = wrapped(model, partial(TwoSteps, lr=0.1), **WAYS[way])
    assert optimizer.described() == "TwoSteps"
    loss_of(model, group.rank, 0).backward()
    if way == "owners":
        optimizer.synchronize()
    with pytest.raises(OptimizerOrderError, match=r"climb\(\) changed .* method='gradient'"):
        optimizer.climb()


@pytest.mark.parametrize("way", WAYS)
def test_an_optimizer_with_train_and_eval_is_refused_where_states_differ(way: str) -> None:
    def run(group: Group) -> None:
        if way in BY_GRADIENTS:
            wrapped(make_model(), partial(Averaged, lr=0.1), **WAYS[way])
            return
        with pytest.raises(
            ValueError, match=r"Averaged changes .*train\(\) and eval\(\).*'gradient'"
        ):
            wrapped(make_model(), partial(Averaged, lr=0.1), **WAYS[way])

    run_threads(2, run)
    run_threads(1, lambda group: wrapped(make_model(), partial(Averaged, lr=0.1), **WAYS[way]))


class Scaled(torch.optim.SGD):
    """Takes its rate by the step's own argument."""

    def step(self, closure: Any = None, *, factor: float = 1.0) -> Any:
        for group in self.param_groups:
            group["lr"] *= factor
        result = super().step(closure)
        for group in self.param_groups:
            group["lr"] /= factor
        return result


@pytest.mark.parametrize("way", WAYS)
def test_arguments_of_step_reach_the_wrapped_optimizer(way: str) -> None:
    def run(group: Group, factor: float, rate: float) -> Tensor:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(Scaled(model.parameters(), lr=rate), **WAYS[way])
        loss_of(model, group.rank, 0).backward()
        optimizer.step(factor=factor)
        return flat(model)

    got = run_threads(2, lambda group: run(group, 0.5, 0.25))
    want = run_threads(2, lambda group: run(group, 1.0, 0.125))
    assert torch.equal(got[0], got[1]) and torch.equal(got[0], want[0])


@on_ranks(2)
def test_arguments_of_step_with_step_in_backward_raise(group: Group) -> None:
    model = make_model()
    optimizer = wrapped(model, op=hvd.Adasum, step_in_backward=True)
    loss_of(model, group.rank, 0).backward()
    with pytest.raises(OptimizerOrderError, match=r"step\(factor=...\) comes too late"):
        optimizer.step(factor=0.5)


@pytest.mark.parametrize("way", WAYS)
def test_a_step_of_the_optimizer_that_was_wrapped_raises_while_its_wrapper_lives(way: str) -> None:
    def run(group: Group) -> None:
        model = make_model()
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer: Any = hvd.DistributedOptimizer(plain, **WAYS[way])
        loss_of(model, group.rank, 0).backward()
        before = flat(model)
        with pytest.raises(
            OptimizerOrderError, match=r"call step\(\) on .* returned.* schedulers, too"
        ):
            plain.step()
        assert torch.equal(before, flat(model))
        optimizer.step()
        del optimizer
        plain.step()

    run_threads(2, run)


@on_ranks(1)
def test_a_step_of_the_optimizer_that_was_wrapped_on_one_rank_is_taken(group: Group) -> None:
    model = make_model()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(plain)
    loss_of(model, 0, 0).backward()
    plain.step()
    optimizer.step()
