"""Gradients that users drop, probe, or give to parameters themselves, against plain torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import adasum as hvd
from collectives import Group, run_threads
from tests.adasum.jobs import WAYS as ALL_WAYS
from tests.adasum.jobs import on_ranks, ways

WAYS = ways("average", "sum", "owners")
SIZE = 2


class Heads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(3, 3).double()
        self.heads = torch.nn.ModuleList(torch.nn.Linear(3, 1).double() for _ in range(2))
        with torch.no_grad():
            for i, each in enumerate(self.parameters()):
                each.copy_(torch.linspace(-1, 1, each.numel()).view_as(each) + i / 8)

    def loss(self, rank: int, step: int, head: int = 0) -> Tensor:
        x = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3) + rank + step / 4
        return self.heads[head](torch.tanh(self.body(x))).square().mean()


def sgd(model: Heads) -> torch.optim.Optimizer:
    # Weight decay moves what has zeros for a gradient, but not what has none.
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


Step = Callable[[Heads, Any, int, int], None]


def check(way: str, passes: int, before_step: Step) -> None:
    """Train by `before_step(model, optimizer, rank, step)`, and beside it plain models of all."""

    def run(group: Group) -> Tensor:
        model = Heads()
        optimizer: Any = hvd.DistributedOptimizer(
            sgd(model), model.named_parameters(), backward_passes_per_step=passes, **WAYS[way]
        )
        for step in range(4):
            before_step(model, optimizer, group.rank, step)
            optimizer.step()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    models = [Heads() for _ in range(SIZE)]
    optimizers = [sgd(model) for model in models]
    for step in range(4):
        for rank in range(SIZE):
            before_step(models[rank], optimizers[rank], rank, step)
        for column in zip(*(model.parameters() for model in models), strict=True):
            gradients = [p.grad for p in column if p.grad is not None]
            if gradients:
                total = torch.stack(gradients).sum(0) / (1 if way == "sum" else SIZE)
                for p in column:
                    # In its place, but for what has no memory for every element.
                    if p.grad is None or p.grad.is_inference() or 0 in p.grad.stride():
                        p.grad = total.clone()
                    else:
                        p.grad.copy_(total)
        for optimizer in optimizers:
            optimizer.step()
    want = torch.cat([p.detach().reshape(-1) for p in models[0].parameters()])
    results = run_threads(SIZE, run)
    assert torch.equal(results[0], results[1])
    # Two ranks' sums and averages round as these do.
    assert torch.equal(results[0], want)


def dropped_between_passes(model: Heads, optimizer: Any, rank: int, step: int) -> None:
    optimizer.zero_grad()
    model.loss(rank, step).backward()
    model.zero_grad()
    model.loss(rank, step + 7).backward()


class NoGradient(torch.autograd.Function):
    """Has no gradient for what it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * 2, None


def undefined(model: Heads, optimizer: Any, rank: int, step: int) -> None:
    optimizer.zero_grad()
    loss = model.loss(rank, step)
    # The second head is given to the first steps alone.
    if step < 2:
        loss = loss + model.loss(rank, step, 1)
    NoGradient.apply(loss, model.heads[1].weight).backward()


def probed(model: Heads, optimizer: Any, rank: int, step: int) -> None:
    optimizer.zero_grad()
    if step < 1:
        (model.loss(rank, step) + model.loss(rank, step, 1)).backward()
    else:
        torch.autograd.grad(model.loss(rank, step, 1), list(model.heads[1].parameters()))
        model.loss(rank, step).backward()


def estimated(model: Heads, optimizer: Any, rank: int, step: int) -> None:
    """As evolution strategies do; nothing is trainable."""
    optimizer.zero_grad()
    for i, each in enumerate(model.parameters()):
        each.requires_grad_(False)
        each.grad = torch.full_like(each, (rank + 1) * (step + i) / 8)


def exchanged(model: Heads, optimizer: Any, rank: int, step: int) -> None:
    """Two gradients change places, in memory that is theirs from the second step on."""
    optimizer.zero_grad(set_to_none=False)
    (model.loss(rank, step) + model.loss(rank, step, 1)).backward()
    one, other = model.heads[0].weight, model.heads[1].weight
    one.grad, other.grad = other.grad, one.grad


def expanded(model: Heads, optimizer: Any, rank: int, step: int) -> None:
    optimizer.zero_grad()
    model.loss(rank, step).backward()
    weight = model.heads[1].weight
    weight.grad = torch.ones(1, 1, dtype=weight.dtype).mul(rank + step).expand(weight.shape)


def made_in_inference(model: Heads, optimizer: Any, rank: int, step: int) -> None:
    optimizer.zero_grad()
    model.loss(rank, step).backward()
    with torch.inference_mode():
        gradient = torch.full((1, 3), rank + step / 4, dtype=torch.float64)
    model.heads[1].weight.grad = gradient


ODD_MEMORY = (exchanged, expanded, made_in_inference)
CASES = [
    *((change, way) for change in (undefined, probed, estimated) for way in WAYS),
    *((dropped_between_passes, way) for way in WAYS),
    *((change, way) for change in ODD_MEMORY for way in ("average", "sum")),
]


@pytest.mark.parametrize(("change", "way"), CASES)
def test_gradients_changed_by_hand_give_the_steps_of_plain_torch(change: Step, way: str) -> None:
    check(way, 2 if change is dropped_between_passes else 1, change)


@pytest.mark.parametrize("way", WAYS)
@on_ranks(SIZE)
def test_a_gradient_given_to_a_frozen_parameter_after_backward_raises_and_names_it(
    group: Group, way: str
) -> None:
    """The reduction of the step has begun without it."""
    model = Heads()
    optimizer: Any = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), **WAYS[way])
    model.heads[1].requires_grad_(False)
    model.loss(group.rank, 0).backward()
    model.heads[1].weight.grad = torch.full_like(model.heads[1].weight, group.rank)
    with pytest.raises(hvd.OptimizerOrderError, match=r"of heads\.1\.weight was not reduced"):
        optimizer.step()


@pytest.mark.parametrize("way", ["average", "sum"])
@on_ranks(SIZE)
def test_gradients_that_share_memory_raise_and_name_the_bucket(group: Group, way: str) -> None:
    model = Heads()
    optimizer: Any = hvd.DistributedOptimizer(sgd(model), **WAYS[way])
    model.loss(group.rank, 0).backward()
    both = torch.arange(4, dtype=torch.float64)
    model.heads[0].weight.grad, model.heads[1].weight.grad = both[:3][None], both[1:][None]
    with pytest.raises(ValueError, match=r"two gradients of bucket 0: .* share memory"):
        optimizer.synchronize()


@pytest.mark.parametrize("way", WAYS)
@on_ranks(SIZE)
def test_groups_stepped_one_after_the_other_raise(group: Group, way: str) -> None:
    """All gradients were reduced in the first of these steps."""
    model = Heads()
    parts = [{"params": list(each.parameters())} for each in (model.body, *model.heads)]
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(parts, lr=0.1), **WAYS[way])
    (model.loss(group.rank, 0) + model.loss(group.rank, 0, 1)).backward()
    first, second, _ = optimizer.param_groups
    optimizer.param_groups = [first]
    optimizer.step()
    optimizer.param_groups = [second]
    with pytest.raises(hvd.OptimizerOrderError, match="step all groups at once"):
        optimizer.step()


def _halve(parameter: Tensor, how: str) -> None:
    gradient = parameter.grad
    assert gradient is not None
    if how == "replaced":
        parameter.grad = gradient * 0.5
    elif how == "in place":
        gradient.mul_(0.5)
    elif how == "data":
        gradient.data = gradient.data * 0.5
    elif how == "data in place":
        gradient.data.mul_(0.5)
    else:
        gradient.numpy()[:] *= 0.5


@pytest.mark.parametrize("how", ["replaced", "in place", "data", "data in place", "numpy"])
@pytest.mark.parametrize("way", ["average", "owners", "delta in backward"])
def test_a_parameters_own_hook_may_change_a_gradient_in_any_way(way: str, how: str) -> None:
    def run(group: Group, hooked: bool) -> Tensor:
        model = Heads()
        for each in model.parameters() if hooked else ():
            each.register_post_accumulate_grad_hook(lambda p: _halve(p, how))
        optimizer: Any = hvd.DistributedOptimizer(sgd(model), **ALL_WAYS[way])
        for step in range(2):
            loss = model.loss(group.rank, step) + model.loss(group.rank, step, 1)
            (loss if hooked else loss * 0.5).backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([p.detach().view(-1) for p in model.parameters()])

    # Half of a gradient is the gradient of half the loss, exactly.
    hooked, halved = (run_threads(SIZE, partial(run, hooked=each))[0] for each in (True, False))
    assert torch.equal(hooked, halved)


@pytest.mark.parametrize("how", ["replaced", "in place"])
@pytest.mark.parametrize("way", ["average", "owners", "delta in backward"])
@on_ranks(SIZE)
def test_a_hook_put_on_later_that_changes_a_gradient_under_way_raises(
    group: Group, way: str, how: str
) -> None:
    model = Heads()
    optimizer: Any = hvd.DistributedOptimizer(sgd(model), **ALL_WAYS[way])
    for each in model.parameters():
        each.register_post_accumulate_grad_hook(lambda p: _halve(p, how))

    def train() -> None:
        (model.loss(group.rank, 0) + model.loss(group.rank, 0, 1)).backward()
        optimizer.step()

    with pytest.raises(hvd.OptimizerOrderError, match="was changed while it was being reduced"):
        train()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("way", [*WAYS, "tree"])
def test_a_parameters_own_optimizer_may_step_in_its_hook(way: str, late: bool) -> None:
    """As torch's tutorial on optimizer steps in the backward pass has it."""

    def run(group: Group) -> Tensor:
        parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
        optimizers: dict[Any, Any] = {}

        def step(p: Any) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        options = WAYS.get(way, {"op": hvd.Average, "order": "tree"})
        for wraps in (late, not late):
            for name, p in zip("ab", parameters, strict=True):
                if wraps:
                    wrapped = torch.optim.SGD([p], lr=1.0)
                    optimizers[p] = hvd.DistributedOptimizer(wrapped, [(name, p)], **options)
                else:
                    p.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            (sum(p.sum() for p in parameters) * (1 + 2 * group.rank)).backward()
        return torch.cat([p.detach() for p in parameters])

    for result in run_threads(SIZE, run, timeout=30):
        assert (result == (-12.0 if way == "sum" else -6.0)).all(), result


@pytest.mark.parametrize("way", [*WAYS, "tree"])
def test_batches_left_out_pair_no_two_batches_where_ranks_use_other_parameters(way: str) -> None:
    """The rank whose backward reaches all waits in it for the one that zeroes its gradients."""

    def run(group: Group) -> list[float]:
        parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
        options = WAYS.get(way, {"op": hvd.Average, "order": "tree"})
        optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD(parameters, lr=1.0),
            list(zip("abc", parameters, strict=True)),
            groups_size=1,
            **options,
        )
        for step in range(5):
            optimizer.zero_grad()
            loss = (parameters[0] * 10.0**step).sum()
            # On one rank a left-out batch does not reach the bucket that starts first, on the other
            # the one that starts last.
            if (step, group.rank) not in ((1, 1), (3, 0)):
                loss = loss + parameters[2].sum()
            if (step, group.rank) not in ((1, 0), (3, 1)):
                loss = loss + parameters[1].sum()
            loss.backward()
            if step not in (1, 3):
                optimizer.step()
        return [p.item() for p in parameters]

    ranks = 2 if way == "sum" else 1
    for result in run_threads(SIZE, run, timeout=30):
        assert result == [-10101.0 * ranks, -3.0 * ranks, -3.0 * ranks]
