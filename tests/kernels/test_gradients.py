"""Gradients of pack, unpack, sum_n and scaled_add, and what has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import kernels
from tests.kernels.cases import random
from tests.kernels.conftest import Backend

F16, F32, F64 = torch.float16, torch.float32, torch.float64
SHAPES = ((3, 2), (5,), ())


def leaves(dtype: torch.dtype = F64, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[Tensor]:
    return [random(s, dtype, "cpu", i).requires_grad_() for i, s in enumerate(shapes)]


def unpacked(buffer: Tensor, **options: Any) -> list[Tensor]:
    tensors = [torch.zeros(shape, dtype=buffer.dtype) for shape in SHAPES]
    return kernels.unpack(buffer, tensors, **options)


def buffer_leaf() -> list[Tensor]:
    return [random(kernels.pack(leaves()).numel(), F64, "cpu", 7).requires_grad_()]


ROWS = ((4, 3),) * 3
# name: inputs, kernels' function of them, torch's.
LINEAR: dict[str, tuple[Callable[[], list[Tensor]], Callable[..., Any], Callable[..., Any]]] = {
    "pack": (
        leaves,
        lambda *t: kernels.pack(t, scale=0.3),
        lambda *t: torch.cat([torch.nn.functional.pad(x.reshape(-1) * 0.3, (0, 8 - x.numel()))
                              for x in t]),
    ),
    "unpack": (
        buffer_leaf,
        lambda b: tuple(unpacked(b, scale=0.3)),
        lambda b: (b[:6].view(3, 2) * 0.3, b[8:13] * 0.3, b[16] * 0.3),
    ),
    "sum_n": (
        lambda: leaves(shapes=ROWS),
        lambda *t: kernels.sum_n(t, scale=-0.7, order="tree", accumulate=t[0].dtype),
        lambda *t: (t[0] + t[1] + t[2]) * -0.7,
    ),
    "scaled_add": (
        lambda: leaves(shapes=ROWS[:2]),
        lambda a, b: kernels.scaled_add(a, b, alpha=0.3, beta=-2.0),
        lambda a, b: 0.3 * a - 2.0 * b,
    ),
}  # fmt: skip


def nonlinear(call: Callable[..., Any]) -> Callable[..., Tensor]:
    """A function of a call's results whose derivatives of any order are not zero."""

    def function(*tensors: Tensor) -> Tensor:
        found = call(*[tensor.sin() for tensor in tensors])
        found = found if isinstance(found, tuple) else (found,)
        total: Tensor = sum((one.exp() * one).sum() for one in found)  # type: ignore[assignment]
        return total

    return function


def near(found: Any, expected: Any) -> bool:
    # A product, a sum and the functions around them: some roundings of float64.
    pairs = zip(torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(expected),
                strict=True)  # fmt: skip
    return all(torch.allclose(x, y, rtol=100 * torch.finfo(F64).eps, atol=1e-14) for x, y in pairs)


@pytest.mark.parametrize("name", LINEAR)
def test_gradients_of_both_orders_are_right(cpu_path: str, name: str) -> None:
    make, call, torchs = LINEAR[name]
    inputs = make()
    assert gradcheck(call, inputs)
    assert gradgradcheck(nonlinear(call), inputs)
    assert near(call(*inputs), torchs(*inputs))


def test_gradients_on_every_backend(backend: Backend) -> None:
    a, b = (random((5, 3), F32, backend.device, i).requires_grad_() for i in (1, 2))
    packed = kernels.pack([a, b], scale=0.5)
    total = kernels.sum_n([packed, packed], scale=0.5)
    (kernels.scaled_add(total, packed, alpha=2.0, beta=4.0)).sum().backward()
    # d/da of 2 * 0.5 * (p + p) + 4 p is 6, of p = a / 2 3: all exact.
    assert (a.grad == 3.0).all() and (b.grad == 3.0).all()  # type: ignore[union-attr]


def test_gradients_have_the_inputs_dtype_and_reach_beyond_float32() -> None:
    a, b = leaves(F16, ((40,),))[0], leaves(F32, ((40,),))[0]
    kernels.scaled_add(a, b, alpha=0.5, beta=1e-42, dtype=F64).sum().mul(1e10).backward()
    assert a.grad is not None and a.grad.dtype == F16 and a.grad.isinf().all()
    # 1e-42 as float32 is off by a thousandth.
    assert b.grad is not None and torch.equal(b.grad, torch.full((40,), 1e-32))


@pytest.mark.parametrize("grad", ["none", "expanded", "transposed", "channels last"])
def test_gradients_of_any_strides_come_back_and_missing_ones_are_zero(grad: str) -> None:
    (a,) = leaves(F64, ((2, 3, 4, 5),))
    layout = kernels.layout_of([a, a])
    buffer = kernels.pack([a.detach(), a.detach()], layout=layout).requires_grad_()
    first, second = kernels.unpack(buffer, [torch.zeros_like(a.detach()) for _ in "12"])
    incoming = {
        "none": torch.ones(()),
        "expanded": random((1, 3, 1, 1), F64, "cpu", 1).expand(2, 3, 4, 5),
        "transposed": random((5, 4, 3, 2), F64, "cpu", 1).permute(3, 2, 1, 0),
        "channels last": random((2, 3, 4, 5), F64, "cpu", 1).to(memory_format=torch.channels_last),
    }[grad]
    expected = incoming.expand(2, 3, 4, 5)
    (first * incoming).sum().backward()
    assert buffer.grad is not None
    assert torch.equal(buffer.grad[:120].view_as(a), expected) and not buffer.grad[120:].any()
    for call in (lambda x: kernels.sum_n([x]), lambda x: kernels.scaled_add(x, x, beta=0.0)):
        a.grad = None
        call(a).backward(expected)
        assert a.grad is not None and torch.equal(a.grad, expected)
    assert second.grad_fn is not None


def test_unpack_with_gradients_refuses_tensors_that_overlap() -> None:
    (buffer,), memory = buffer_leaf(), torch.zeros(40, dtype=F64)
    for tensors in ([memory[:6], memory[5:9]], [memory[:6], buffer.detach()[:3]]):
        with pytest.raises(ValueError, match="overlap"):
            kernels.unpack(buffer[:16], tensors)
    assert kernels.unpack(buffer[:0], []) == []


def test_only_tensors_that_require_gradients_get_one() -> None:
    a, b, c = leaves(F64, ROWS)
    b.requires_grad_(False)
    for total in (kernels.sum_n([a, b, c]), kernels.scaled_add(b, c), kernels.pack([b, a])):
        assert total.requires_grad
        total.sum().backward()
    assert b.grad is None and c.grad is not None
    with torch.no_grad():
        assert not kernels.sum_n([a, b, c]).requires_grad
    assert not kernels.sum_n([b, b]).requires_grad


A, B = (torch.ones(6, dtype=F64) for _ in "12")
NEEDS: dict[str, Callable[[Tensor], Any]] = {
    "a": lambda x: kernels.adasum(x, B),
    "b": lambda x: kernels.dot_and_norms(A, x),
    "dots": lambda x: kernels.combine(A, B, torch.ones(1, 3, dtype=F64) * x[0]),
    "tensors[1]": lambda x: kernels.sum_n([A, x], out=torch.empty_like(A)),
    "tensors[0]": lambda x: kernels.pack([x, A], out=torch.empty(16, dtype=F64)),
    "tensors[1] of gram": lambda x: kernels.gram([A, x]),
    "coefficients": lambda x: kernels.weighted_sum([A], x[:1].view(1, 1)),
    "partials": lambda x: kernels.adasum_coefficients(x[:1].view(1, 1, 1, 1), []),
    "out": lambda x: kernels.scaled_add(A, B, out=x),
    "found_inf": lambda x: kernels.sum_n([A], found_inf=x[0].float()),
    "a of a call with found_inf": lambda x: kernels.scaled_add(x, B, found_inf=torch.zeros(())),
    "plan's a": lambda x: kernels.plan_scaled_add(x, B),
    "plan's tensors[1]": lambda x: kernels.plan_pack([A, x]),
    "plan's out": lambda x: kernels.plan_adasum(A, B, out=x),
    "rebound tensors[0]": lambda x: kernels.plan_sum_n([A, B]).rebind([x, B]),
    "unpacked tensors[1]": lambda x: kernels.unpack(torch.ones(16, dtype=F64), [A.clone(), x]),
}


NAMES = {case: case.split()[0 if " of " in case else -1] for case in NEEDS}


@pytest.mark.parametrize("case", NEEDS)
def test_what_has_no_derivative_names_the_argument_and_detach(case: str) -> None:
    name = NAMES[case].replace("[", r"\[").replace("]", r"\]")
    for x in (torch.ones(6, dtype=F64, requires_grad=True), A.clone().requires_grad_() * 1.0):
        before = x.detach().clone()
        with pytest.raises(ValueError, match=rf"^{name} requires grad, .*{name}\.detach\(\)"):
            NEEDS[case](x)
        assert torch.equal(x.detach(), before)
    with torch.no_grad():
        NEEDS[case](x)


@pytest.mark.parametrize("case", [case for case in NEEDS if case not in ("dots", "found_inf")])
def test_what_has_no_derivative_names_the_argument_with_a_tangent(case: str) -> None:
    name = NAMES[case].replace("[", r"\[").replace("]", r"\]")
    with forward_ad.dual_level():
        x = forward_ad.make_dual(A.clone(), B)
        with pytest.raises(ValueError, match=rf"^{name} has a tangent, .*unpack_dual\({name}"):
            NEEDS[case](x)


@pytest.mark.parametrize("name", LINEAR)
def test_there_are_no_derivatives_in_forward_mode(name: str) -> None:
    make, call, _ = LINEAR[name]
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(one.detach(), torch.ones_like(one)) for one in make()]
        with pytest.raises(
            ValueError, match=r"has a tangent, but \w+ has no derivative in forward"
        ):
            call(*duals)


@pytest.mark.parametrize("name", [*LINEAR, "adasum", "plan"])
@pytest.mark.parametrize("transform", ["vmap", "grad", "jacfwd", "functionalize"])
def test_what_a_transform_wraps_is_named(name: str, transform: str) -> None:
    def function(x: Tensor) -> Any:
        if name in LINEAR:
            call = LINEAR[name][1]
            return call(x) if name == "unpack" else call(x, x, *[x] * (name == "sum_n"))
        return kernels.adasum(x, x) if name == "adasum" else kernels.plan_sum_n([x, x])

    with pytest.raises((TypeError, ValueError), match=r"^(a|buffer|tensors\[0\]) (has|requires)"):
        getattr(torch.func, transform)(function)(torch.ones(2, 17))
