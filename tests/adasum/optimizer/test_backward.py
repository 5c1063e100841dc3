"""Calls of DistributedOptimizer in the wrong order, and steps that raise: what is left of both."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import adasum as hvd
import collectives
from adasum import DistributedOptimizer, OptimizerOrderError
from adasum.optimizer.gradient_method import GradientMethod
from adasum.optimizer.reduction import Reduction
from collectives import CollectiveTimeoutError, TransportError
from tests.adasum.definition import OPTIMIZERS, flat, loss_of, make_model
from tests.adasum.jobs import OPS, on_ranks, take_steps, ways, wrapped


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("op", sorted(OPS))
def test_too_many_backward_passes_raise_and_name_the_parameter(op: str, size: int) -> None:
    def run(group: collectives.Group) -> None:
        model = make_model()
        optimizer = wrapped(model, op=OPS[op], backward_passes_per_step=2)

        def backward_and_step(number: int, turn: int) -> None:
            """It raises in backward, or in step where nothing starts in backward."""
            loss_of(model, group.rank, number, turn).backward()
            optimizer.step()

        for turn in range(2):
            loss_of(model, group.rank, 0, turn).backward()
        with pytest.raises(
            AssertionError, match=r"of \d\.\w+ .* backward_passes_per_step=2.*GAN"
        ) as e:
            backward_and_step(0, 2)
        assert isinstance(e.value, OptimizerOrderError)
        optimizer.zero_grad() if op == "Adasum" or size == 1 else optimizer.step()
        optimizer.set_backward_passes_per_step(1)
        loss_of(model, group.rank, 1).backward()
        with pytest.raises(OptimizerOrderError, match="backward_passes_per_step=1"):
            backward_and_step(1, 0)
        with pytest.raises(ValueError, match="got -1"):
            optimizer.set_backward_passes_per_step(-1)

    collectives.run_threads(size, run)


@on_ranks(2)
def test_zero_grad_after_an_interrupted_backward_raises(group: collectives.Group) -> None:
    model = make_model()
    optimizer = wrapped(model, groups=4)
    broken = model[0].weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, group.rank, 0).backward()
    with pytest.raises(OptimizerOrderError, match=r"zero_grad\(\) was called after"):
        optimizer.zero_grad()
    with pytest.raises(OptimizerOrderError, match=r"add_param_group\(\) was called after"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    with (
        optimizer.skip_synchronize(),
        pytest.raises(OptimizerOrderError, match=r"needs synchronize\(\)"),
    ):
        optimizer.step()
    optimizer.synchronize()
    optimizer.zero_grad()
    broken.remove()
    loss_of(model, group.rank, 1).backward()
    # Final again when backward returns.
    rows = hvd.allgather(model[0].weight.grad.reshape(1, -1))
    assert torch.equal(rows[0], rows[1])
    optimizer.step()


@on_ranks(2)
def test_backward_after_the_wrapper_was_dropped_raises(group: collectives.Group) -> None:
    model = make_model()
    plain = OPTIMIZERS["sgd"](model.parameters())
    DistributedOptimizer(plain)
    with pytest.raises(OptimizerOrderError, match="was dropped, and the one passed"):
        loss_of(model, group.rank, 0).backward()
    plain.zero_grad()


@on_ranks(2)
def test_backward_after_synchronize_raises(group: collectives.Group) -> None:
    model = make_model()
    optimizer = wrapped(model, backward_passes_per_step=2)
    loss_of(model, group.rank, 0).backward()
    optimizer.synchronize()
    with pytest.raises(OptimizerOrderError, match=r"2\.\w+ was computed after all were"):
        loss_of(model, group.rank, 0, 1).backward()


def test_step_after_synchronize_warns_and_reduces_once() -> None:
    def run(group: collectives.Group) -> torch.Tensor:
        parameter = torch.nn.Parameter(torch.zeros(2))
        optimizer: Any = DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), op=hvd.Sum)
        parameter.sum().backward()
        optimizer.synchronize()
        optimizer.step()
        return parameter.detach()

    with pytest.warns(UserWarning, match="without optimizer.skip_synchronize"):
        results = collectives.run_threads(2, run)
    assert torch.equal(results[0], torch.full((2,), -2.0))


@on_ranks(1)
def test_closure_within_skip_synchronize_raises(group: collectives.Group) -> None:
    optimizer = wrapped(make_model())
    with optimizer.skip_synchronize(), pytest.raises(ValueError, match="skip_synchronize"):
        optimizer.step(lambda: 0.0)


@on_ranks(2)
def test_grad_scaler_with_unreached_parameters_raises(group: collectives.Group) -> None:
    model = make_model().float()
    unused = torch.nn.Parameter(torch.ones(2))
    optimizer: Any = DistributedOptimizer(torch.optim.SGD([unused, *model.parameters()], lr=0.1))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 6)).sum()).backward()
    with pytest.raises(OptimizerOrderError, match=r"synchronize\(\) before scaler"):
        scaler.step(optimizer)
    optimizer.synchronize()


def test_bucket_that_cannot_start_raises_what_ended_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The communication thread may find that a rank is gone while the next bucket starts."""
    lost = CollectiveTimeoutError("rank 0 got no answer from rank 1")

    def wait() -> None:
        raise lost

    def start(self: Any, bucket: Any, members: Any) -> list[Reduction]:
        if bucket.name.startswith("bucket 0"):
            return [Reduction(wait, lambda result: None)]
        raise TransportError(f"{bucket.name}: unusable since an earlier failure") from lost

    def run(group: collectives.Group) -> None:
        parameters = [torch.nn.Parameter(torch.ones(1)) for _ in "ab"]
        plain = torch.optim.SGD(parameters, lr=0.1)
        optimizer: Any = DistributedOptimizer(plain, groups=2, check_parameters=False)
        with pytest.raises(CollectiveTimeoutError, match="got no answer from rank 1"):
            optimizer.synchronize()
        optimizer.zero_grad()
        with pytest.raises(CollectiveTimeoutError, match="got no answer from rank 1"):
            sum(parameters).backward()

    monkeypatch.setattr(GradientMethod, "start", start)
    collectives.run_threads(2, run)


RELOADED = ways("average", "owners", "delta")


@pytest.mark.parametrize("way", RELOADED)
def test_a_reloaded_optimizer_trains_while_the_old_one_is_still_held(way: str) -> None:
    def run(group: collectives.Group, held: bool) -> torch.Tensor:
        model = make_model()
        optimizers = []
        for _ in range(3):
            optimizers.append(wrapped(model, **RELOADED[way]))
            take_steps(model, optimizers[-1], 2)
            if not held:
                optimizers.clear()
        return flat(model)

    got = collectives.run_threads(2, lambda group: run(group, True))
    want = collectives.run_threads(2, lambda group: run(group, False))
    assert torch.equal(got[0], got[1]) and torch.equal(got[0], want[0])
