"""Calls and plans under torch's modes, under torch.compile and in a capture of a CUDA graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import adasum
import kernels
from collectives import Operands, Piece
from tests.kernels.cases import random
from tests.kernels.test_plans import PLANS


class Noted(TorchDispatchMode):
    """Notes the names of this library's operators, and runs all."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "adasum":
            name = func.__name__.partition(".")[0]
            self.names.append(name.removesuffix("_10"))
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


@pytest.mark.parametrize("function", PLANS)
def test_plan_is_neither_made_nor_bound_under_a_dispatch_mode(function: str) -> None:
    tensors, name = [*pair()], function.split()[-1]
    plan = PLANS[function](tensors)
    with Noted():
        for make in (lambda: PLANS[function](tensors), lambda: plan.rebind(tensors)):
            with pytest.raises(RuntimeError, match=f"dispatch mode .*: call kernels.{name},"):
                make()
    plan()


@pytest.mark.parametrize("function", PLANS)
def test_plan_is_run_but_neither_made_nor_bound_in_a_capture(
    function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, name = [*pair()], function.split()[-1]
    plan: Any = PLANS[function](tensors)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for make in (lambda: PLANS[function](tensors), lambda: plan.rebind(tensors)):
        with pytest.raises(RuntimeError, match=f"CUDA graph .* call kernels.{name}$"):
            make()
    plan()
    every_call(*tensors)


def test_adasum_is_bound_under_a_dispatch_mode_without_plans() -> None:
    a, b = pair()
    out = torch.empty_like(a)
    with Noted() as noted:
        run = adasum.Adasum.bind(Operands((Piece((a, b), out, 0),), 70, None, None))
        run()
    assert noted.names == ["adasum"] and torch.equal(out, kernels.adasum(a, b))
