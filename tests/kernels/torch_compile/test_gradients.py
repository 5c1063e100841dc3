"""Gradients in traced code: compiled, exported and made by make_fx."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch.fx.experimental.proxy_tensor import make_fx

import kernels
from tests.kernels.cases import random
from tests.kernels.torch_compile.cases import F32, compiled, flat

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


def test_what_has_no_derivative_is_an_error_while_tracing() -> None:
    a, b, _ = several(1)
    for call in (lambda a, b: kernels.adasum(a, b), lambda a, b: kernels.sum_n([a], out=b * 1)):
        with pytest.raises(ValueError, match=r"requires grad, but .*\.detach\(\)"):
            torch.compile(call, backend="aot_eager")(a, b)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("function", [kernels.adasum, kernels.scaled_add])
def test_exported_programs_say_that_they_have_no_gradients(
    function: Callable[..., Tensor], strict: bool
) -> None:
    class Model(torch.nn.Module):
        def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
            return function(a, b) + c

    # torch does not see while it traces that gradients will be asked for.
    plain = tuple(tensor.detach() for tensor in several(1))
    program = torch.export.export(Model(), plain, strict=strict).module()
    with torch.no_grad():
        assert flat(program(*several(2))) == flat(Model()(*several(2)))
    with pytest.raises(ValueError, match=r"requires grad, but torch traced this call without"):
        program(*several(2))


def test_make_fx_records_backward_passes() -> None:
    def step(*tensors: Tensor) -> Any:
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        return torch.autograd.grad(model(*leaves), leaves)

    tensors = [tensor.detach() for tensor in several(1)]
    assert flat(make_fx(step)(*tensors)(*tensors)) == flat(step(*tensors))


def test_a_tangent_in_compiled_code_is_an_error_as_in_eager_mode() -> None:
    x = torch.ones(4)
    call = torch.compile(
        lambda x: torch.func.jvp(lambda one: kernels.scaled_add(one, one), (x,), (x,)),
        backend="aot_eager",
        fullgraph=True,
    )
    with pytest.raises(Unsupported):
        call(x)
