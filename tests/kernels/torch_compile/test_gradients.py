"""Derivatives in traced code: compiled, exported and made by make_fx."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import kernels
from kernels.call import LINEAR
from tests.kernels.cases import random
from tests.kernels.torch_compile.cases import F16, F32, F64, compiled, flat

# What torch itself deprecates in its compiler.
pytestmark = pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled", "ignore:.*torch.jit")


EPS = torch.finfo(F32).eps


def several(seed: int) -> list[Tensor]:
    return [random((5, 3), F32, "cpu", seed + i).requires_grad_() for i in range(3)]


def model(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Every linear function, of tensors of a graph."""
    packed = kernels.pack([a.sin(), b], scale=0.5)
    x, y = kernels.unpack(packed, [torch.zeros_like(a), torch.zeros_like(b)], scale=2.0)
    total = kernels.sum_n([x, y * c, c], scale=0.3)
    return kernels.scaled_add(total, x, alpha=2.0, beta=-0.5).exp().sum()


def gradients(call: Any, inputs: list[Tensor]) -> list[bytes]:
    return flat(torch.autograd.grad(call(*inputs), inputs))


def test_gradients_of_compiled_code_are_those_of_eager_mode() -> None:
    call, _ = compiled(model)
    for seed in (1, 2):
        assert gradients(call, several(seed)) == gradients(model, several(seed))


@pytest.mark.slow
def test_gradients_of_code_that_inductor_compiled_are_those_of_eager_mode() -> None:
    call = torch.compile(model, fullgraph=True)
    tensors = several(1)
    found, expected = (torch.autograd.grad(f(*tensors), tensors) for f in (call, model))
    for one, other in zip(found, expected, strict=True):
        # inductor rounds sin and exp in its own way.
        assert torch.allclose(one, other, rtol=20 * EPS, atol=0)


def test_findings_of_compiled_code_are_found_where_gradients_are_asked_for() -> None:
    call, _ = compiled(lambda a, b, flag: kernels.scaled_add(a, b, found_inf=flag))
    a, b, _ = several(1)
    flag = torch.zeros(())
    assert call(a, b, flag).requires_grad and flag.item() == 0
    with torch.no_grad():
        a[0, 0] = float("inf")
    call(a, b, flag).sum().backward()
    assert flag.item() == 1 and torch.equal(a.grad, torch.ones(5, 3))  # type: ignore[arg-type]


def test_what_has_no_derivative_is_an_error_while_tracing() -> None:
    a, b, _ = several(1)
    for call in (lambda a, b: kernels.adasum(a, b), lambda a, b: kernels.sum_n([a], out=b * 1)):
        with pytest.raises(ValueError, match=r"requires grad, but .*\.detach\(\)"):
            torch.compile(call, backend="aot_eager")(a, b)


@pytest.mark.parametrize("strict", [True, False])
def test_exported_programs_have_derivatives_or_say_that_they_have_none(strict: bool) -> None:
    class Model(torch.nn.Module):
        def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
            packed = kernels.pack([a.sin(), b], scale=0.5)
            total = kernels.scaled_add(kernels.sum_n([a, c]), b * c, beta=2.0)
            return total.exp() + packed[:15].view(5, 3)

    class Adasum(torch.nn.Module):
        def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
            return kernels.adasum(a, b) + c

    # torch does not see while it traces that gradients will be asked for.
    plain = tuple(tensor.detach() for tensor in several(1))
    program = torch.export.export(Model(), plain, strict=strict).module()
    expected = gradients(lambda *t: Model()(*t).sum(), several(2))
    assert gradients(lambda *t: program(*t).sum(), several(2)) == expected
    projection = torch.export.export(Adasum(), plain, strict=strict).module()
    with torch.no_grad():
        assert flat(projection(*several(2))) == flat(Adasum()(*several(2)))
    with pytest.raises(ValueError, match=r"requires grad, but torch traced this call without"):
        projection(*several(2))


def test_transforms_are_traced_and_what_has_no_rule_is_named() -> None:
    rows = random((4, 3), F32, "cpu", 1)

    def each(row: Tensor) -> Tensor:
        return kernels.scaled_add(row, row.sin(), alpha=2.0).square().sum()

    def moved(row: Tensor) -> Tensor:
        derivative: Tensor = torch.func.jvp(each, (row,), (row.cos(),))[1]
        return derivative

    # torch has no torch.func.grad of a registered operator in compiled code, and says so.
    cases = {torch.func.grad(each): False, moved: True, each: True}
    for function, compiles in cases.items():
        mapped = torch.vmap(function)
        for traced in (make_fx(mapped)(rows), *([compiled(mapped)[0]] if compiles else [])):
            assert torch.allclose(traced(rows), mapped(rows), rtol=20 * EPS, atol=0)
    with pytest.raises(TypeError, match="adasum of tensors inside vmap has no rule"):
        make_fx(torch.vmap(lambda row: kernels.adasum(row, row)))(rows)


def vector(seed: int, dtype: torch.dtype = F64) -> Tensor:
    return random(16, dtype, "cpu", seed)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck_of_operators_with_a_derivative(requires_grad: bool) -> None:
    slots, unused = [0, 16, 32], [0]
    f16, f64 = kernels.DTYPES.index(F16), kernels.DTYPES.index(F64)
    settings: dict[str, tuple[Any, ...]] = {
        "pack": ([vector(1), vector(2)[:5].clone()], slots, unused, [f64], 64, [0.5], "list", None),
        "unpack": (
            [random(32, F64, "cpu", 3)],
            slots,
            [16, 5],
            [f64, f16],
            64,
            [0.5],
            "list",
            None,
        ),
        "sum_n": ([vector(1), vector(2), vector(3)], unused, unused, [f64], 0, [0.5], "tree", F64),
        "scaled_add": (
            [vector(1), vector(2, F16)],
            unused,
            unused,
            [f64],
            0,
            [0.5, -2.0],
            "list",
            None,
        ),
    }
    assert {*settings} == {*LINEAR}
    for name, (inputs, *rest) in settings.items():
        given = [one.requires_grad_(requires_grad) for one in inputs]
        operator = getattr(torch.ops.adasum, f"{name}_functional_2").default
        torch.library.opcheck(operator, (given, *rest))
