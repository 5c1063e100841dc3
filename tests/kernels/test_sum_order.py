"""sum_n in a specified order, each sum of two rounded to a dtype: to the bit, on every backend."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from collectives.schedules.algorithm import Order
from collectives.schedules.halving import balanced_tree
from kernels.arithmetic import joined
from tests.kernels.cases import (
    DTYPES,
    SPECIAL,
    bits,
    canonical,
    misaligned,
    poisoned,
    random,
)

# Without and with pairs, and deeper than what is unrolled. The emulator takes a second for each
# kernel that is compiled.
COUNTS = [1, 3, 4, 11]
WIDE = {dtype: torch.float64 if dtype == torch.float64 else torch.float32 for dtype in DTYPES}


def values(count: int, numel: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """Of magnitudes so far apart that another order makes other bits; with special values."""
    made = []
    for seed in range(count):
        spread = torch.exp2(4 * random(numel, torch.float64, "cpu", 1000 + seed))
        tensor = spread * random(numel, torch.float64, "cpu", seed)
        if numel > 4 * len(SPECIAL):
            tensor[: len(SPECIAL)] = SPECIAL.roll(seed)
            tensor[len(SPECIAL) : 2 * len(SPECIAL)] = SPECIAL
        made.append(tensor.to(dtype).to(device))
    return made


def added(expression: Any, tensors: list[Tensor]) -> Tensor:
    """The sum that nested pairs of indices say, by torch.add of two."""
    if isinstance(expression, int):
        return tensors[expression]
    left, right = expression
    return torch.add(added(left, tensors), added(right, tensors))


def expected(
    tensors: list[Tensor],
    expression: Any,
    accumulate: torch.dtype | None = None,
    out: torch.dtype | None = None,
    scale: float = 1.0,
) -> Tensor:
    dtype = tensors[0].dtype
    out = out or dtype
    wide = torch.float64 if torch.float64 in (dtype, out) else torch.float32
    total = added(expression, [one.to(accumulate or wide) for one in tensors])
    return (total.to(wide) * scale).to(out)


def balanced(count: int) -> Any:
    return Order.BALANCED.tree(range(count))


def line(count: int) -> Any:
    return Order.LINE.tree(range(count))


def test_the_tree_is_that_of_the_schedules() -> None:
    for count in range(1, 131):
        assert joined("tree", count, lambda i: i, lambda a, b: (a, b)) == balanced(count)
        assert joined("list", count, lambda i: i, lambda a, b: (a, b)) == line(count)
        stands: dict[int, Any] = dict(enumerate(range(count)))
        for left, right, *_ in balanced_tree(count):
            stands[left] = (stands[left], stands.pop(right))
        assert stands == {0: balanced(count)}


def check_orders(counts: list[int], numel: int, dtype: torch.dtype, device: str) -> None:
    for count in counts:
        tensors = values(count, numel, dtype, device)
        for accumulate in {None, dtype, WIDE[dtype]}:
            wanted = expected(tensors, balanced(count), accumulate)
            got = kernels.sum_n(tensors, order="tree", accumulate=accumulate)
            assert canonical(got) == canonical(wanted), (count, accumulate)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tree_adds_as_the_schedules_do(backend, dtype):
    check_orders(COUNTS, 533 if backend.slow else 9001, dtype, backend.device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_tensors(cpu_path, dtype):
    check_orders([*range(1, 34), 64, 100], 75, dtype, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_tensors_on_every_backend(backend, dtype):
    check_orders([*range(1, 34), 64, 100, 129], 130, dtype, backend.device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_the_last_sum_is_scaled_and_rounded_once(cpu_path, dtype, target):
    tensors = values(6, 75, dtype)
    accepted = {None, dtype, WIDE[dtype]}
    for accumulate, order, scale in itertools.product(accepted, ("list", "tree"), (1.0, 1 / 3)):
        expression = balanced(6) if order == "tree" else line(6)
        wanted = expected(tensors, expression, accumulate, target, scale)
        out, found = poisoned(75, target, "cpu"), torch.zeros(())
        options = {"order": order, "accumulate": accumulate, "found_inf": found}
        kernels.sum_n(tensors, out=out, scale=scale, **options)
        assert canonical(out) == canonical(wanted), (accumulate, order)
        exact = kernels.sum_n_reference(tensors, scale=1.0, order=order, accumulate=accumulate)
        if accumulate is not None:
            assert canonical(exact.to(target)) == canonical(
                expected(tensors, expression, accumulate, target)
            )
        assert found.item() == (not out.isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_list_order_rounds_each_sum_to_the_dtype(backend, dtype):
    for count in (1, 2, 5):
        tensors = values(count, 133 if backend.slow else 9001, dtype, backend.device)
        got = kernels.sum_n(tensors, accumulate=dtype)
        if dtype == WIDE[dtype]:
            assert bits(got) == bits(kernels.sum_n(tensors))
        else:
            assert canonical(got) == canonical(expected(tensors, line(count), dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [3, pytest.param(6, marks=pytest.mark.slow)])
def test_a_tree_into_each_input_and_from_anywhere(backend, dtype, count):
    numel = 533 if backend.slow else 66_001
    tensors = values(count, numel, dtype, backend.device)
    options = {"order": "tree", "accumulate": dtype}
    wanted = canonical(kernels.sum_n(tensors, **options))
    assert canonical(kernels.sum_n([misaligned(one) for one in tensors], **options)) == wanted
    for place in range(count):
        given = [one.clone() for one in tensors]
        assert canonical(kernels.sum_n(given, out=given[place], **options)) == wanted
    # The same one at every leaf.
    same = [tensors[0].clone()] * count
    wanted = canonical(expected(same, balanced(count), dtype))
    assert canonical(kernels.sum_n(same, out=same[0], **options)) == wanted


def test_slices_have_the_bits_of_the_whole(backend):
    numel = 533 if backend.slow else 70_001
    tensors = values(5, numel, torch.bfloat16, backend.device)
    options = {"order": "tree", "accumulate": torch.bfloat16}
    whole, cuts = kernels.sum_n(tensors, **options), (0, 1, numel // 3, numel - 7, numel)
    parts = [
        kernels.sum_n([one[low:high] for one in tensors], **options)
        for low, high in itertools.pairwise(cuts)
    ]
    assert canonical(torch.cat(parts)) == canonical(whole)


def test_a_tree_of_nothing_and_of_one_element(backend):
    empty = [torch.empty(0, device=backend.device)] * 5
    assert kernels.sum_n(empty, order="tree").numel() == 0
    scalars = [torch.full((), float(i), device=backend.device) for i in range(5)]
    total = kernels.sum_n(scalars, order="tree")
    assert total.shape == () and total.item() == 10.0


def test_a_plan_keeps_the_order():
    tensors = values(5, 75, torch.float16)
    plan = kernels.plan_sum_n(tensors, order="tree", accumulate=torch.float16)
    wanted = expected(tensors, balanced(5), torch.float16)
    assert canonical(plan()) == canonical(wanted)
    plan.rebind(tensors[::-1])
    assert canonical(plan()) == canonical(expected(tensors[::-1], balanced(5), torch.float16))


F32 = torch.float32


@pytest.mark.parametrize("call", [kernels.sum_n, kernels.plan_sum_n, kernels.sum_n_reference])
def test_an_order_or_a_dtype_that_is_none_is_an_error(call: Callable[..., Any]) -> None:
    for order in ("Tree", "", None, 1, ["tree"]):
        with pytest.raises(ValueError, match="order must be 'list' or 'tree', got "):
            call([torch.ones(2)], order=order)
    for dtype, accumulate, fix in (
        (F32, torch.float16, "must be torch.float32, or None"),
        (F32, torch.float64, "must be torch.float32, or None"),
        (torch.float64, F32, "must be torch.float64, or None"),
        (torch.float16, torch.bfloat16, "must be torch.float16 or torch.float32, or None"),
        (F32, "float32", "must be torch.float32, or None"),
        (F32, torch.int32, "must be torch.float32, or None"),
    ):
        with pytest.raises(TypeError, match=f"accumulate of .*{fix}"):
            call([torch.ones(2, dtype=dtype)], accumulate=accumulate)
