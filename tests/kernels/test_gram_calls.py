"""gram, adasum_coefficients and weighted_sum as calls: errors, plans, findings, torch.compile."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from tests.kernels.cases import DTYPES, bits, misaligned, poisoned, random
from tests.kernels.torch_compile.cases import compiled, flat, operators

F32, F64 = torch.float32, torch.float64
CUTS, TREE = (0, 16, 16, 70), [(0, 1, 1, 1), (0, 2, 2, 1)]
X = torch.ones(8)


def several(seed: int, dtype: torch.dtype = F32) -> list[Tensor]:
    return [random(70, dtype, "cpu", 3 * seed + i) for i in range(3)]


def rows(count: int = 3, size: int = 3) -> Tensor:
    return random((count, size), F64, "cpu", 9)


def matrices(seed: int) -> list[Tensor]:
    return [kernels.gram(several(seed), CUTS)[None]]


# Given the inputs: a plan, and the direct call.
PLANS: dict[
    str, tuple[Callable[[int], list[Tensor]], Callable[..., Any], Callable[..., Tensor]]
] = {
    "gram": (
        several,
        lambda given: kernels.plan_gram(given, CUTS),
        lambda given: kernels.gram(given, CUTS),
    ),
    "precise gram": (
        several,
        lambda given: kernels.plan_gram(given, CUTS, precise=True),
        lambda given: kernels.gram(given, CUTS, precise=True),
    ),
    "adasum_coefficients": (
        matrices,
        lambda given: kernels.plan_adasum_coefficients(given[0], TREE),
        lambda given: kernels.adasum_coefficients(given[0], TREE),
    ),
    "weighted_sum": (
        several,
        lambda given: kernels.plan_weighted_sum(given, rows(), CUTS),
        lambda given: kernels.weighted_sum(given, rows(), CUTS),
    ),
}


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("function", PLANS)
def test_runs_of_a_plan_have_the_bits_of_direct_calls(function: str) -> None:
    inputs, make, direct = PLANS[function]
    given = inputs(1)
    plan = make(given)
    for seed in (2, 3):
        for tensor, fresh in zip(given, inputs(seed), strict=True):
            tensor.copy_(fresh)
        assert plan() is plan.out and bits(plan.out) == bits(direct(given))
    others = inputs(4)
    gone = [weakref.ref(tensor) for tensor in given]
    del given, tensor, fresh
    plan.rebind(others)
    assert [reference() for reference in gone] == [None] * len(gone)
    assert bits(plan()) == bits(direct(others))
    plan.release()
    with pytest.raises(RuntimeError, match="released"):
        plan()


@pytest.mark.usefixtures("cpu_path")
def test_plans_read_what_coefficients_and_tensors_then_hold() -> None:
    given, factors = several(1), rows()
    blend = kernels.plan_weighted_sum(given, factors, CUTS)
    precise = kernels.plan_gram(given, CUTS, precise=True)
    assert not precise()[..., 1].any()
    factors.mul_(3.0)
    given[2].copy_(given[0])
    assert bits(blend()) == bits(kernels.weighted_sum(given, factors, CUTS))
    assert bits(precise()) == bits(kernels.gram(given, CUTS, precise=True))
    assert precise.out[..., 1].any()
    written = torch.zeros(3, dtype=F64)
    tables = matrices(2)[0]
    plan = kernels.plan_adasum_coefficients(tables, TREE, spread=written)
    plan()
    before, found = written._version, written.clone()
    assert (found >= 1).all()
    kernels.adasum_coefficients(tables, TREE, spread=written)
    assert written._version > before and torch.equal(written, found)


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("special", [None, math.nan, -math.inf])
def test_findings_of_a_weighted_sum(dtype: torch.dtype, special: float | None) -> None:
    given = several(1, dtype)
    if special is not None:
        given[2][60] = special
    largest = torch.full((1,), 1e30, dtype=F64 if dtype == F64 else F32)
    found = torch.zeros(())
    got = kernels.weighted_sum(given, rows(), CUTS, found_inf=found, max_abs=largest)
    expected = kernels.max_abs_reference([got])
    assert torch.equal(largest.double(), expected.reshape(1)) or expected.isnan() & largest.isnan()
    assert bool(found) == (special is not None)


T = torch.zeros(1, 1, 2, 2, dtype=F64)
ERRORS: dict[str, tuple[Callable[[], Any], type[Exception]]] = {
    "tensors is empty": (lambda: kernels.gram([]), ValueError),
    "tensors must be a list or tuple": (lambda: kernels.weighted_sum(X, rows()), TypeError),
    r"tensors\[1\] has dtype torch.float64 but": (
        lambda: kernels.gram([X, X.double()]), TypeError,
    ),
    r"tensors\[1\] has shape \(7,\)": (lambda: kernels.gram([X, X[:7]]), ValueError),
    r"tensors\[0\] has dtype torch.int32": (lambda: kernels.gram([X.int()]), TypeError),
    "end at the 8 elements of a tensor": (lambda: kernels.gram([X], (0, 7)), ValueError),
    r"out has shape \(1, 1\) but the other arguments ask for \(1, 1, 1\)": (
        lambda: kernels.gram([X], out=torch.zeros(1, 1, dtype=F64)), ValueError,
    ),
    "out has dtype torch.float32": (
        lambda: kernels.gram([X], out=torch.zeros(1, 1, 1)), TypeError,
    ),
    r"spread has shape \(2,\)": (
        lambda: kernels.adasum_coefficients(T, [(0, 1, 1, 1)], spread=torch.zeros(2, dtype=F64)),
        ValueError,
    ),
    r"coefficients has shape \(1, 3\) but the other arguments ask for \(1, 2\)": (
        lambda: kernels.weighted_sum([X, X], rows(1)), ValueError,
    ),
    "coefficients has dtype torch.float32": (
        lambda: kernels.weighted_sum([X], torch.ones(1, 1)), TypeError,
    ),
    "coefficients is on meta": (
        lambda: kernels.weighted_sum([X], torch.ones(1, 1, dtype=F64, device="meta")), ValueError,
    ),
    "out has dtype torch.float64 but": (
        lambda: kernels.weighted_sum([X], rows(1, 1), out=X.double()), TypeError,
    ),
    "pass one float32": (
        lambda: kernels.weighted_sum([X], rows(1, 1), found_inf=torch.zeros(2)), TypeError,
    ),
    "partials has dtype torch.float32": (
        lambda: kernels.adasum_coefficients(T.float(), [(0, 1, 1, 1)]), TypeError,
    ),
    r"partials has shape \(1, 2, 2\): pass gram's results stacked": (
        lambda: kernels.adasum_coefficients(T[0], [(0, 1, 1, 1)]), ValueError,
    ),
    r"partials has shape \(1, 1, 2, 2, 3\)": (
        lambda: kernels.adasum_coefficients(T.new_zeros(1, 1, 2, 2, 3), []), ValueError,
    ),
    "tree must be a list or tuple of rows, not int": (
        lambda: kernels.adasum_coefficients(T, 3), TypeError,  # type: ignore[arg-type]
    ),
    r"tree\[0\] must be four numbers": (
        lambda: kernels.adasum_coefficients(T, [(0, 1)]), TypeError,  # type: ignore[list-item]
    ),
    r"tree\[0\] must name vectors by ints, not float": (
        lambda: kernels.adasum_coefficients(T, [(0, 1.0, 1, 1)]),  # type: ignore[list-item]
        TypeError,
    ),
    r"tree\[0\]\[3\] must be a float, not str": (
        lambda: kernels.adasum_coefficients(T, [(0, 1, 1, "1")]),  # type: ignore[list-item]
        TypeError,
    ),
    r"tree\[0\] joins vector 2, which is none of the 2": (
        lambda: kernels.adasum_coefficients(T, [(0, 2, 1, 1)]), ValueError,
    ),
    r"tree\[0\] joins vector 1 to itself": (
        lambda: kernels.adasum_coefficients(T, [(1, 1, 1, 1)]), ValueError,
    ),
    r"tree\[0\] has weights \(0.0, 1.0\)": (
        lambda: kernels.adasum_coefficients(T, [(0, 1, 0, 1)]), ValueError,
    ),
    "tree joins 0 pairs of 2 vectors: 1 make them one": (
        lambda: kernels.adasum_coefficients(T, []), ValueError,
    ),
}  # fmt: skip


@pytest.mark.parametrize("words", ERRORS)
def test_errors_name_the_argument(words: str) -> None:
    call, error = ERRORS[words]
    with pytest.raises(error, match=words):
        call()


def test_a_tree_that_uses_a_vector_twice_is_an_error() -> None:
    tables = T.new_zeros(1, 1, 3, 3)
    with pytest.raises(ValueError, match=r"tree\[1\] joins vector 1, .* joined to another before"):
        kernels.adasum_coefficients(tables, [(0, 1, 1, 1), (2, 1, 1, 1)])


def test_what_is_written_must_be_apart_from_what_is_read() -> None:
    memory = torch.zeros(16, dtype=F64)
    tensor, table = memory[:1], memory[:1].view(1, 1, 1)
    spread = memory[:1]
    calls: dict[str, Callable[[], object]] = {
        r"out overlaps tensors\[0\]": lambda: kernels.gram([tensor], out=table),
        "out overlaps partials": lambda: kernels.adasum_coefficients(
            table[None], [], out=memory[:1].view(1, 1)
        ),
        "spread overlaps partials": lambda: kernels.adasum_coefficients(
            table[None], [], spread=spread
        ),
        "out overlaps coefficients": lambda: kernels.weighted_sum(
            [tensor], memory[:1].view(1, 1), out=tensor
        ),
        r"out overlaps tensors\[1\]": lambda: kernels.weighted_sum(
            [X.double(), memory[:8]], rows(1, 2), out=memory[4:12]
        ),
        r"found_inf overlaps tensors\[0\]": lambda: kernels.weighted_sum(
            [X], rows(1, 1), found_inf=X[0]
        ),
    }
    for words, call in calls.items():
        with pytest.raises(ValueError, match=words):
            call()
    assert not memory.any() and (X == 1).all()
    # Only read, they may be one.
    kernels.weighted_sum([tensor], memory[:1].view(1, 1))


def test_tensors_that_require_gradients_are_refused() -> None:
    leaf = torch.ones(8, requires_grad=True)
    table = torch.ones(1, 1, dtype=F64, requires_grad=True)
    calls: dict[str, Callable[[], object]] = {
        r"tensors\[0\] requires grad, but gram has no derivative": lambda: kernels.gram([leaf]),
        "coefficients requires grad, but": lambda: kernels.weighted_sum([X], table),
        "partials requires grad, but": lambda: kernels.adasum_coefficients(table[None, None], []),
    }
    for words, call in calls.items():
        with pytest.raises(ValueError, match=words):
            call()
        with torch.no_grad():
            call()


@pytest.mark.parametrize("function", ["gram", "adasum_coefficients", "weighted_sum"])
def test_outputs_made_in_inference_mode_are_refused(function: str) -> None:
    with torch.inference_mode():
        table, inside = torch.zeros(1, 1, 1, dtype=F64), torch.zeros(8)
    calls: dict[str, Callable[[], object]] = {
        "gram": lambda: kernels.gram([X], out=table),
        "adasum_coefficients": lambda: kernels.adasum_coefficients(
            T[:, :, :1, :1].contiguous(), [], out=table[0]
        ),
        "weighted_sum": lambda: kernels.weighted_sum([X], rows(1, 1), out=inside),
    }
    with pytest.raises(ValueError, match="out was made in inference mode"):
        calls[function]()


def spread_of(*given: Tensor) -> Tensor:
    spread = torch.zeros(3, dtype=F64)
    factors = kernels.adasum_coefficients(kernels.gram(given, CUTS)[None], TREE, spread=spread)
    return torch.cat([factors, spread[:, None]], 1)


def precisely(*given: Tensor) -> Tensor:
    tables = kernels.gram(given, CUTS, precise=True)[None]
    spread = torch.zeros(3, dtype=F64)
    return kernels.adasum_coefficients(tables, TREE, spread=spread)


FACTORS = rows()
COMPILED: dict[str, tuple[Callable[..., Tensor], list[str]]] = {
    "gram": (lambda *given: kernels.gram(given, CUTS), ["gram"]),
    "spread": (spread_of, ["gram", "adasum_coefficients"]),
    "precise": (precisely, ["gram", "adasum_coefficients"]),
    "weighted_sum": (
        lambda a, b, c: kernels.weighted_sum([a, b, c], FACTORS, CUTS, out=b),
        ["weighted_sum"],
    ),
}


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled", "ignore:.*torch.jit")
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_by_torch_it_is_one_operator_with_the_bits_of_eager(name: str) -> None:
    function, names = COMPILED[name]
    call, counter = compiled(function)
    ours, theirs = several(1), several(1)
    assert flat(call(*ours)) == flat(function(*theirs)) and flat(ours) == flat(theirs)
    assert operators(counter) == names and counter.frame_count == 1


def test_operators_pass_torchs_own_check() -> None:
    ops, given = torch.ops.adasum, several(1)
    tables, spread = matrices(1)[0], torch.zeros(3, dtype=F64)
    tree = [float(number) for row in TREE for number in row]
    out = [poisoned((3, 3, 3), F64, "cpu"), poisoned((3, 3), F64, "cpu"), misaligned(given[0])]
    for operator, args in (
        (ops.gram_8, (given, out[0], CUTS[1:-1])),
        (ops.adasum_coefficients_8, ([tables], out[1], tree, spread)),
        (ops.weighted_sum_8, (given, out[2], rows(), CUTS[1:-1])),
    ):
        torch.library.opcheck(operator.default, args)
