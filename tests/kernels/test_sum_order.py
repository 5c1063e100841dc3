"""sum_n in a specified order, each sum of two rounded to a dtype: to the bit, on every backend."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from collectives.schedules.algorithm import Order
from collectives.schedules.halving import balanced_tree
from kernels import arithmetic, binding
from kernels.arithmetic import joined
from kernels.cpu import dispatch, native, torch_fallback
from tests.kernels.cases import DTYPES, bits, misaligned, poisoned, random
from tests.kernels.conftest import choose_cpu
from tests.kernels.cpu.cases import ROOT, compile_changed, need_compiled

SPECIAL = torch.tensor(
    [math.nan, math.inf, -math.inf, 0.0, -0.0, -0.0, 1e-45, -1e-40, 6e-8, 65504.0, 3e38, 1e300],
    dtype=torch.float64,
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


def canonical(tensor: Tensor) -> bytes:
    """The bits, with one NaN for all."""
    return bits(torch.where(tensor.isnan(), torch.full_like(tensor, math.nan), tensor))


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
        out, largest = poisoned(75, target, "cpu"), torch.zeros((), dtype=WIDE[target])
        options = {"order": order, "accumulate": accumulate, "max_abs": largest}
        kernels.sum_n(tensors, out=out, scale=scale, **options)
        assert canonical(out) == canonical(wanted), (accumulate, order)
        exact = kernels.sum_n_reference(tensors, scale=1.0, order=order, accumulate=accumulate)
        if accumulate is not None:
            assert canonical(exact.to(target)) == canonical(
                expected(tensors, expression, accumulate, target)
            )
        assert largest.isnan() == out.isnan().any()


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
    assert kernels.sum_n(scalars, order="tree").item() == 10.0


def test_a_plan_keeps_the_order():
    tensors = values(5, 75, torch.float16)
    plan = kernels.plan_sum_n(tensors, order="tree", accumulate=torch.float16)
    wanted = expected(tensors, balanced(5), torch.float16)
    assert canonical(plan()) == canonical(wanted)
    plan.rebind(tensors[::-1])
    assert canonical(plan()) == canonical(expected(tensors[::-1], balanced(5), torch.float16))


# What becomes of which text: of every four leaves the second and the third change places.
SWAPS = {
    "cpu_torch": {
        "if leaf < extra:": "leaf ^= 3 if leaf % 4 in (1, 2) else 0\n        if leaf < extra:"
    },
    "cpu": {
        "int64_t first = leaf": "leaf ^= leaf % 4 % 3 ? 3 : 0;\n        int64_t first = leaf",
        "(a[i] + b[i]) + (c[i] + d[i])": "(a[i] + c[i]) + (b[i] + d[i])",
    },
    "emulator": {"    if PAIRS:": "    j ^= tl.where(j % 4 % 3 > 0, 3, 0)\n    if PAIRS:"},
}


def swap_in_torch(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {**vars(arithmetic)}
    exec(swapped("cpu_torch", inspect.getsource(joined)), names)
    monkeypatch.setattr(torch_fallback, "joined", names["joined"])


def swap_in_c(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_compiled()

    def change(name: str, text: str) -> str:
        return swapped("cpu", text) if name == "real.h" else text

    library = native.Library(compile_changed(path, change))
    monkeypatch.setattr(dispatch, "library", lambda: library)


def swap_in_triton(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ROOT / "kernels" / "gpu"
    tree, sums = ((folder / f"{one}.py").read_text() for one in ("balanced_tree", "sum_kernels"))
    (path / "swapped_tree.py").write_text(swapped("emulator", tree))
    (path / "swapped_sums.py").write_text(sums.replace("kernels.gpu.balanced_tree", "swapped_tree"))
    monkeypatch.syspath_prepend(path)
    found = importlib.import_module("swapped_sums")
    monkeypatch.setitem(binding._LISTS_ON_TRITON, "sum_n", found.sum_n)


def swapped(where: str, text: str) -> str:
    for old, new in SWAPS[where].items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize(
    ("where", "swap"),
    [
        ("cpu_torch", swap_in_torch),
        pytest.param("cpu", swap_in_c, marks=pytest.mark.slow),
        pytest.param("emulator", swap_in_triton, marks=pytest.mark.slow),
    ],
)
def test_a_tree_that_joins_others_is_found(
    where: str,
    swap: Callable[[Path, pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    with contextlib.ExitStack() as stack:
        if where == "emulator":
            pytest.importorskip("triton")
            from tests.ptx_emulator.driver import emulated

            stack.enter_context(emulated())
        else:
            choose_cpu(where, monkeypatch)
        check_orders([4, 5], 75, torch.float32, "cpu")
        swap(tmp_path, monkeypatch)
        for count in (4, 5, 8):
            with pytest.raises(AssertionError, match=f"\\({count}, "):
                check_orders([count], 75, torch.float32, "cpu")


F32 = torch.float32


@pytest.mark.parametrize("call", [kernels.sum_n, kernels.plan_sum_n, kernels.sum_n_reference])
def test_an_order_or_a_dtype_that_is_none_is_an_error(call: Callable[..., Any]) -> None:
    for order in ("Tree", "", None, 1, ["tree"]):
        with pytest.raises(ValueError, match="order must be 'list' or 'tree', not "):
            call([torch.ones(2)], order=order)
    for dtype, accumulate, fix in (
        (F32, torch.float16, "pass torch.float32, or None"),
        (F32, torch.float64, "pass torch.float32, or None"),
        (torch.float64, F32, "pass torch.float64, or None"),
        (torch.float16, torch.bfloat16, "pass torch.float16 or torch.float32, or None"),
        (F32, "float32", "pass torch.float32, or None"),
        (F32, torch.int32, "pass torch.float32, or None"),
    ):
        with pytest.raises(TypeError, match=f"accumulate is .*{fix}"):
            call([torch.ones(2, dtype=dtype)], accumulate=accumulate)
