"""Calls that C makes again: with what the tensors hold now."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import kernels
from tests.kernels.cases import DTYPES, bits, poisoned, random
from tests.kernels.conftest import forget_calls, recognise_in_python
from tests.kernels.recall_case import SHAPE, Call, Case


@pytest.fixture(autouse=True)
def no_call_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_calls(monkeypatch)


def in_python(monkeypatch: pytest.MonkeyPatch, call: Call) -> Any:
    with monkeypatch.context() as patched:
        recognise_in_python(patched)
        return call()


@pytest.mark.usefixtures("in_c")
@pytest.mark.parametrize("function", ["pack", "unpack", "sum_n", "scaled_add"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [False, True], ids=["", "wide"])
@pytest.mark.parametrize("given", [False, True], ids=["", "out"])
@pytest.mark.parametrize("flag", [False, True], ids=["", "found_inf"])
def test_the_bits_are_pythons(
    function: str,
    dtype: torch.dtype,
    wide: bool,
    given: bool,
    flag: bool,
    monkeypatch: pytest.MonkeyPatch,
    no_python: Callable[[], None],
) -> None:
    case = Case(function, dtype, wide, given, flag)
    expected = []
    for seed in range(4):
        case.fill(seed, bad=seed == 2)
        expected.append(in_python(monkeypatch, case.results))
    assert not flag or [found[-1] for found in expected] == [0.0, 0.0, 1.0, 0.0]
    for _ in range(3):
        case.call()
    no_python()
    for seed, want in enumerate(expected):
        case.fill(seed, bad=seed == 2)
        assert case.results() == want
    found = case.call()
    if function == "unpack":
        assert all(map(lambda one, other: one is other, found, case.tensors))
    elif given:
        assert found is case.out


@pytest.mark.usefixtures("in_c")
@pytest.mark.parametrize("function", ["pack", "unpack", "sum_n", "scaled_add"])
def test_autograd_sees_what_c_writes(function: str, no_python: Callable[[], None]) -> None:
    case = Case(function, torch.float32, False, True, True)
    case.fill(1)
    for _ in range(3):
        case.call()
    no_python()
    written = case.tensors if function == "unpack" else [case.whole]
    assert case.found_inf is not None
    watched = [*case.tensors, case.whole, case.found_inf]
    before = [tensor._version for tensor in watched]
    case.call()
    for tensor, version in zip(watched, before, strict=True):
        changed = tensor is case.found_inf or any(tensor is one for one in written)
        assert tensor._version == version + changed


@pytest.mark.usefixtures("in_c")
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 1, 4), (1, 5, 1), (2, 3, 4)])
def test_what_c_allocates(shape: tuple[int, ...], no_python: Callable[[], None]) -> None:
    a = random(shape, torch.float32, "cpu", 1).requires_grad_()
    b = random(shape, torch.float32, "cpu", 2)
    with torch.device("meta"):
        for _ in range(3):
            kernels.sum_n([a, b])
    kernels.sum_n([a, b])
    no_python()
    first, second = kernels.sum_n([a, b]), kernels.sum_n([a, b])
    assert first.data_ptr() != second.data_ptr()
    assert first.shape == shape and first.stride() == torch.empty(shape).stride()
    assert torch.equal(first, a.detach() + b) and not first.requires_grad
    with torch.device("meta"):
        assert torch.equal(kernels.sum_n([a, b]), first)


@pytest.mark.usefixtures("in_c")
def test_a_sum_into_one_of_its_tensors(no_python: Callable[[], None]) -> None:
    tensors = [random(50, torch.float32, "cpu", seed) for seed in range(3)]
    for _ in range(4):
        kernels.sum_n(tensors, out=tensors[1])
    no_python()
    expected = tensors[0] + tensors[1] + tensors[2]
    assert kernels.sum_n(tensors, out=tensors[1]) is tensors[1]
    assert torch.equal(tensors[1], expected)


@pytest.mark.usefixtures("in_c")
def test_as_many_tensors_as_a_model_has(no_python: Callable[[], None]) -> None:
    tensors = [random(1 + i % 7, torch.float32, "cpu", i) for i in range(300)]
    layout = kernels.layout_of(tensors)
    for _ in range(3):
        buffer = kernels.unpack(kernels.pack(tensors, layout=layout), tensors, layout=layout)
    before = [tensor.clone() for tensor in tensors]
    out = poisoned(layout.numel, torch.float32, "cpu")
    for _ in range(3):
        kernels.pack(tensors, layout=layout, out=out)
    kernels.unpack(out, tensors, layout=layout)
    no_python()
    out.fill_(torch.nan)
    kernels.pack(tensors, layout=layout, out=out)
    assert all(map(torch.equal, layout.views(out), before))
    assert len(buffer) == 300


@pytest.mark.usefixtures("in_c")
def test_big_ones_have_all_threads_and_leave_the_others_theirs(
    no_python: Callable[[], None],
) -> None:
    a, b, out = (random(1 << 20, torch.float32, "cpu", seed) for seed in range(3))
    for _ in range(3):
        kernels.scaled_add(a, b, alpha=2.0, out=out)
    no_python()
    out.fill_(torch.nan)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(kernels.scaled_add(a, b, alpha=2.0, out=out), b + 2.0 * a)
    finally:
        torch.set_num_threads(before)


SCALES = [2, -3, 0, 0.0, -0.0, 1e300, float("nan"), float("inf"), np.float64(0.7)]


@pytest.mark.parametrize("scale", SCALES, ids=repr)
def test_scales(scale: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = (random(SHAPE, torch.float32, "cpu", seed) for seed in (1, 2))
    calls: list[Call] = [
        lambda: kernels.sum_n([a, b], scale=scale),
        lambda: kernels.pack([a, b], scale=scale),
        lambda: kernels.scaled_add(a, b, alpha=scale),
        lambda: kernels.scaled_add(a, b, beta=scale),
        lambda: kernels.scaled_add(a, b, alpha=1e-30, beta=1e30),
    ]
    for call in calls:
        expected = bits(in_python(monkeypatch, call))
        for _ in range(5):
            assert bits(call()) == expected


@pytest.mark.parametrize("unsafe", [3e-40, 1e-30, 1e30, 1e300, -4e-40])
def test_coefficients_that_leave_floats_range(
    unsafe: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are no less exact where others came before."""
    a, b = (random(SHAPE, torch.float32, "cpu", seed) * 1e10 for seed in (1, 2))
    for alpha, beta in ((unsafe, 0.0), (0.0, unsafe)):
        call = partial(kernels.scaled_add, a, b, alpha=alpha, beta=beta)
        expected = bits(in_python(monkeypatch, call))
        for _ in range(4):
            kernels.scaled_add(a, b)
        assert bits(call()) == expected


def test_what_was_added_in_double_says_nothing_of_float(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = (random(1000, torch.float32, "cpu", seed) for seed in (1, 2))
    expected = bits(in_python(monkeypatch, lambda: kernels.scaled_add(a, b, alpha=0.3)))
    for _ in range(4):
        kernels.scaled_add(a, b, alpha=1e-30)
    for _ in range(3):
        assert bits(kernels.scaled_add(a, b, alpha=0.3)) == expected
