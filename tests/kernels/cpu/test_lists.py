"""Lists of many tensors are checked all at once, which refuses what a check of each refuses."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kernels
from tests.kernels.cases import DTYPES, bits, random

COUNT = 20


class Subclass(Tensor):
    pass


def several(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = [(5, 3), (), (1, 7, 1), (40,)] * (COUNT // 4)
    return [random(shape, dtype, "cpu", seed + i) for i, shape in enumerate(shapes)]


def test_parameters_are_taken() -> None:
    plan, tensors = kernels.plan_pack(several(1)), several(2)
    tensors[0] = torch.nn.Parameter(torch.full((5, 3), 3.0))
    with torch.no_grad():
        for others in (tensors, several(3), several(4), tensors):
            plan.rebind(others)
            assert bits(plan()) == bits(kernels.pack(others))


def test_tensors_of_no_elements_are_taken() -> None:
    plan = kernels.plan_pack([torch.ones(3), torch.empty(0, 2)])
    plan.rebind([torch.zeros(3), torch.empty(0, 2)])
    assert not plan()[:3].any()


def shrunk() -> Tensor:
    tensor = torch.ones(5, 3)
    tensor.untyped_storage().resize_(56)
    return tensor


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "negative": (lambda: torch._neg_view(torch.ones(5, 3)), "is a negative view"),
    "sparse": (lambda: torch.ones(5, 3).to_sparse(), "not dense"),
    "mkldnn": (lambda: torch.ones(5, 3).to_mkldnn(), "not dense"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(5), torch.ones(3)]), "nested tensor"),
    "meta": (lambda: torch.ones(5, 3, device="meta"), "is on meta"),
    "complex": (lambda: torch.ones(5, 3, dtype=torch.complex64), "complex64"),
    "bfloat16": (lambda: torch.ones(5, 3, dtype=torch.bfloat16), "bfloat16"),
    "transposed": (lambda: torch.ones(3, 5).t(), "is not contiguous"),
    "strided": (lambda: torch.ones(5, 6)[:, ::2], "is not contiguous"),
    "expanded": (lambda: torch.ones(1, 3).expand(5, 3), "is not contiguous"),
    "shape": (lambda: torch.ones(15), r"is \(15,\)"),
    "list": (lambda: [1.0], "must be a torch.Tensor, not list"),
    "subclass": (lambda: torch.ones(5, 3).as_subclass(Subclass), "is a Subclass"),
    "torch's zeros": (lambda: torch._efficientzerotensor(5, 3), "has no memory of its own"),
    "shrunk": (shrunk, "reaches beyond its storage"),
    "requires grad": (lambda: torch.ones(5, 3, requires_grad=True), "requires grad, but autograd"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:.*mkldnn")
def test_what_cannot_be_read_is_refused_by_name(kind: str) -> None:
    make, words = REFUSED[kind]
    plan, tensors = kernels.plan_pack(several(1)), several(2)
    expected = bits(plan())
    tensors[4] = make()  # type: ignore[call-overload]
    with pytest.raises((TypeError, ValueError), match=rf"tensors\[4\] .*{words}|{words}"):
        plan.rebind(tensors)
    assert bits(plan()) == expected


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:.*mkldnn")
def test_direct_calls_on_lists_refuse_what_plans_refuse(kind: str) -> None:
    tensors = [random((5, 3), torch.float32, "cpu", i) for i in range(COUNT)]
    layout, out = kernels.layout_of(tensors), torch.full((5, 3), 7.0)
    buffer = torch.full((layout.numel,), 7.0)
    tensors[4] = REFUSED[kind][0]()  # type: ignore[call-overload]
    if kind != "bfloat16":
        for call in (
            lambda: kernels.pack(tensors, layout=layout, out=buffer),
            lambda: kernels.unpack(buffer, tensors, layout=layout),
        ):
            with pytest.raises((TypeError, ValueError), match=r"tensors\[4\] |layout holds"):
                call()
    with pytest.raises((TypeError, ValueError), match=r"tensors\[4\] "):
        kernels.sum_n(tensors, out=out)
    assert (buffer == 7).all() and (out == 7).all()


def test_direct_calls_on_lists_of_several_dtypes_have_the_bits_of_few() -> None:
    tensors = [random((5, 3), DTYPES[i % len(DTYPES)], "cpu", i) for i in range(COUNT)]
    layout = kernels.layout_of(tensors, dtype=torch.float32)
    buffer = kernels.pack(tensors, layout=layout, scale=0.5)
    for tensor, slot in zip(tensors, layout.views(buffer), strict=True):
        one = kernels.layout_of([tensor], dtype=torch.float32)
        (alone,) = one.views(kernels.pack([tensor], layout=one, scale=0.5))
        assert bits(slot) == bits(alone)
    back = kernels.unpack(buffer, [torch.empty_like(one) for one in tensors], layout=layout)
    for written, slot in zip(back, layout.views(buffer), strict=True):
        assert bits(written) == bits(slot.to(written.dtype))
    same = [random((5, 3), torch.float32, "cpu", i) for i in range(COUNT)]
    expected = sum(same[1:], same[0])
    assert bits(kernels.sum_n(same)) == bits(expected)


def test_inference_tensors_are_read_and_not_written() -> None:
    with torch.inference_mode():
        inside = several(2)
    plan = kernels.plan_pack(several(1))
    plan.rebind(inside)
    assert bits(plan()) == bits(kernels.pack(inside))
    layout = kernels.layout_of(inside)
    unpack = kernels.plan_unpack(torch.ones(layout.numel), several(1), layout=layout)
    with pytest.raises(ValueError, match=r"tensors\[0\] was made in inference mode"):
        unpack.rebind(inside)


def test_overlap_is_refused_and_the_old_tensors_stay() -> None:
    tensors = several(1)
    plan = kernels.plan_pack(tensors)
    expected = bits(plan())
    inside = several(2)
    inside[3] = plan.out[:40]
    with pytest.raises(ValueError, match=r"out overlaps tensors\[3\]"):
        plan.rebind(inside)
    plan.check()
    assert bits(plan()) == expected and math.prod(tensors[3].shape) == 40
