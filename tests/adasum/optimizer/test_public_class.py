"""DistributedOptimizer as a class: what its instances are, and methods that every one has."""

from __future__ import annotations

import abc
from typing import Any, Generic, TypeVar

import pytest
import torch

import collectives
from adasum import DistributedOptimizer
from tests.adasum.definition import loss_of, make_model
from tests.adasum.jobs import on_ranks, take_steps, ways

T = TypeVar("T")
EPS = torch.finfo(torch.float64).eps
WAYS = ways("average", "delta", "owners")


class Abstract(torch.optim.SGD, metaclass=abc.ABCMeta):
    pass


class Parametrised(torch.optim.SGD, Generic[T]):
    pass


class Slotted(torch.optim.SGD):
    __slots__ = ("extra",)


class Counting(DistributedOptimizer):
    """A user's subclass."""

    steps_taken = 0

    def step(self, closure: Any = None) -> Any:
        self.steps_taken += 1
        return super().step(closure)


@pytest.mark.parametrize("way", sorted(WAYS))
@pytest.mark.parametrize("kind", [torch.optim.AdamW, Abstract, Parametrised])
def test_optimizer_of_any_kind_is_of_both_classes(kind: Any, way: str) -> None:
    def run(group: collectives.Group) -> None:
        optimizer = DistributedOptimizer(kind(make_model().parameters(), lr=0.1), **WAYS[way])
        assert isinstance(optimizer, DistributedOptimizer)
        assert isinstance(optimizer, kind)
        assert type(optimizer).__name__ == kind.__name__

    collectives.run_threads(2, run)
    assert not isinstance(kind(make_model().parameters(), lr=0.1), DistributedOptimizer)


@on_ranks(1)
def test_optimizer_with_slots_raises_type_error_and_names_them(group: collectives.Group) -> None:
    with pytest.raises(TypeError, match=r"optimizer must keep .* take __slots__ out"):
        DistributedOptimizer(Slotted(make_model().parameters(), lr=0.1))


def test_subclass_of_the_class_overrides_step() -> None:
    def run(group: collectives.Group, make: Any) -> tuple[torch.Tensor, Any]:
        model = make_model()
        optimizer = make(torch.optim.SGD(model.parameters(), lr=0.1))
        return take_steps(model, optimizer, 2), optimizer

    got, optimizer = collectives.run_threads(2, lambda group: run(group, Counting))[0]
    want, _ = collectives.run_threads(2, lambda group: run(group, DistributedOptimizer))[0]
    assert isinstance(optimizer, Counting) and optimizer.steps_taken == 2
    assert torch.equal(got, want)


@pytest.mark.parametrize("way", sorted(WAYS))
@on_ranks(2)
def test_methods_of_other_modes_do_nothing_or_their_own(group: collectives.Group, way: str) -> None:
    """A script calls them whatever it was started with."""
    model = make_model()
    optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters()), **WAYS[way])
    loss_of(model, group.rank, 0).backward()
    optimizer.step()
    optimizer.consolidate_state_dict(to=None)
    assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))


@pytest.mark.parametrize("way", sorted(WAYS))
def test_clip_grad_norm_by_every_method_clips_what_step_takes(way: str) -> None:
    def run(group: collectives.Group) -> tuple[float, float]:
        model = make_model()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), **WAYS[way])
        loss_of(model, group.rank, 0).backward()
        norm = optimizer.clip_grad_norm_(1e-3).item()
        kept = [p.grad for p in model.parameters() if p.grad is not None]
        optimizer.step()
        return norm, torch.nn.utils.get_total_norm(kept).item()

    norms, kept = zip(*collectives.run_threads(2, run), strict=True)
    alone = way == "delta"
    assert (norms[0] != norms[1]) == alone
    # float64: of n squares and of the scaling each rounds by at most eps, n below 1000. torch adds
    # 1e-6 to the norm that it divides by.
    assert all(norm > 1e-3 for norm in norms)
    assert all(each <= 1e-3 * (1 + 1000 * EPS) for each in kept)
    if way != "owners":
        for norm, each in zip(norms, kept, strict=True):
            assert each >= 1e-3 * norm / (norm + 1e-6) * (1 - 1000 * EPS)
