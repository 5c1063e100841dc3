"""Tensors that are more, or less, than memory of their own: the right answer, or a TypeError."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import kernels
from kernels.validation import check_memory_of
from tests.kernels.conftest import Backend

X = torch.ones(3, 4)


class Subclass(Tensor):
    """Adds nothing."""


def resized(tensor: Tensor, nbytes: int) -> Tensor:
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.empty(8)


NOT_PLAIN: dict[str, tuple[Callable[[], Any], str]] = {
    "subclass": (lambda: torch.ones(8).as_subclass(Subclass), "is a Subclass, .* plain tensor"),
    "fake": (fake, "is a FakeTensor"),
    "zeros of torch": (
        lambda: torch._efficientzerotensor(8),
        "has no memory of its own, like every tensor inside",
    ),
    "too short": (lambda: resized(torch.ones(8), 28), "reaches beyond its storage"),
    "emptied": (lambda: resized(torch.ones(8), 0), "reaches beyond its storage"),
}


def test_check_of_memory_counts_the_gaps_of_strided_tensors() -> None:
    with pytest.raises(TypeError, match=r"^x reaches beyond its storage"):
        check_memory_of("x", resized(torch.zeros(8)[::2], 24))


def channels_last() -> Tensor:
    return torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)


def transposed() -> Tensor:
    return torch.randn(2, 3, 5, 4).transpose(2, 3)


def contiguous() -> Tensor:
    return torch.randn(2, 3, 4, 5)


def dots() -> Tensor:
    return torch.ones(1, 3, dtype=torch.float64)


STRIDES = {"channels last": channels_last, "transposed": transposed, "contiguous": contiguous}
# Each takes two tensors and an output; these of one shape.
ELEMENTWISE: dict[str, Callable[[Tensor, Tensor, Tensor | None], Any]] = {
    "sum_n": lambda a, b, out: kernels.sum_n([a, b], out=out),
    "scaled_add": lambda a, b, out: kernels.scaled_add(a, b, out=out),
    "combine": lambda a, b, out: kernels.combine(a, b, dots(), out=out),
    "adasum": lambda a, b, out: kernels.adasum(a, b, out=out),
    "dot_and_norms": lambda a, b, out: kernels.dot_and_norms(a, b),
    "pack": lambda a, b, out: kernels.pack([a, b]),
    "unpack": lambda a, b, out: kernels.unpack(torch.ones(256), [a, b]),
    "plan_sum_n": lambda a, b, out: kernels.plan_sum_n([a, b], out=out),
    "plan_scaled_add": lambda a, b, out: kernels.plan_scaled_add(a, b, out=out),
    "plan_pack": lambda a, b, out: kernels.plan_pack([contiguous(), a]).rebind([b, a]),
    "sum_n of many": lambda a, b, out: kernels.sum_n([a, b] * 8, out=out),
}
WITHOUT_OUT = ("dot_and_norms", "pack", "unpack", "plan_pack")


def in_one_order(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_tensors_of_equal_strides_are_taken_and_others_named(backend: Backend, name: str) -> None:
    call, outs = ELEMENTWISE[name], (None,) if name in WITHOUT_OUT else (None, *STRIDES)
    for a, b, out in itertools.product(STRIDES, STRIDES, outs):
        kinds = [kind for kind in (a, b, out) if kind is not None]
        if {*kinds} == {"contiguous"}:
            continue
        tensors = [STRIDES[kind]() for kind in kinds]
        before = [in_one_order(one) for one in tensors]
        strides = [one.stride() for one in tensors]
        if name in ("pack", "unpack") or (len({*kinds}) == 1 and "plan" not in name):
            found = call(tensors[0], tensors[1], None if out is None else tensors[2])
            expected = call(before[0], before[1], None if out is None else before[2])
            # Dot products of about 120 are added in another order: 100 eps of float32 of them.
            near = {"rtol": 0.0, "atol": 1.4e-3} if name == "dot_and_norms" else {}
            torch.testing.assert_close(found, expected, **near)
            if name not in WITHOUT_OUT and name != "unpack":
                assert found.stride() == strides[0]
        else:
            words = r"^(a|b|out|tensors\[\d+\]) is not (contiguous|in memory).*: pass .*contiguous"
            with pytest.raises(ValueError, match=words):
                call(tensors[0], tensors[1], None if out is None else tensors[2])
            assert all(map(torch.equal, tensors, before))
        assert [one.stride() for one in tensors] == strides


def test_segments_are_of_contiguous_elements(backend: Backend) -> None:
    a, b = channels_last(), channels_last()
    for call in (kernels.dot_and_norms, kernels.adasum):
        with pytest.raises(ValueError, match="a is not contiguous, and segments are of contiguous"):
            call(a, b, (0, 60, 120))


def test_permuted_tensors_to_unpack_must_not_overlap(backend: Backend) -> None:
    memory = torch.zeros(10, 6)
    with pytest.raises(ValueError, match=r"tensors\[0\] and tensors\[1\] overlap in memory"):
        kernels.unpack(torch.ones(128), [memory[:6].t(), memory[5:].t()])
    assert not memory.any()


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "a": lambda x: kernels.adasum(x, torch.ones(8)),
    "b": lambda x: kernels.scaled_add(torch.ones(8), x),
    "tensors[1]": lambda x: kernels.sum_n([torch.ones(8), x]),
    "tensors[13]": lambda x: kernels.pack([*[torch.ones(8)] * 13, x]),
    "buffer": lambda x: kernels.unpack(x, [torch.ones(8)], layout=SMALL),
    "out": lambda x: kernels.scaled_add(torch.ones(8), torch.ones(8), out=x),
    "found_inf": lambda x: kernels.sum_n([torch.ones(8)], found_inf=x[:1]),
    "plan's tensors[0]": lambda x: kernels.plan_pack([x]),
}
SMALL = kernels.layout_of([torch.ones(8)], alignment=4)


@pytest.mark.parametrize("argument", FUNCTIONS)
def test_functions_name_what_has_no_memory_of_its_own(backend: Backend, argument: str) -> None:
    name = re.escape(argument.split()[-1])
    for kind in ("subclass", "fake", "zeros of torch", "too short", "emptied"):
        make, words = NOT_PLAIN[kind]
        # Of a shrunk storage the first element is still there.
        if argument != "found_inf" or kind in ("subclass", "fake"):
            with pytest.raises(TypeError, match=rf"^{name} {words}"):
                FUNCTIONS[argument](make())
