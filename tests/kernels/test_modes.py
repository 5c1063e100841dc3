"""Calls and plans under torch's modes, under torch.compile and in a capture of a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch.utils._python_dispatch import TorchDispatchMode

import adasum
import kernels
from collectives import Operands, Piece
from tests.kernels.cases import random


class Noted(TorchDispatchMode):
    """Notes the names of this library's operators, and runs all."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "adasum":
            name = func.__name__.partition(".")[0]
            self.names.append(name.removesuffix("_8"))
        return func(*args, **(kwargs or {}))


def pair(numel: int = 70, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return random(numel, dtype, "cpu", 1), random(numel, dtype, "cpu", 2)


def every_call(a: Tensor, b: Tensor) -> list[Tensor]:
    packed = kernels.pack([a, b])
    dots = kernels.dot_and_norms(a, b)
    return [
        packed,
        *kernels.unpack(packed, [torch.empty_like(a), torch.empty_like(b)]),
        kernels.sum_n([a, b]),
        kernels.scaled_add(a, b, beta=0.5),
        dots,
        kernels.combine(a, b, dots),
        kernels.adasum(a, b),
    ]


def test_dispatch_mode_sees_an_operator_a_call() -> None:
    a, b = pair()
    expected = every_call(a, b)
    with Noted() as noted:
        found = every_call(a, b)
    assert all(map(torch.equal, found, expected))
    assert noted.names == [
        *("pack", "dot_and_norms", "unpack", "sum_n", "scaled_add", "combine", "adasum")
    ]


PLANS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "pack": lambda a, b: kernels.plan_pack([a, b]),
    "unpack": lambda a, b: kernels.plan_unpack(torch.zeros(160), [a, b]),
    "sum_n": lambda a, b: kernels.plan_sum_n([a, b]),
    "scaled_add": kernels.plan_scaled_add,
    "dot_and_norms": kernels.plan_dot_and_norms,
    "combine": lambda a, b: kernels.plan_combine(a, b, torch.ones(1, 3, dtype=torch.float64)),
    "adasum": kernels.plan_adasum,
}


@pytest.mark.parametrize("function", PLANS)
def test_plan_is_neither_made_nor_bound_under_a_dispatch_mode(function: str) -> None:
    a, b = pair()
    plan = PLANS[function](a, b)
    with Noted():
        for make in (lambda: PLANS[function](a, b), lambda: plan.rebind([a, b])):
            with pytest.raises(RuntimeError, match=f"dispatch mode .*: call kernels.{function},"):
                make()
    plan()


def test_plan_is_made_outside_graphs_of_compiled_code() -> None:
    a, b = pair()

    def made(a: Tensor, b: Tensor) -> Tensor:
        return kernels.plan_adasum(a, b)()

    torch._dynamo.reset()
    assert torch.equal(torch.compile(made, backend="eager")(a, b), kernels.adasum(a, b))
    torch._dynamo.reset()
    with pytest.raises(Unsupported):
        torch.compile(made, backend="eager", fullgraph=True)(a, b)
    torch._dynamo.reset()


@pytest.mark.parametrize("function", PLANS)
def test_plan_is_run_but_neither_made_nor_bound_in_a_capture(
    function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair()
    plan: Any = PLANS[function](a, b)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for make in (lambda: PLANS[function](a, b), lambda: plan.rebind([a, b])):
        with pytest.raises(RuntimeError, match=f"CUDA graph .* call kernels.{function}$"):
            make()
    plan()
    every_call(a, b)


def test_adasum_is_bound_under_a_dispatch_mode_without_plans() -> None:
    a, b = pair()
    out = torch.empty_like(a)
    with Noted() as noted:
        run = adasum.Adasum.bind(Operands((Piece((a, b), out, 0),), 70, None, None))
        run()
    assert noted.names == ["adasum"] and torch.equal(out, kernels.adasum(a, b))
