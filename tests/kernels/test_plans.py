"""Plans: the values of direct calls, what they hold and let go of, what they refuse."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from tests.kernels.cases import bits, misaligned, random
from tests.kernels.conftest import Backend

F32 = torch.float32
CUTS = (0, 16, 16, 70)


def pair(backend: Backend, seed: int, dtype: torch.dtype = F32) -> list[Tensor]:
    return [random(70, dtype, backend.device, 2 * seed + i) for i in range(2)]


def dots_of(a: Tensor, b: Tensor) -> Tensor:
    return kernels.dot_and_norms(a, b, CUTS)


def factors_of(pair: list[Tensor]) -> Tensor:
    return random((len(CUTS) - 1, 2), torch.float64, str(pair[0].device), 9)


# Of a pair: the plan, and the direct call with the same scalars as each run.
PLANS: dict[str, Callable[[list[Tensor]], kernels.Plan]] = {
    "pack": kernels.plan_pack,
    "unpack": lambda pair: kernels.plan_unpack(kernels.pack(pair), pair),
    "sum_n": kernels.plan_sum_n,
    "scaled_add": lambda pair: kernels.plan_scaled_add(*pair),
    "dot_and_norms": lambda pair: kernels.plan_dot_and_norms(*pair, CUTS),
    "combine": lambda pair: kernels.plan_combine(*pair, dots_of(*pair), CUTS),
    "adasum": lambda pair: kernels.plan_adasum(*pair, CUTS),
    "gram": lambda pair: kernels.plan_gram(pair, CUTS),
    "precise gram": lambda pair: kernels.plan_gram(pair, CUTS, precise=True),
    "weighted_sum": lambda pair: kernels.plan_weighted_sum(pair, factors_of(pair), CUTS),
}
DIRECT: dict[str, Callable[[list[Tensor], tuple[float, ...]], Tensor]] = {
    "pack": lambda pair, scalars: kernels.pack(pair, scale=scalars[0]),
    "sum_n": lambda pair, scalars: kernels.sum_n(pair, scale=scalars[0]),
    "scaled_add": lambda pair, scalars: kernels.scaled_add(
        *pair, alpha=scalars[0], beta=scalars[1]
    ),
    "dot_and_norms": lambda pair, scalars: dots_of(*pair),
    "adasum": lambda pair, scalars: kernels.adasum(*pair, CUTS),
    "gram": lambda pair, scalars: kernels.gram(pair, CUTS),
    "precise gram": lambda pair, scalars: kernels.gram(pair, CUTS, precise=True),
    "weighted_sum": lambda pair, scalars: kernels.weighted_sum(pair, factors_of(pair), CUTS),
}
SCALARS = {"pack": 1, "sum_n": 1, "scaled_add": 2}


@pytest.mark.parametrize("function", DIRECT)
def test_runs_of_a_plan_have_the_bits_of_direct_calls(backend: Backend, function: str) -> None:
    tensors = pair(backend, 1)
    plan: Any = PLANS[function](tensors)
    for seed, scale in enumerate((1.0, 0.5, -3.0)):
        for tensor, fresh in zip(tensors, pair(backend, seed), strict=True):
            tensor.copy_(fresh)
        scalars = (scale, 0.25)[: SCALARS.get(function, 0)]
        assert bits(plan(*scalars)) == bits(DIRECT[function](tensors, (scale, 0.25)))
        assert plan(*scalars) is plan.out


def test_plan_of_unpack_writes_into_its_tensors(backend: Backend) -> None:
    source, into = pair(backend, 1), pair(backend, 2)
    layout = kernels.layout_of(source)
    buffer = kernels.pack(source, layout=layout)
    plan = kernels.plan_unpack(buffer, into, layout=layout)
    for scale in (1.0, 2.0):
        written = plan(scale)
        assert all(one is other for one, other in zip(written, into, strict=True))
        for one, other in zip(into, source, strict=True):
            assert torch.equal(one, scale * other)


def test_plan_of_combine_reads_what_the_dots_then_hold(backend: Backend) -> None:
    a, b = pair(backend, 1)
    dots = torch.empty(len(CUTS) - 1, 3, dtype=torch.float64, device=backend.device)
    plan = kernels.plan_combine(a, b, dots, CUTS)
    for scale in (1.0, 4.0):
        a.mul_(scale)
        dots.copy_(dots_of(a, b))
        assert bits(plan()) == bits(kernels.adasum(a, b, CUTS))


@pytest.mark.parametrize("place", [0, 1])
def test_plan_in_place_follows_its_tensors(backend: Backend, place: int) -> None:
    tensors, others = pair(backend, 1), pair(backend, 2)
    plan = kernels.plan_adasum(*tensors, CUTS, out=tensors[place])
    expected = [kernels.adasum(*each, CUTS) for each in (tensors, others)]
    assert plan() is tensors[place] and torch.equal(tensors[place], expected[0])
    plan.rebind(others)
    assert plan() is others[place] and torch.equal(others[place], expected[1])


@pytest.mark.parametrize("function", DIRECT)
def test_plan_bound_again_computes_on_the_new_tensors(backend: Backend, function: str) -> None:
    plan: Any = PLANS[function](pair(backend, 1))
    scalars = (0.5, 0.25)[: SCALARS.get(function, 0)]
    plan(*scalars)
    shifted = [misaligned(tensor) for tensor in pair(backend, 3)]
    for tensors in (pair(backend, 2), shifted, pair(backend, 4)):
        plan.rebind(tensors)
        assert bits(plan(*scalars)) == bits(DIRECT[function](tensors, (0.5, 0.25)))


def test_plan_takes_another_output_when_bound_again(backend: Backend) -> None:
    tensors = pair(backend, 1)
    out = torch.empty(70, device=backend.device)
    plan = kernels.plan_sum_n(tensors, out=torch.empty_like(out))
    plan.rebind(tensors, out=out)
    assert plan() is out and torch.equal(out, tensors[0] + tensors[1])
    with pytest.raises(ValueError, match="out has shape"):
        plan.rebind(tensors, out=out[:5])


@pytest.mark.parametrize("function", PLANS)
def test_released_plan_lets_go_and_runs_only_when_bound_again(
    backend: Backend, function: str
) -> None:
    tensors = pair(backend, 1)
    plan: Any = PLANS[function](tensors)
    plan()
    gone = [weakref.ref(tensor) for tensor in tensors]
    del tensors
    gc.collect()
    assert all(reference() is not None for reference in gone)
    plan.release()
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    for call in (plan, plan.check):
        with pytest.raises(RuntimeError, match="released: rebind it"):
            call()
    plan.rebind(pair(backend, 2))
    plan.check()
    plan()


@pytest.mark.parametrize("function", PLANS)
def test_bound_again_a_plan_lets_the_old_tensors_go(backend: Backend, function: str) -> None:
    tensors = pair(backend, 1)
    plan = PLANS[function](tensors)
    gone = [weakref.ref(tensor) for tensor in tensors]
    plan.rebind(pair(backend, 2))
    del tensors
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def negative() -> Tensor:
    return torch._neg_view(torch.ones(6))


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "number": (lambda: 3, TypeError, r"tensors\[1\] must be a torch.Tensor"),
    "dtype": (lambda: torch.ones(6).double(), TypeError, r"tensors\[1\] is .*float64"),
    "shape": (lambda: torch.ones(3, 2), ValueError, r"tensors\[1\] is \(3, 2\)"),
    "size": (lambda: torch.ones(7), ValueError, r"tensors\[1\] is \(7,\)"),
    "strides": (lambda: torch.ones(12)[::2], ValueError, "not contiguous"),
    "negative": (negative, ValueError, "is a negative view"),
    "sparse": (lambda: torch.ones(6).to_sparse(), ValueError, "not dense"),
    "device": (lambda: torch.ones(6, device="meta"), ValueError, "is on meta"),
    "gradient": (lambda: torch.ones(6, requires_grad=True), ValueError, "but autograd does not"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("function", ["pack", "sum_n", "unpack"])
@pytest.mark.parametrize("count", [2, 20])
def test_plan_refuses_unequal_tensors_and_keeps_what_it_has(
    function: str, wrong: str, count: int
) -> None:
    tensors = [torch.ones(6) for _ in range(count)]
    plan: Any = PLANS[function](tensors)
    make, error, words = WRONG[wrong]
    with pytest.raises(error, match=words):
        plan.rebind([torch.ones(6), make(), *tensors[2:]])
    with pytest.raises(ValueError, match=f"tensors holds 1 but the plan was made for {count}"):
        plan.rebind(tensors[:1])
    plan.check()
    plan()


def test_plan_refuses_tensors_that_overlap_what_is_written() -> None:
    memory, others = torch.zeros(100), [torch.ones(6), torch.ones(6)]
    pack = kernels.plan_pack(others, out=memory[:32])
    with pytest.raises(ValueError, match=r"out overlaps tensors\[1\]"):
        pack.rebind([others[0], memory[3:9]])
    unpack = kernels.plan_unpack(memory[:32], others)
    with pytest.raises(ValueError, match=r"tensors\[0\] and tensors\[1\] overlap"):
        unpack.rebind([memory[50:56], memory[55:61]])


def test_errors_of_rebind_name_its_own_arguments() -> None:
    a, b, buffer = torch.ones(6), torch.ones(6), torch.ones(32)
    add = kernels.plan_scaled_add(a, b, out=torch.empty(6))
    unpack = kernels.plan_unpack(buffer, [a, b])
    with pytest.raises(TypeError, match=r"^tensors\[1\] is .*float64"):
        add.rebind([a, b.double()])
    with pytest.raises(ValueError, match=r"^out overlaps tensors\[1\] in"):
        add.rebind([a, buffer[1:7]], out=buffer[:6])
    with pytest.raises(ValueError, match=r"^out overlaps tensors\[0\] in"):
        unpack.rebind([buffer[:6], b])
    with pytest.raises(ValueError, match=r"^out has shape \(31,\)"):
        unpack.rebind([a, b], out=buffer[1:])


def test_plan_reads_what_inference_mode_made_and_refuses_to_write_it() -> None:
    with torch.inference_mode():
        inside = [torch.ones(6), torch.ones(6)]
    unpack = kernels.plan_unpack(torch.ones(32), [torch.ones(6), torch.ones(6)])
    with pytest.raises(ValueError, match=r"tensors\[0\] was made in inference mode"):
        unpack.rebind(inside)
    pack = kernels.plan_pack([torch.zeros(6), torch.zeros(6)])
    pack.rebind(inside)
    assert bits(pack()) == bits(kernels.pack(inside))


def test_runs_leave_version_counters_and_direct_calls_move_them() -> None:
    a, b = torch.ones(8), torch.ones(8)
    plan = kernels.plan_sum_n([a, b], out=a)
    before = a._version
    plan()
    assert a._version == before
    kernels.sum_n([a, b], out=a)
    assert a._version > before


def test_scalars_of_a_run_are_checked() -> None:
    plan = kernels.plan_pack([torch.ones(3)])
    with pytest.raises(TypeError, match="scale must be a float, got str"):
        plan("1")  # type: ignore[arg-type]
    assert plan(2)[0] == 2
    add = kernels.plan_scaled_add(torch.ones(3), torch.ones(3))
    with pytest.raises(TypeError, match="beta must be a float, got bool"):
        add(1.0, True)
    assert add(2, 3)[0] == 5


def test_plans_of_nothing_run() -> None:
    empty = torch.empty(0)
    assert kernels.plan_pack([])().numel() == 0
    assert kernels.plan_unpack(torch.empty(0), [])() == []
    assert kernels.plan_adasum(empty, empty)().numel() == 0
    assert kernels.plan_dot_and_norms(empty, empty)().tolist() == [[0.0, 0.0, 0.0]]
    assert kernels.plan_sum_n([empty, empty])().numel() == 0


def test_coefficients_beyond_floats_range_are_exact_in_a_plan() -> None:
    a, b = (random(70, F32, "cpu", seed) * 1e10 for seed in (1, 2))
    plan = kernels.plan_scaled_add(a, b)
    for alpha, beta in ((3e-40, 0.0), (1.0, 1.0), (0.0, 1e30), (0.3, 0.7)):
        assert bits(plan(alpha, beta)) == bits(kernels.scaled_add(a, b, alpha=alpha, beta=beta))
