"""Local steps: H steps of each rank's own, then one reduction of their difference."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import adasum as hvd
import collectives
from adasum import DistributedOptimizer
from adasum.optimizer.delta_method import DeltaMethod
from adasum.optimizer.local_steps import LocalStepsMethod
from tests.adasum.definition import (
    OPTIMIZERS,
    flat,
    loss_of,
    make_model,
    relative_error,
    trajectory_tolerance,
    tree,
)
from tests.adasum.jobs import OPS

STEPS = 6


def _make(kind: str = "adam", seed: int = 0, **options: Any) -> tuple[torch.nn.Sequential, Any]:
    model = make_model(seed)
    options = {"op": hvd.Adasum, "local_steps": 3, **options}
    optimizer = DistributedOptimizer(
        OPTIMIZERS[kind](model.parameters()), model.named_parameters(), **options
    )
    return model, optimizer


def _rates(optimizer: Any) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


def _step(model: torch.nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, hvd.rank(), step).backward()
    optimizer.step()


def _definition(op: str, kind: str, size: int, local_steps: int) -> Tensor:
    """Parameters [STEPS, size, P] after each step, in one process."""
    replicas = [make_model() for _ in range(size)]
    optimizers = [OPTIMIZERS[kind](model.parameters()) for model in replicas]
    rates = [_rates(optimizer) for optimizer in optimizers]
    start = [p.detach().clone() for p in replicas[0].parameters()]
    rows = []
    for step in range(STEPS):
        for rank, (model, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            rates[rank].step()
        if (step + 1) % local_steps == 0:
            with torch.no_grad():
                columns = zip(*(model.parameters() for model in replicas), strict=True)
                for old, column in zip(start, columns, strict=True):
                    deltas = [(p - old).reshape(-1) for p in column]
                    reduced = tree(deltas) if op == "Adasum" else torch.stack(deltas).mean(0)
                    old += reduced.view(old.shape)
                    for p in column:
                        p.copy_(old)
        rows.append(torch.stack([flat(model) for model in replicas]))
    return torch.stack(rows)


@pytest.mark.parametrize("op", ["Adasum", "Average"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_local_steps_with_a_schedule_equal_the_definition(size: int, op: str) -> None:
    """On every rank after every step: between two reductions ranks differ."""
    for kind in OPTIMIZERS:
        for local_steps in (2, 3):

            def job(
                group: collectives.Group, kind: str = kind, local_steps: int = local_steps
            ) -> Tensor:
                model, optimizer = _make(kind, op=OPS[op], local_steps=local_steps, groups=2)
                rates = _rates(optimizer)
                rows = []
                for step in range(STEPS):
                    _step(model, optimizer, step)
                    rates.step()
                    rows.append(flat(model))
                return torch.stack(rows)

            want = _definition(op, kind, size, local_steps)
            results = collectives.run_threads(size, job)
            for rank, got in enumerate(results):
                assert relative_error(got, want[:, rank]) <= trajectory_tolerance(STEPS)
                for step in range(STEPS):
                    together = (step + 1) % local_steps == 0
                    equal = torch.equal(got[step], results[rank - 1][step])
                    assert equal == together, (kind, local_steps, step)


def test_one_local_step_is_the_delta_method() -> None:
    def job(group: collectives.Group) -> None:
        assert isinstance(_make()[1], LocalStepsMethod)
        for op in OPS.values():
            one, default = (
                type(_make(op=op, **options)[1]).__mro__[1:]
                for options in ({"local_steps": 1}, {"local_steps": 1, "method": "delta"})
            )
            assert one == default and LocalStepsMethod not in one
            assert (DeltaMethod in one) == (op is hvd.Adasum)

    collectives.run_threads(2, job)


def test_reduction_after_every_step_gives_the_bits_of_the_delta_method() -> None:
    """reduce_local_steps() reduces as the delta method does, and begins a period anew."""

    def job(group: collectives.Group, by_itself: bool) -> Tensor:
        model, optimizer = _make(local_steps=1 if by_itself else 4)
        for step in range(STEPS):
            _step(model, optimizer, step)
            if not by_itself:
                optimizer.reduce_local_steps()
        return flat(model)

    want = collectives.run_threads(3, lambda group: job(group, True))[0]
    for got in collectives.run_threads(3, lambda group: job(group, False)):
        assert torch.equal(got, want)


def test_second_reduction_in_a_row_changes_nothing() -> None:
    def job(group: collectives.Group) -> None:
        model, optimizer = _make()
        rows = [flat(model)]
        for step in range(3):
            optimizer.reduce_local_steps()
            rows.append(flat(model))
            optimizer.reduce_local_steps()
            assert torch.equal(rows[-1], flat(model))
            _step(model, optimizer, step)
        assert torch.equal(rows[0], rows[1]) and not torch.equal(rows[1], rows[2])
        everyone = hvd.allgather(rows[-1].unsqueeze(0))
        assert torch.equal(everyone[0], everyone[1])

    collectives.run_threads(2, job)


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_checkpoint_between_two_reductions_goes_on_with_the_same_bits(stop: int) -> None:
    """Each rank's own; at a reduction it is like any optimizer's."""

    def job(group: collectives.Group, interrupted: bool) -> Tensor:
        model, optimizer = _make()
        rates = _rates(optimizer)
        for step in range(STEPS):
            if step == stop and interrupted:
                saved = copy.deepcopy([x.state_dict() for x in (model, optimizer, rates)])
                assert ("local_steps" in saved[1]) == (stop < 3)
                OPTIMIZERS["adam"](make_model().parameters()).load_state_dict(saved[1])
                model, optimizer = _make(seed=99)
                rates = _rates(optimizer)
                # It has begun a period of its own, which is dropped.
                _step(model, optimizer, 0)
                for each, part in zip((model, optimizer, rates), saved, strict=True):
                    each.load_state_dict(part)
            _step(model, optimizer, step)
            rates.step()
        return flat(model)

    want = collectives.run_threads(3, lambda group: job(group, False))[0]
    for got in collectives.run_threads(3, lambda group: job(group, True)):
        assert torch.equal(got, want)


def test_ranks_that_run_out_of_data_go_on_from_the_one_that_joined_last() -> None:
    def job(group: collectives.Group) -> tuple[Tensor, Tensor]:
        model, optimizer = _make(local_steps=2)
        for step in range(STEPS - 1 - 2 * (group.rank == 0)):
            _step(model, optimizer, step)
        last = hvd.join()
        assert last == group.size - 1
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)
        before = flat(model)
        _step(model, optimizer, 7)
        return before, flat(model)

    answers = collectives.run_threads(3, job)
    for before, after in answers:
        assert torch.equal(before, answers[0][0]) and torch.equal(after, answers[0][1])
        assert not torch.equal(before, after)


def test_parameters_broadcast_before_the_first_step_are_where_a_period_starts() -> None:
    def job(group: collectives.Group, seed: int) -> Tensor:
        model, optimizer = _make("sgd", seed=seed, local_steps=2)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        for step in range(2):
            _step(model, optimizer, step)
        return flat(model)

    want = collectives.run_threads(2, lambda group: job(group, 0))
    got = collectives.run_threads(2, lambda group: job(group, group.rank))
    assert all(torch.equal(answer, want[0]) for answer in [*want, *got])


def test_parameters_frozen_unfrozen_and_added_within_a_period_end_equal() -> None:
    def job(group: collectives.Group) -> Tensor:
        model, extra = make_model(1), make_model(2)
        model[0].requires_grad_(False)
        optimizer: Any = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Average, local_steps=3
        )
        for step in range(STEPS):
            if step == 1:
                model[0].requires_grad_(True)
            if step == 2:
                optimizer.add_param_group({"params": list(extra.parameters())})
                model[2].requires_grad_(False)
            optimizer.zero_grad()
            (loss_of(model, group.rank, step) + loss_of(extra, group.rank, step)).backward()
            optimizer.step()
        return flat(torch.nn.ModuleList([model, extra]))

    answers = collectives.run_threads(3, job)
    assert all(torch.equal(answer, answers[0]) for answer in answers)
    assert answers[0].isfinite().all()


def test_grad_scaler_within_a_period_skips_the_steps_of_one_rank_alone() -> None:
    def job(group: collectives.Group) -> tuple[list[bool], Tensor]:
        model = make_model().float()
        optimizer: Any = DistributedOptimizer(
            OPTIMIZERS["adamw"](model.parameters()), op=hvd.Adasum, local_steps=2
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        moved = []
        for step in range(4):
            optimizer.zero_grad()
            loss = model(torch.full((2, 6), 0.1 * (group.rank + 1 + step))).square().mean()
            if step == 2 and group.rank == 1:
                loss = loss * float("inf")
            before = flat(model)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            optimizer.synchronize()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            assert norm.isfinite() or step == 2
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
            moved.append(not torch.equal(before, flat(model)))
        return moved, flat(model)

    (moved, mine), (other, theirs) = collectives.run_threads(2, job)
    assert moved == [True] * 4 and other == [True, True, False, True]
    assert torch.equal(mine, theirs)


def test_local_steps_on_one_rank_are_the_plain_optimizer() -> None:
    def job(group: collectives.Group) -> tuple[Tensor, Tensor]:
        model, optimizer = _make()
        other = make_model()
        plain = OPTIMIZERS["adam"](other.parameters())
        for step in range(4):
            _step(model, optimizer, step)
            _step(other, plain, step)
        assert "local_steps" not in optimizer.state_dict()
        return flat(model), flat(other)

    got, want = collectives.run_threads(1, job)[0]
    assert torch.equal(got, want)


def test_local_steps_with_what_does_not_go_together_raises() -> None:
    def job(group: collectives.Group) -> None:
        both = r"local_steps=3 and {} exclude each other"
        for options, message in (
            ({"mode": "owners", "op": hvd.Average}, both.format("mode='owners'")),
            ({"backward_passes_per_step": 2}, both.format("backward_passes_per_step=2")),
            ({"method": "gradient"}, both.format("method='gradient'")),
            ({"step_in_backward": True}, both.format("step_in_backward=True")),
            ({"op": hvd.Sum}, "local_steps=3 needs op=Adasum or op=Average"),
            ({"local_steps": 0}, "local_steps must be an int >= 1, not 0"),
            ({"local_steps": True}, "local_steps must be an int >= 1, not True"),
        ):
            with pytest.raises(ValueError, match=message):
                _make(**options)
        optimizer = _make()[1]
        with pytest.raises(ValueError, match=both.format("backward_passes_per_step=2")):
            optimizer.set_backward_passes_per_step(2)
        optimizer.set_backward_passes_per_step(1)

    collectives.run_threads(2, job)
