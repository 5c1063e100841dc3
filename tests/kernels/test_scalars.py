"""Scalars that are 0-d tensors: read where a call runs, and on a GPU by the kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kernels
from tests.kernels.cases import DTYPES, bits, random
from tests.kernels.conftest import Backend

F32, F64 = torch.float32, torch.float64


# Of two tensors and two scalars, of which all but the last take the first.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "pack": lambda a, b, s, t: kernels.pack([a, b], scale=s),
    "unpack": lambda a, b, s, t: kernels.unpack(
        kernels.pack([a, b]), [torch.empty_like(a), b.clone()], scale=s
    ),
    "sum_n": lambda a, b, s, t: kernels.sum_n([a, b], scale=s),
    "scaled_add": lambda a, b, s, t: kernels.scaled_add(a, b, alpha=s, beta=t),
}


def flat(value: Any) -> list[bytes]:
    return [bits(one) for one in (value if isinstance(value, list) else [value])]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_gives_the_bits_of_its_value(
    backend: Backend, function: str, dtype: torch.dtype
) -> None:
    a, b = (random((9, 5), F32, backend.device, seed) for seed in (1, 2))
    for value in (0.3, 1.0, float("inf")):
        scalar = torch.tensor(value, dtype=dtype, device=backend.device)
        expected = flat(FUNCTIONS[function](a, b, scalar.item(), 0.7))
        assert flat(FUNCTIONS[function](a, b, scalar, 0.7)) == expected
        # On another device than a GPU's tensors the host reads it.
        assert flat(FUNCTIONS[function](a, b, scalar.cpu(), 0.7)) == expected


def test_a_factor_beyond_float32_and_two_of_two_dtypes(backend: Backend) -> None:
    a, b = (random(40, F64, backend.device, seed) for seed in (1, 2))
    big = torch.tensor(1e200, dtype=F64, device=backend.device)
    small, add = torch.tensor(0.5, device=backend.device), FUNCTIONS["scaled_add"]
    assert flat(add(a, b, small, big)) == flat(add(a, b, 0.5, 1e200))


def test_a_plan_reads_the_value_at_each_run(backend: Backend) -> None:
    a, b = (random(40, F32, backend.device, seed) for seed in (1, 2))
    scale = torch.tensor(2.0, device=backend.device)
    plans = kernels.plan_pack([a, b]), kernels.plan_sum_n([a, b]), kernels.plan_scaled_add(a, b)
    for value in (2.0, 0.25):
        scale.fill_(value)
        for plan in plans:
            live = bits(plan(scale))
            assert live == bits(plan(value))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_wrong_scalars_are_named(function: str) -> None:
    a, b = torch.ones(3), torch.ones(3)
    name = "alpha" if function == "scaled_add" else "scale"
    for wrong, kind, text in [
        (torch.ones(1), ValueError, rf"{name} has shape \(1,\): pass a float or a 0-d tensor"),
        (torch.tensor(1), TypeError, f"{name} has dtype torch.int64"),
        (torch.tensor(1.0, requires_grad=True), ValueError, rf"pass {name}\.detach\(\)"),
        ("1", TypeError, f"{name} must be a float, got str"),
    ]:
        with pytest.raises(kind, match=text):
            FUNCTIONS[function](a, b, wrong, 1.0)
    with pytest.raises(TypeError, match=r"weights\[1\] must be a float, got Tensor"):
        kernels.adasum(a, b, weights=(1.0, torch.tensor(1.0)))


def test_the_gradient_is_scaled_by_the_value() -> None:
    a, b = (random(5, F32, "cpu", seed).requires_grad_() for seed in (1, 2))
    scale = torch.tensor(3.0)
    total = kernels.sum_n([kernels.scaled_add(a, b, alpha=scale, beta=0.5), a], scale=scale)
    kernels.pack([total], scale=scale).sum().backward()
    assert (a.grad == 36.0).all() and (b.grad == 4.5).all()  # type: ignore[union-attr]
