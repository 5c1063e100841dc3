"""What ranks run in the optimizer tests, as threads or as processes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

import adasum as hvd
from adasum import DistributedOptimizer
from collectives import run_threads
from tests.adasum.definition import OPTIMIZERS, flat, loss_of, make_model

OPS = {"Sum": hvd.Sum, "Average": hvd.Average, "Adasum": hvd.Adasum}
WAYS: dict[str, dict[str, Any]] = {
    "average": {"op": hvd.Average},
    "sum": {"op": hvd.Sum},
    "gradient": {"op": hvd.Adasum, "method": "gradient"},
    "owners": {"op": hvd.Average, "mode": "owners"},
    "delta": {"op": hvd.Adasum},
    "delta in backward": {"op": hvd.Adasum, "step_in_backward": True},
}


def on_ranks(size: int, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test on every one of so many ranks, which are threads; it gets its group first."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def on_each(*args: Any, **given: Any) -> None:
            run_threads(size, lambda group: test(group, *args, **given), **options)

        # For pytest, which looks for fixtures by the names of parameters.
        whole = inspect.signature(test)
        of_pytest = whole.replace(parameters=list(whole.parameters.values())[1:])
        on_each.__signature__ = of_pytest  # type: ignore[attr-defined]
        return on_each

    return decorate


def ways(*names: str) -> dict[str, dict[str, Any]]:
    """Return options of DistributedOptimizer, by the names of the ways in which it reduces."""
    return {name: WAYS[name] for name in names}


def wrapped(model: torch.nn.Module, kind: Any = "sgd", **options: Any) -> Any:
    """Return an optimizer of the model, by a name of OPTIMIZERS or a function of its parameters."""
    make = OPTIMIZERS[kind] if isinstance(kind, str) else kind
    return DistributedOptimizer(make(model.parameters()), model.named_parameters(), **options)


class Counting:
    """An observer that counts the reductions, and how many of them are in flight."""

    def __init__(self) -> None:
        self.in_flight = self.most = self.calls = 0
        self.names: list[str] = []

    def before_reduction(self, names: Any, tensors: Any) -> list[Tensor]:
        self.calls += 1
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        self.names += names
        return [tensor.clone() for tensor in tensors]

    def after_reduction(self, token: list[Tensor], tensors: Any) -> None:
        self.in_flight -= 1
        assert len(token) == len(tensors)


def take_steps(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    passes: int = 1,
    first: int = 0,
) -> Tensor:
    """Train a model of `make_model` on this rank's batches; return its parameters."""
    for step in range(first, first + steps):
        optimizer.zero_grad()
        for turn in range(passes):
            loss_of(model, hvd.rank(), step, turn).backward()
        optimizer.step()
    return flat(model)


def train(op: str, kind: str, passes: int, steps: int, **options: Any) -> Tensor:
    """Parameters [steps, P] after each step of this rank."""
    model = make_model()
    optimizer = wrapped(model, kind, op=OPS[op], backward_passes_per_step=passes, **options)
    rows = [take_steps(model, optimizer, 1, passes, first=step) for step in range(steps)]
    return torch.stack(rows)
