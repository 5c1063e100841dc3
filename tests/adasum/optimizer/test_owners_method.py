"""mode="owners": the bits of the all-reduce run, with each state on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import adasum as hvd
import collectives
from adasum import DistributedOptimizer
from tests.adasum import trainings
from tests.adasum.definition import OPTIMIZERS, flat, make_model
from tests.adasum.jobs import OPS, on_ranks, wrapped

STEPS = 4
Make = Callable[[Any], torch.optim.Optimizer]


def _two_groups(make: Make, model: torch.nn.Sequential) -> torch.optim.Optimizer:
    """An optimizer with a group for each layer, and another rate for each."""
    optimizer = make([{"params": [*layer.parameters()]} for layer in (model[2], model[0])])
    optimizer.param_groups[1]["lr"] *= 0.5
    return optimizer


def _train(make: Make, dtype: torch.dtype = torch.float64, **options: Any) -> Tensor:
    """Parameters [STEPS, P] of two groups, whose rates two schedules change."""
    model = make_model().to(dtype)
    optimizer: Any = DistributedOptimizer(
        _two_groups(make, model), model.named_parameters(), **options
    )
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimizer, [lambda step: 0.9**step, lambda step: 1.0 / (1 + step)]
    )
    rows = []
    for step in range(STEPS):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * hvd.rank() + step)
        model(torch.randn(4, 6, generator=generator).to(dtype)).square().sum().backward()
        optimizer.step()
        rates.step()
        rows.append(flat(model))
    return torch.stack(rows)


@pytest.mark.parametrize("op", sorted(OPS))
@pytest.mark.parametrize("size", [2, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 5))])
def test_owners_under_rd_and_rechd_give_the_bits_of_the_all_reduce_run(size: int, op: str) -> None:
    """Adasum by the gradient method under the same names. Sums without a name have rechd's bits."""
    reduced = {"op": OPS[op], **({"method": "gradient"} if op == "Adasum" else {})}
    owned = {"op": OPS[op], "mode": "owners"}
    dtype = torch.float64 if size == 4 else torch.float32

    def job(_: Any) -> None:
        for kind, make in OPTIMIZERS.items():
            for algorithm in ("rd", "rechd"):
                want = _train(make, dtype, algorithm=algorithm, **reduced)
                assert want.isfinite().all()
                got = _train(make, dtype, algorithm=algorithm, **owned)
                assert torch.equal(got, want), (kind, algorithm)
        if op != "Adasum":
            assert torch.equal(_train(make, dtype, **owned), want)

    collectives.run_threads(size, job)


# Those that clip need optimizer.clip_grad_norm_, and a checkpoint needs consolidate_state_dict.
_ALIKE = [
    trainings.groups,
    trainings.accumulation,
    trainings.compressed,
    trainings.closures,
    trainings.autocast,
    trainings.unused_parameters,
    trainings.frozen_shared_and_added,
    trainings.two_optimizers,
    trainings.predivided,
    trainings.process_sets,
    trainings.sparse,
]


@pytest.mark.parametrize("size", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_trainings_of_every_kind_give_the_bits_of_the_all_reduce_run(size: int) -> None:
    def wrap(kind: Any, model: torch.nn.Module, **options: Any) -> Any:
        return wrapped(model, kind, algorithm="rechd", **options)

    def job(_: Any) -> None:
        for training in _ALIKE:
            want = training(wrap)
            got = training(lambda *args, **options: wrap(*args, mode="owners", **options))
            assert want.isfinite().all() and torch.equal(got, want), training.__name__

    collectives.run_threads(size, job)


def _bytes(state: Any) -> int:
    return sum(value.nbytes for each in state.values() for value in each.values())


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adagrad])
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_state_of_a_rank_is_its_share_and_the_largest_at_most(size: int, kind: Any) -> None:
    """Adagrad makes its state when it is made. A step counter of 4 bytes is not in the balance."""

    def job(group: collectives.Group) -> tuple[int, int, int]:
        layers = [torch.nn.Linear(n, 7) for n in (3, 50, 9, 20, 1, 33)]
        frozen = torch.nn.Linear(500, 7).requires_grad_(False)
        model = torch.nn.ModuleList([frozen, *layers])
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        trained = [p for p in model.parameters() if p.requires_grad]

        def step(optimizer: torch.optim.Optimizer) -> int:
            for parameter in trained:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            return _bytes({p: optimizer.state[p] for p in trained if p in optimizer.state})

        whole = step(kind(model.parameters()))
        owned = step(DistributedOptimizer(kind(model.parameters()), mode="owners"))
        return whole, owned, len(trained)

    answers = collectives.run_threads(size, job)
    whole, _, count = answers[0]
    copies = 2 if kind is torch.optim.Adam else 1
    largest = copies * 50 * 7 * 4 + 4
    assert sum(owned for _, owned, _ in answers) == whole
    for _, owned, _ in answers:
        assert owned <= (whole - 4 * count) / size + largest + 4 * count


@on_ranks(2)
def test_owners_with_what_does_not_go_together_raises(group: collectives.Group) -> None:
    model = make_model()
    for op in OPS.values():
        with pytest.raises(ValueError, match="mode='owners' and method='delta' exclude"):
            wrapped(model, op=op, mode="owners", method="delta")
    with pytest.raises(ValueError, match="mode='owners' and step_in_backward=True exclude"):
        wrapped(model, op=hvd.Adasum, mode="owners", step_in_backward=True)
    with pytest.raises(ValueError, match="mode must be 'owners' or None, got 'owner'"):
        wrapped(model, mode="owner")
    with pytest.raises(ValueError, match="by itself, which LBFGS does not"):
        wrapped(model, torch.optim.LBFGS, mode="owners")
    optimizer = wrapped(model, mode="owners")
    with pytest.raises(ValueError, match="to must be"):
        optimizer.consolidate_state_dict(to=2)


def test_adasum_of_large_buckets_goes_to_owners_alone_to_the_bits_of_its_all_reduce(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While an observer watches they are all-reduced; whoever takes Gram matrices is given them."""
    kinds: list[str] = []
    start = collectives.Request.start

    def counted(self: Any, *given: Any) -> Any:
        kinds.append(str(self).partition("(")[2].partition("(")[0])
        return start(self, *given)

    monkeypatch.setattr(collectives.Request, "start", counted)

    class Sees:
        def __init__(self) -> None:
            self.grams = 0

        def before_reduction(self, names: Any, tensors: Any) -> None:
            raise AssertionError("it takes Gram matrices")

        def after_reduction(self, token: Any, tensors: Any) -> None:
            raise AssertionError("it takes Gram matrices")

        def after_gram(self, names: Any, gram: Any) -> None:
            self.grams += 1

    def job(group: collectives.Group, watched: bool) -> tuple[Tensor, int]:
        model = torch.nn.Linear(300, 300)
        for parameter in model.parameters():
            parameter.data.fill_(0.01)
        optimizer, observer = wrapped(model, mode="owners", op=hvd.Adasum), Sees()
        for step in range(3):
            optimizer.set_observer(observer if watched and step != 1 else None)
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + group.rank)
            model(torch.randn(4, 300, generator=generator)).square().mean().backward()
            optimizer.step()
        return flat(model), observer.grams

    plain = collectives.run_threads(3, lambda group: job(group, False))
    assert set(kinds) == {"reduce_to_owners"}
    watched = collectives.run_threads(3, lambda group: job(group, True))
    assert set(kinds) == {"reduce_to_owners", "grouped_all_reduce"}
    assert all(torch.equal(got, plain[0][0]) and grams == 2 for got, grams in watched)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("leave_out", ["skipped step", "synchronized batch"])
def test_mark_of_an_overflow_goes_with_its_gradient(set_to_none: bool, leave_out: str) -> None:
    """Also where gradients are zeroed in place, so that the next ones have the same memory."""

    def job(group: collectives.Group, mode: str | None) -> Tensor:
        model = make_model().float()
        optimizer: Any = wrapped(model, mode=mode, algorithm="rechd")
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
        for step in range(4):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss = model(torch.full((2, 6), 0.1 * (group.rank + 1 + step))).square().mean()
            if step == 1 and group.rank == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if step == 1 and leave_out == "synchronized batch":
                optimizer.synchronize()
                continue
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == (4.0 if leave_out == "synchronized batch" else 2.0)
        return flat(model)

    wanted = collectives.run_threads(2, lambda group: job(group, None))
    for got in collectives.run_threads(2, lambda group: job(group, "owners")):
        assert torch.equal(got, wanted[0])
