"""Every optimizer of torch, wrapped by DistributedOptimizer, on ranks with equal data.

The optimizers and their settings are those of torch's own tests (optim_db, in its wheel). On equal
data the average over ranks is what one rank has, and so is Adasum: a step must be the plain one's.
"""

from __future__ import annotations

import copy
import functools
import unittest
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import adasum as hvd
from tests.torch_conformance import cpu_for_gpus

STEPS = 3
METHODS: dict[str, dict[str, Any]] = {
    "average": {"op": hvd.Average},
    "owners": {"op": hvd.Average, "mode": "owners"},
    "adasum_gradient": {"op": hvd.Adasum, "method": "gradient"},
    "adasum_delta": {"op": hvd.Adasum},
    "adasum_in_backward": {"op": hvd.Adasum, "step_in_backward": True},
}
# They install before + (after - before), which rounds; the others take the plain step itself.
_BY_DIFFERENCE = {"adasum_delta", "adasum_in_backward"}


class _Real(nn.Module):
    # Of two dimensions: Muon refuses others.
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4, bias=False)
        self.second = nn.Linear(4, 3, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.first(inputs).tanh()).square().mean()


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(4, 5, dtype=torch.cfloat))
        self.second = nn.Linear(4, 3, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second((inputs.cfloat() @ self.first.T).abs()).square().mean()


class _Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3, sparse=True)

    def forward(self, inputs: Tensor) -> Tensor:
        # Each index once: a sum over equal ones rounds in another order after a reduction.
        indices = inputs.abs().mul(3).long().remainder(7).unique()
        return self.embedding(indices).square().mean()


_MODELS = {"": _Real, "complex_": _Complex, "sparse_": _Sparse}


@functools.cache
def _database() -> dict[str, Any]:
    cpu_for_gpus.import_helpers()
    from torch.testing._internal.common_optimizers import optim_db

    return {each.name: each for each in optim_db}


def names() -> list[str]:
    """test_[complex_|sparse_]METHOD_OPTIMIZER, as far as the optimizer takes such gradients."""
    found = []
    for name, info in _database().items():
        kinds = {
            "": not info.only_supports_sparse_grads,
            "complex_": info.supports_complex,
            "sparse_": info.supports_sparse or info.only_supports_sparse_grads,
        }
        kinds_taken = [kind for kind, takes in kinds.items() if takes]
        found += [f"test_{kind}{method}_{name}" for kind in kinds_taken for method in METHODS]
    return [*found, *(f"test_schedulers_{name}" for name in _database())]


def case(name: str, _: Any) -> unittest.TestCase:
    """Make a rank's test, which is the same on all."""
    what, _, optimizer = name.removeprefix("test_").rpartition("_")
    kind = next((kind for kind in ("complex_", "sparse_") if what.startswith(kind)), "")
    test: unittest.TestCase = type(
        "TestOptimizers",
        (unittest.TestCase,),
        {name: lambda _: _run(_database()[optimizer], kind, what.removeprefix(kind))},
    )(name)
    return test


def _run(info: Any, kind: str, method: str) -> None:
    hvd.init()
    try:
        if method == "schedulers":
            kind = "sparse_" if info.only_supports_sparse_grads else ""
            for scheduler in info.scheduler_inputs:
                _compare(info, kind, "average", {"lr": 0.01}, scheduler)
        else:
            for settings in _settings(info, kind, method):
                _compare(info, kind, method, settings)
    finally:
        hvd.shutdown()


def _settings(info: Any, kind: str, method: str) -> Iterator[dict[str, Any]]:
    """Yield torch's settings; by two methods each once more by every implementation of a step."""
    if kind == "sparse_":
        yield info.metadata_for_sparse[0]
        return
    implementations: list[dict[str, bool]] = [{}]
    if not kind and method in ("average", "adasum_delta"):
        implementations += [{"foreach": True}] if "foreach" in info.supported_impls else []
        implementations += [{"fused": True}] if "cpu" in info.supports_fused_on else []
    for given in info.optim_inputs_func(device="cpu"):
        for implementation in implementations:
            yield {**given.kwargs, **implementation}


def _compare(
    info: Any,
    kind: str,
    method: str,
    settings: dict[str, Any],
    schedulers: Iterator[Callable[..., Any]] | tuple[()] = (),
) -> None:
    """Step plainly and wrapped, each time from equal parameters, and compare."""
    torch.manual_seed(1)
    plain_model = _MODELS[kind]()
    model = copy.deepcopy(plain_model)
    plain = info.optim_cls(plain_model.parameters(), **copy.deepcopy(settings))
    wrapped = hvd.DistributedOptimizer(
        info.optim_cls(model.parameters(), **copy.deepcopy(settings)),
        model.named_parameters(),
        **METHODS[method],
    )
    rates = [(make(plain), make(wrapped)) for make in schedulers]
    for step in range(STEPS):
        before = [each.detach().clone() for each in model.parameters()]
        inputs = torch.randn(6, 5)
        losses = [
            _step(optimizer, each, inputs, info.step_requires_closure)
            for optimizer, each in ((plain, plain_model), (wrapped, model))
        ]
        for pair in rates:
            for loss, scheduler in zip(losses, pair, strict=True):
                by_loss = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
                scheduler.step(loss) if by_loss else scheduler.step()
        _require_equal(
            f"{settings}, step {step}", before, plain_model, model, method in _BY_DIFFERENCE
        )
        with torch.no_grad():
            for ours, theirs in zip(model.parameters(), plain_model.parameters(), strict=True):
                ours.copy_(theirs)


def _step(optimizer: Any, model: nn.Module, inputs: Tensor, by_closure: bool) -> float:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(inputs)
        loss.backward()
        return loss

    if by_closure:
        return float(optimizer.step(closure))
    loss = closure()
    optimizer.step()
    return float(loss)


def _require_equal(
    what: str, before: list[Tensor], plain: nn.Module, wrapped: nn.Module, rounds: bool
) -> None:
    """Raise AssertionError where the wrapped step is not the plain one.

    after - before and its sum with before round once each, by half an ulp of the difference and of
    the result. One more of each covers what a rank's half of an average loses to rounding.
    """
    pairs = zip(plain.named_parameters(), wrapped.parameters(), before, strict=True)
    for (name, theirs), ours, start in pairs:
        if not rounds:
            assert torch.equal(theirs, ours), f"{what}: {name} is not bit for bit the plain one"
            continue
        theirs, ours = theirs.detach(), ours.detach()
        bound = torch.finfo(theirs.dtype).eps * ((theirs - start).abs() + theirs.abs())
        worst = ((ours - theirs).abs() - bound).max().item()
        assert worst <= 0, f"{what}: {name} is off by {worst:.1e} more than rounding"
