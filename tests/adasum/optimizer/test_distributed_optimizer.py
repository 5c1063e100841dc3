"""DistributedOptimizer: trajectories, one rank, what works on it. Ranks are threads."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import adasum as hvd
import collectives
from adasum import Compression, DistributedOptimizer
from tests.adasum.definition import (
    OPTIMIZERS,
    flat,
    loss_of,
    make_model,
    relative_error,
    tolerance,
    trajectory,
    trajectory_tolerance,
)
from tests.adasum.jobs import OPS, Counting, on_ranks, train, wrapped

STEPS = 4


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
@pytest.mark.parametrize(
    ("op", "method"),
    [("Sum", "gradient"), ("Average", "gradient"), ("Adasum", "delta"), ("Adasum", "gradient")],
)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_training_on_threads_equals_the_definition(
    size: int, op: str, method: str, kind: str, passes: int
) -> None:
    options = {"method": method} if op == "Adasum" else {}
    results = collectives.run_threads(size, lambda group: train(op, kind, passes, STEPS, **options))
    want = trajectory(op, kind, size, passes, STEPS, method=method)
    assert relative_error(results[0], want) <= trajectory_tolerance(STEPS)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("op", sorted(OPS))
@pytest.mark.parametrize(
    ("compression", "dtype"),
    [(Compression.fp16, torch.float16), (Compression.bf16, torch.bfloat16)],
)
def test_compression_changes_the_result_by_its_rounding_only(
    op: str, compression: Any, dtype: torch.dtype
) -> None:
    results = collectives.run_threads(
        2, lambda group: train(op, "sgd", 1, STEPS, compression=compression)
    )
    want = trajectory(op, "sgd", 2, 1, STEPS)
    # Each step's reduced change carries the wire dtype's promise; the changes together are not
    # larger than the parameters themselves.
    assert relative_error(results[0], want) <= STEPS * tolerance(dtype)
    assert torch.equal(results[0], results[1])
    assert relative_error(results[0], want) > trajectory_tolerance(STEPS), "nothing was compressed"


class Halved:
    """A compression of a user's, which sends halves."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        return tensor * 0.5, 3

    @staticmethod
    def decompress(tensor: torch.Tensor, context: int) -> torch.Tensor:
        return tensor * context


@pytest.mark.parametrize("op", sorted(OPS))
def test_compression_of_the_users_compresses_and_decompresses_what_is_sent(op: str) -> None:
    def job(group: collectives.Group) -> list[float]:
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer: Any = DistributedOptimizer(
            torch.optim.SGD([parameter], lr=1.0),
            op=OPS[op],
            compression=Halved,
            **({"method": "gradient"} if op == "Adasum" else {}),
        )
        for _ in range(2):
            optimizer.zero_grad()
            (parameter * 4.0).sum().backward()
            optimizer.step()
        return parameter.tolist()

    # Equal gradients of 4 are halved, reduced and taken three times.
    gradient = 12.0 if op == "Sum" else 6.0
    assert collectives.run_threads(2, job) == [[1.0 - 2 * gradient] * 3] * 2


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
@pytest.mark.parametrize("op", sorted(OPS))
def test_one_rank_gives_the_bits_of_the_plain_optimizer(op: str, kind: str) -> None:
    def run(group: collectives.Group) -> torch.Tensor:
        return train(op, kind, 2, STEPS)

    model = make_model()
    plain = OPTIMIZERS[kind](model.parameters())
    rows = []
    for step in range(STEPS):
        plain.zero_grad()
        for turn in range(2):
            loss_of(model, 0, step, turn).backward()
        plain.step()
        rows.append(flat(model))
    assert torch.equal(collectives.run_threads(1, run)[0], torch.stack(rows))


@on_ranks(2)
def test_reductions_during_backward_start_before_it_ends(group: collectives.Group) -> None:
    model = make_model()
    optimizer = wrapped(model, groups=4)
    observer = Counting()
    optimizer.set_observer(observer)
    before_last: list[int] = []
    model[0].weight.register_hook(lambda grad: before_last.append(observer.calls))
    loss_of(model, group.rank, 0).backward()
    assert before_last[0] >= 2 and observer.calls == 4
    optimizer.step()
    assert observer.calls == 4


def test_scheduler_made_before_or_after_wrapping_works() -> None:
    def run(group: collectives.Group, early: bool) -> tuple[torch.Tensor, float]:
        model = make_model()
        optimizer: Any = OPTIMIZERS["momentum"](model.parameters())
        if early:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        optimizer = DistributedOptimizer(optimizer, op=hvd.Adasum)
        if not early:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, group.rank, step).backward()
            optimizer.step()
            scheduler.step()
        return flat(model), optimizer.param_groups[0]["lr"]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        early = collectives.run_threads(2, lambda group: run(group, True))
        late = collectives.run_threads(2, lambda group: run(group, False))
    assert early[0][1] == late[0][1] == 0.1 * 0.5**3
    for result, _ in [*early, *late]:
        assert torch.equal(result, late[0][0])


@on_ranks(2)
def test_wrapper_shares_state_groups_and_class_with_the_optimizer(group: collectives.Group) -> None:
    model = make_model()
    plain = OPTIMIZERS["adam"](model.parameters())
    calls: list[str] = []
    plain.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer = DistributedOptimizer(plain, op=hvd.Adasum)
    assert isinstance(optimizer, torch.optim.Adam)
    assert optimizer.param_groups is plain.param_groups
    loss_of(model, group.rank, 0).backward()
    optimizer.step()
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert optimizer.state is plain.state
    assert optimizer.param_groups is plain.param_groups
    optimizer.zero_grad()
    loss_of(model, group.rank, 1).backward()
    optimizer.step()
    assert calls == ["pre", "pre"]


def test_step_with_a_closure_reduces_its_gradients_and_loss() -> None:
    def run(group: collectives.Group, op: str, kind: str) -> torch.Tensor:
        model = make_model()
        make = OPTIMIZERS.get(kind) or (
            lambda p: torch.optim.LBFGS(p, max_iter=3, line_search_fn="strong_wolfe")
        )
        optimizer = DistributedOptimizer(make(model.parameters()), op=OPS[op])

        def closure(step: int) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, group.rank, step)
            loss.backward()
            return loss

        for step in range(STEPS):
            assert optimizer.step(lambda step=step: closure(step)) is not None
        return flat(model)

    for op in OPS:
        got = collectives.run_threads(3, lambda group, op=op: run(group, op, "adam"))
        want = trajectory(op, "adam", 3, 1, STEPS)[-1]
        assert relative_error(got[0], want) <= trajectory_tolerance(STEPS)
        searched = collectives.run_threads(3, lambda group, op=op: run(group, op, "lbfgs"))
        assert all(torch.equal(result, searched[0]) for result in searched)


@pytest.mark.parametrize("op", ["Average", "Adasum"])
@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_with_inf_on_one_rank_skips_on_every_rank(op: str, fused: bool) -> None:
    def run(group: collectives.Group, scale: float) -> torch.Tensor:
        model = make_model().float()
        inner = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        optimizer: Any = DistributedOptimizer(inner, op=OPS[op])
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
        rows = [flat(model)]
        for step in range(3):
            optimizer.zero_grad()
            loss = model(torch.full((2, 6), 0.1 * (group.rank + 1))).square().mean()
            if step == 1 and group.rank == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
            rows.append(flat(model))
        return torch.stack(rows)

    first, second = collectives.run_threads(2, lambda group: run(group, 8.0))
    start, stepped, skipped, last = first
    assert torch.equal(first, second) and torch.equal(stepped, skipped)
    assert not torch.equal(start, stepped) and not torch.equal(skipped, last)
    # Scaling by a power of two is exact: only the reduction's and the step's roundings remain.
    plain = collectives.run_threads(2, lambda group: run(group, 1.0))[0]
    assert relative_error(first, plain) <= tolerance(torch.float32)


@on_ranks(2)
def test_dropped_optimizer_removes_its_hooks(group: collectives.Group) -> None:
    model = make_model()
    for step in range(3):
        optimizer = DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()))
        loss_of(model, group.rank, step).backward()
        optimizer.step()
        model.zero_grad()
        del optimizer
    loss_of(model, group.rank, 0).backward()
    loss_of(model, group.rank, 0).backward()
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
