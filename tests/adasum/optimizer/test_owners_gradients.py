"""mode="owners": gradients are on their owners; norms and non-finite values are every rank's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import collectives
from adasum import DistributedOptimizer
from tests.adasum.definition import flat, loss_of, make_model, relative_error
from tests.adasum.jobs import wrapped

STEPS = 4


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("size", [1, 3, 5])
def test_clip_grad_norm_clips_by_the_norm_over_all_owners(size: int, norm_type: float) -> None:
    def job(group: collectives.Group, mode: str | None) -> tuple[Tensor, Tensor]:
        model = make_model()
        optimizer: Any = wrapped(model, "momentum", mode=mode, algorithm="rechd")
        norms = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, group.rank, step).backward()
            if mode is None:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type)
            else:
                norm = optimizer.clip_grad_norm_(0.1, norm_type)
            norms.append(norm)
            optimizer.step()
        return flat(model), torch.stack(norms)

    want, norms = collectives.run_threads(size, lambda group: job(group, None))[0]
    answers = collectives.run_threads(size, lambda group: job(group, "owners"))
    for got, theirs in answers:
        assert torch.equal(got, answers[0][0]) and torch.equal(theirs, answers[0][1])
        assert torch.equal(got, want) and torch.equal(theirs, norms)


def test_clip_grad_norm_of_sparse_half_and_missing_gradients_clips() -> None:
    def job(group: collectives.Group, mode: str | None) -> Tensor:
        weights = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
        table = torch.nn.Embedding.from_pretrained(weights, freeze=False, sparse=True)
        half = torch.nn.Linear(3, 2).half()
        with torch.no_grad():
            half.weight.fill_(0.25)
            half.bias.zero_()
        model = torch.nn.ModuleList([table, half])
        optimizer: Any = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.5), mode=mode, algorithm="rechd"
        )
        half(table(torch.tensor([1, 2 + group.rank])).half()).float().square().sum().backward()
        norm = optimizer.clip_grad_norm_(0.125)
        optimizer.step()
        return torch.cat(
            [norm.float().reshape(1), *(p.float().reshape(-1) for p in model.parameters())]
        )

    want = collectives.run_threads(2, lambda group: job(group, None))[0]
    for got in collectives.run_threads(2, lambda group: job(group, "owners")):
        # Half-precision norms and updates round once each.
        assert relative_error(got, want) <= 4 * torch.finfo(torch.float16).eps
    with pytest.raises(ValueError, match="norm_type must be above 0"):
        collectives.run_threads(
            1, lambda group: wrapped(make_model(), mode="owners").clip_grad_norm_(1.0, 0.0)
        )


@pytest.mark.parametrize("size", [2, 3, 5])
def test_grad_scaler_on_a_non_finite_gradient_of_one_rank_skips_on_all(size: int) -> None:
    """With five ranks one of them owns nothing; all scales stay equal."""

    def job(group: collectives.Group, mode: str | None) -> Tensor:
        model = make_model().float()
        optimizer: Any = wrapped(model, "adamw", mode=mode, algorithm="rechd")
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        rows = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = model(torch.full((2, 6), 0.1 * (group.rank + 1 + step))).square().mean()
            factor = float("inf") if step == 1 and group.rank == size - 1 else 1.0
            hook = model[2].bias.register_hook(lambda g, factor=factor: g * factor)
            before = flat(model)
            scaler.scale(loss).backward()
            hook.remove()
            if step != 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(before, flat(model)) == (step == 1)
            assert scaler.get_scale() == (8.0 if step == 0 else 4.0)
            rows.append(flat(model))
        return torch.stack(rows)

    want = collectives.run_threads(size, lambda group: job(group, None))[0]
    for got in collectives.run_threads(size, lambda group: job(group, "owners")):
        assert torch.equal(got, want)
