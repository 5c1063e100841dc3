"""found_inf and max_abs: what every function that writes reports beside its output."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from tests.kernels.cases import DTYPES, bits, misaligned, random
from tests.kernels.conftest import Backend

CUTS = (0, 5, 5, 40, 70)
# Given two tensors of at least 40 elements and the findings, what each function writes.
CALLS: dict[str, Callable[..., list[Tensor]]] = {
    "pack": lambda a, b, **given: [kernels.pack([a, b], scale=0.7, **given)],
    "unpack": lambda a, b, **given: kernels.unpack(
        kernels.pack([a, b]), [a, b], scale=0.7, **given
    ),
    "sum_n": lambda a, b, **given: [kernels.sum_n([a, b, a], scale=0.3, out=b, **given)],
    "scaled_add": lambda a, b, **given: [kernels.scaled_add(a, b, alpha=-0.3, beta=0.7, **given)],
    "combine": lambda a, b, **given: [
        kernels.combine(a, b, kernels.dot_and_norms(a, b, cuts(a)), cuts(a), out=a, **given)
    ],
    "adasum": lambda a, b, **given: [kernels.adasum(a, b, cuts(a), **given)],
    "weighted_sum": lambda a, b, **given: [
        kernels.weighted_sum([a, b], factors(a.device), cuts(a), **given)
    ],
}


def cuts(tensor: Tensor) -> tuple[int, ...]:
    return (*CUTS[:-1], tensor.numel())


def factors(device: torch.device) -> Tensor:
    return random((len(CUTS) - 1, 2), torch.float64, str(device), 9)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@pytest.mark.parametrize("function", CALLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("numel", "move"), [(70, False), (70_001, False), (70_001, True)])
def test_findings_are_the_largest_magnitude_written_and_whether_all_is_finite(
    backend: Backend, function: str, dtype: torch.dtype, numel: int, move: bool
) -> None:
    # In the emulator a whole tile of every kernel, at most 1024 elements here, and a tail.
    numel = min(numel, 1027) if backend.slow else numel
    largest = torch.full((1,), 1e30, dtype=wide(dtype), device=backend.device)
    found = torch.zeros((), device=backend.device)
    # What is finite leaves a flag as it was. The emulator is slow.
    cases = ((0.0, None), (0.0, math.inf), (1.0, None), (0.0, -math.inf), (0.0, math.nan))
    for seed, (before, special) in enumerate(cases[: 3 if backend.slow and move else 5]):
        a, b = (random(numel, dtype, backend.device, 2 * seed + i) for i in range(2))
        if move:
            a, b = misaligned(a), misaligned(b)
        if special is not None:
            # The last element lies in a tail of its own.
            a[numel - 1] = special
        found.fill_(before)
        # Every second time there is one without the other.
        both = seed % 2 == 0
        written = CALLS[function](a, b, found_inf=found, max_abs=largest if both else None)
        expected = kernels.max_abs_reference(written)
        # Nothing is rounded: the largest of the values as they were written, NaN for NaN.
        assert (
            not both
            or torch.equal(largest.double().cpu(), expected.reshape(1).cpu())
            or (expected.isnan() and largest.isnan())
        )
        assert found.item() == (before if expected.isfinite() else 1.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_found_inf_is_of_what_is_written_and_not_of_sums_on_the_way(
    backend: Backend, dtype: torch.dtype
) -> None:
    big = torch.full((70,), torch.finfo(dtype).max, dtype=dtype, device=backend.device)
    found = torch.zeros((), device=backend.device)
    kernels.sum_n([big, big], scale=0.25, found_inf=found)
    # Twice the largest float16 is no trouble in float32; every other dtype has its wide range.
    assert found.item() == (0.0 if dtype == torch.float16 else 1.0)
    kernels.sum_n([big, big], found_inf=found.zero_())
    assert found.item() == 1.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_max_abs_of_zeros_and_of_nothing_is_zero(backend: Backend, dtype: torch.dtype) -> None:
    largest = torch.full((), math.nan, dtype=wide(dtype), device=backend.device)
    for numel in (0, 5):
        zeros = torch.full((numel,), -0.0, dtype=dtype, device=backend.device)
        calls: list[Callable[[], Any]] = [
            lambda x=zeros: kernels.pack([x], max_abs=largest),
            lambda x=zeros: kernels.unpack(kernels.pack([x]), [x], max_abs=largest),
            lambda x=zeros: kernels.sum_n([x], scale=1.0, max_abs=largest),
            lambda x=zeros: kernels.scaled_add(x, x, max_abs=largest),
            lambda x=zeros: kernels.adasum(x, x, max_abs=largest),
        ]
        for call in calls:
            largest.fill_(math.nan)
            call()
            assert bits(largest) == bytes(largest.element_size())


def test_max_abs_of_many_blocks_is_the_same_bits_each_time() -> None:
    a, b = (random(300_001, torch.float32, "cpu", seed) for seed in (1, 2))
    a[77_777] = 1e-45
    largest = torch.zeros(())
    for _ in range(3):
        total = kernels.sum_n([a, b], max_abs=largest)
        assert largest.item() == total.abs().max().item()


@pytest.mark.parametrize("dtype", DTYPES)
def test_max_abs_of_an_unpacked_list_is_of_all_dtypes(backend: Backend, dtype: torch.dtype) -> None:
    tensors = [random(9, dtype, backend.device, 1), random(3, torch.float64, backend.device, 2)]
    layout = kernels.layout_of(tensors, dtype=torch.float32)
    buffer = random(layout.numel, torch.float32, backend.device, 3)
    largest = torch.zeros((), dtype=torch.float64, device=backend.device)
    written = kernels.unpack(buffer, tensors, layout=layout, scale=3.0, max_abs=largest)
    assert largest.item() == kernels.max_abs_reference(written).item()


def test_plan_sets_max_abs_at_every_run(backend: Backend) -> None:
    a, b = (random(70, torch.float32, backend.device, seed) for seed in (1, 2))
    largest = torch.zeros((), device=backend.device)
    plan = kernels.plan_pack([a, b], max_abs=largest)
    for scale in (4.0, 0.5):
        assert kernels.max_abs_reference([plan(scale)]).item() == largest.item()


def test_findings_of_wrong_dtypes_or_places_are_refused() -> None:
    a, b = torch.ones(8), torch.ones(8)
    with pytest.raises(TypeError, match=r"max_abs must be one float32, .*got .*float64"):
        kernels.sum_n([a, b], max_abs=torch.zeros((), dtype=torch.float64))
    with pytest.raises(TypeError, match=r"max_abs must be one float64, .*got .*float32"):
        kernels.sum_n([a, b], dtype=torch.float64, max_abs=torch.zeros(()))
    with pytest.raises(ValueError, match="max_abs overlaps out"):
        kernels.sum_n([a, b], out=a, max_abs=a[3:4])
    with pytest.raises(ValueError, match=r"max_abs overlaps tensors\[1\]"):
        kernels.pack([a, b], max_abs=b[3:4])
    flag, layout = torch.zeros(()), kernels.layout_of([a])
    for call in (
        lambda: kernels.sum_n([a, b], found_inf=b[3]),
        lambda: kernels.scaled_add(a, a, out=b, found_inf=b[3]),
        lambda: kernels.unpack(torch.ones(16), [b], layout=layout, found_inf=b[3]),
    ):
        with pytest.raises(ValueError, match="found_inf overlaps"):
            call()
    with pytest.raises(ValueError, match="found_inf overlaps max_abs"):
        kernels.adasum(a, b, found_inf=flag, max_abs=flag)


def test_max_abs_of_a_compiled_call_is_the_eager_one() -> None:
    a, b = (random(70, torch.float32, "cpu", seed) for seed in (1, 2))
    eager, compiled = torch.zeros(()), torch.zeros(())

    def call(x: Tensor, y: Tensor, largest: Tensor) -> Tensor:
        return kernels.adasum(x, y, CUTS, max_abs=largest)

    expected = call(a, b, eager)
    found = torch.compile(call, backend="aot_eager", fullgraph=True)(a, b, compiled)
    assert torch.equal(found, expected) and torch.equal(eager, compiled) and eager > 0
