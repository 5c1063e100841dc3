"""The delta and the gradient method: what they compute, when they send, what they copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import adasum as hvd
import collectives
from adasum import DistributedOptimizer, OptimizerOrderError
from adasum.optimizer.delta_method import MAX_IN_FLIGHT, steps_by_parameter
from tests.adasum.definition import (
    OPTIMIZERS,
    flat,
    loss_of,
    make_model,
    relative_error,
    trajectory,
    trajectory_tolerance,
)
from tests.adasum.jobs import Counting, on_ranks, train, wrapped

STEPS = 4


@pytest.mark.parametrize("algorithm", ["rechd/vhdd", "xring/rd"])
@pytest.mark.parametrize("method", ["delta", "gradient"])
@pytest.mark.parametrize(("size", "local_size"), [(4, 2), (6, 2), (6, 3), (4, 4)])
def test_both_methods_under_two_levels_equal_the_definition(
    size: int, local_size: int, method: str, algorithm: str
) -> None:
    results = collectives.run_threads(
        size,
        lambda group: train("Adasum", "adam", 1, STEPS, method=method, algorithm=algorithm),
        local_size=local_size,
    )
    want = trajectory("Adasum", "adam", size, 1, STEPS, method=method, local_size=local_size)
    assert relative_error(results[0], want) <= trajectory_tolerance(STEPS)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_step_in_backward_gives_the_bits_of_the_delta_method(kind: str, passes: int) -> None:
    for groups in (None, 4):
        early, late = (
            collectives.run_threads(
                3,
                lambda group, now=now, groups=groups: train(
                    "Adasum", kind, passes, STEPS, step_in_backward=now, groups=groups
                ),
            )
            for now in (True, False)
        )
        assert torch.equal(early[0], late[0])
        assert torch.equal(early[0], early[2])


@on_ranks(2)
def test_delta_method_copies_only_the_buckets_in_flight(group: collectives.Group) -> None:
    model = make_model()
    optimizer: Any = DistributedOptimizer(
        torch.optim.Adam(model.parameters()), op=hvd.Adasum, groups=4
    )
    observer = Counting()
    optimizer.set_observer(observer)
    loss_of(model, group.rank, 0).backward()
    optimizer.step()
    assert observer.names == [f"allreduce.noname.0.{i}" for i in reversed(range(4))]
    assert observer.most <= MAX_IN_FLIGHT + 1 < observer.calls == 4


@on_ranks(2)
def test_step_in_backward_before_step_leaves_parameters_alone(group: collectives.Group) -> None:
    model = make_model()
    start = flat(model)
    optimizer = wrapped(model, "adam", op=hvd.Adasum, groups=4, step_in_backward=True)
    observer = Counting()
    optimizer.set_observer(observer)
    order: list[int] = []
    model[0].weight.register_hook(lambda _: order.append(observer.calls))
    loss_of(model, group.rank, 0).backward()
    assert order[0] >= 2, "nothing was sent before the last gradient"
    assert observer.calls == 4
    assert torch.equal(flat(model), start)
    with pytest.raises(OptimizerOrderError, match=r"zero_grad\(\) was called after"):
        optimizer.zero_grad()
    optimizer.step()
    assert not torch.equal(flat(model), start)


@on_ranks(2)
def test_step_in_backward_with_what_needs_the_gradients_raises(group: collectives.Group) -> None:
    model = make_model().float()

    def early(inner: torch.optim.Optimizer, **options: Any) -> Any:
        return DistributedOptimizer(inner, op=hvd.Adasum, step_in_backward=True, **options)

    with pytest.raises(ValueError, match="which LBFGS is not: pass step_in_backward=False"):
        early(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match="needs op=Adasum and method='delta'"):
        early(torch.optim.SGD(model.parameters()), method="gradient")
    optimizer = early(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 6)).sum()).backward()
    with pytest.raises(OptimizerOrderError, match="clipped"):
        optimizer.synchronize()
    with pytest.raises(OptimizerOrderError, match="GradScaler cannot be used with"):
        scaler.step(optimizer)
    hooked = make_model().float()
    optimizer = early(torch.optim.SGD(hooked.parameters(), lr=0.1), groups=4)
    hook = optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(OptimizerOrderError, match="register_step_pre_hook cannot be used with"):
        hooked(torch.ones(1, 6)).sum().backward()
    hook.remove()
    optimizer.zero_grad()
    hooked(torch.ones(1, 6)).sum().backward()
    optimizer.step()


def test_steps_by_parameter_of_known_optimizers_tells_which_do() -> None:
    class Renamed(torch.optim.AdamW):
        """Keeps AdamW's step."""

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    parameter = [torch.nn.Parameter(torch.zeros(1))]
    for kind in (torch.optim.SGD, torch.optim.Adam, Renamed):
        assert steps_by_parameter(type(kind(parameter, lr=0.1)))
    for kind in (torch.optim.LBFGS, Own):
        assert not steps_by_parameter(type(kind(parameter, lr=0.1)))
