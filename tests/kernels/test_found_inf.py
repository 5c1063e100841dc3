"""found_inf: the flag that every function that writes sets if a value is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kernels
from tests.kernels.cases import DTYPES, bits, misaligned, random
from tests.kernels.conftest import Backend

CUTS = (0, 5, 5, 40, 70)
# The tensors that each function writes, given two tensors of at least 40 elements and the flag.
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


@pytest.mark.parametrize("function", CALLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("numel", "move"), [(70, False), (70_001, False), (70_001, True)])
def test_found_inf_is_set_if_a_value_written_is_not_finite_and_kept_otherwise(
    backend: Backend, function: str, dtype: torch.dtype, numel: int, move: bool
) -> None:
    # In the emulator a whole tile of every kernel, at most 1024 elements here, and a tail.
    numel = min(numel, 1027) if backend.slow else numel
    found = torch.zeros((), device=backend.device)
    # The emulator is slow.
    cases = ((0.0, None), (0.0, math.inf), (1.0, None), (0.0, -math.inf), (0.0, math.nan))
    for seed, (before, special) in enumerate(cases[: 3 if backend.slow and move else 5]):
        a, b = (random(numel, dtype, backend.device, 2 * seed + i) for i in range(2))
        if move:
            a, b = misaligned(a), misaligned(b)
        if special is not None:
            # The last element lies in a tail of its own.
            a[numel - 1] = special
        found.fill_(before)
        written = CALLS[function](a, b, found_inf=found)
        finite = all(bool(one.isfinite().all()) for one in written)
        assert found.item() == (before if finite else 1.0)


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
def test_found_inf_of_an_unpacked_list_is_of_all_dtypes(
    backend: Backend, dtype: torch.dtype
) -> None:
    for overflows in (0, 1):
        tensors = [random(9, dtype, backend.device, 1), random(3, torch.float16, backend.device, 2)]
        layout = kernels.layout_of(tensors, dtype=torch.float32)
        buffer = kernels.pack(tensors, layout=layout)
        layout.views(buffer)[overflows][0] = 1e5 if overflows else math.nan
        found = torch.zeros((), device=backend.device)
        kernels.unpack(buffer, tensors, layout=layout, found_inf=found)
        assert found.item() == 1.0


def test_plan_sets_found_inf_at_every_run(backend: Backend) -> None:
    a, b = (random(70, torch.float16, backend.device, seed) for seed in (1, 2))
    found = torch.zeros((), device=backend.device)
    plan = kernels.plan_pack([a, b], found_inf=found)
    for scale in (1e6, 0.5, 1e6):
        plan(scale)
        assert found.item() == (scale > 1)
        found.zero_()


def test_found_inf_of_another_dtype_shape_device_or_place_is_refused() -> None:
    a, b = torch.ones(8), torch.ones(8)
    for wrong in (torch.zeros((), dtype=torch.float64), torch.zeros(2), torch.zeros(0)):
        with pytest.raises(TypeError, match=r"found_inf must be one float32, .*, got shape"):
            kernels.sum_n([a, b], found_inf=wrong)
    with pytest.raises(ValueError, match="found_inf is on meta"):
        kernels.sum_n([a, b], found_inf=torch.zeros((), device="meta"))
    layout = kernels.layout_of([a])
    for call in (
        lambda: kernels.sum_n([a, b], found_inf=b[3]),
        lambda: kernels.pack([a, b], found_inf=b[3:4]),
        lambda: kernels.scaled_add(a, a, out=b, found_inf=b[3]),
        lambda: kernels.unpack(torch.ones(16), [b], layout=layout, found_inf=b[3]),
    ):
        with pytest.raises(ValueError, match="found_inf overlaps"):
            call()


def test_found_inf_of_a_compiled_call_is_the_eager_one() -> None:
    a, b = (random(70, torch.float32, "cpu", seed) for seed in (1, 2))
    a[7] = math.inf
    eager, compiled = torch.zeros(()), torch.zeros(())

    def call(x: Tensor, y: Tensor, found: Tensor) -> Tensor:
        return kernels.adasum(x, y, CUTS, found_inf=found)

    expected = call(a, b, eager)
    found = torch.compile(call, backend="aot_eager", fullgraph=True)(a, b, compiled)
    assert bits(found) == bits(expected)
    assert eager.item() == compiled.item() == 1.0
