"""Bad input: the right error, naming the argument, with nothing written."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kernels

X = torch.ones(8)
F16, F32, F64 = torch.float16, torch.float32, torch.float64
T = torch.zeros(1, 1, 2, 2, dtype=F64)
JOIN = [(0, 1, 1, 1)]


def rows(count: int, size: int) -> Tensor:
    return torch.ones(count, size, dtype=F64)


# What an error says: a call that raises it. torch_compile/test_tracing.py traces them, too.
ERRORS: dict[str, tuple[Callable[[Tensor], Any], type[Exception]]] = {
    "alpha must be a float, got str": (lambda x: kernels.scaled_add(x, x, alpha="1"), TypeError),
    "b has shape (3,) but a has (8,)": (lambda x: kernels.adasum(x, x[:3]), ValueError),
    "b has dtype torch.float64 but a has": (lambda x: kernels.adasum(x, x.double()), TypeError),
    "a is not contiguous: pass a.contiguous()": (
        lambda x: kernels.dot_and_norms(x[::2], x[:4]), ValueError,
    ),
    "b is not contiguous: pass b.contiguous()": (
        lambda x: kernels.scaled_add(x[:4], x[::2]), ValueError,
    ),
    "out is not contiguous: pass out.contiguous()": (
        lambda x: kernels.adasum(x[:4], x[:4], out=x[::2]), ValueError,
    ),
    "a must be a torch.Tensor, got list": (lambda x: kernels.scaled_add([1.0], x), TypeError),
    "b is on meta": (lambda x: kernels.adasum(x, torch.ones(8, device="meta")), ValueError),
    "out has shape (3,) but a has (8,)": (lambda x: kernels.adasum(x, x, out=x[:3]), ValueError),
    "out has dtype torch.float64 but dtype is": (
        lambda x: kernels.scaled_add(x, x, out=x.double(), dtype=F16), TypeError,
    ),
    "dtype is torch.int32": (lambda x: kernels.sum_n([x], dtype=torch.int32), TypeError),
    "end at the 8 elements of a tensor, got 0 and 3": (
        lambda x: kernels.dot_and_norms(x, x, (0, 3)), ValueError,
    ),
    "start at 0 and end": (lambda x: kernels.dot_and_norms(x, x, (1, 8)), ValueError),
    "got nothing": (lambda x: kernels.dot_and_norms(x, x, ()), ValueError),
    "[2] = 4 < [1] = 5": (lambda x: kernels.adasum(x, x, (0, 5, 4, 8)), ValueError),
    "must hold ints, got float": (lambda x: kernels.adasum(x, x, (0, 3.0, 8)), TypeError),
    "tolist()": (lambda x: kernels.adasum(x, x, torch.tensor([0, 8])), TypeError),
    "dots has dtype torch.float32": (lambda x: kernels.combine(x, x, x[:3].view(1, 3)), TypeError),
    "dots has shape (2, 3) but the other arguments ask for (1, 3)": (
        lambda x: kernels.combine(x, x, x.new_zeros(2, 3, dtype=F64)), ValueError,
    ),
    "weights must be two numbers (p, q), got 2.0": (
        lambda x: kernels.adasum(x, x, weights=2.0), TypeError,
    ),
    "weights must be two numbers (p, q), got (1.0, 2.0, 3.0)": (
        lambda x: kernels.adasum(x, x, weights=(1.0, 2.0, 3.0)), TypeError,
    ),
    "weights[0] must be a float, got str": (
        lambda x: kernels.adasum(x, x, weights=("1", 2)), TypeError,
    ),
    "weights[1] must be a float, got bool": (
        lambda x: kernels.adasum(x, x, weights=(1, True)), TypeError,
    ),
    "weights must be positive and finite, got (1, -1)": (
        lambda x: kernels.adasum(x, x, weights=(1, -1)), ValueError,
    ),
    "weights must be positive and finite, got (1.0, inf)": (
        lambda x: kernels.adasum(x, x, weights=(1.0, math.inf)), ValueError,
    ),
    "weights must be positive and finite, got (nan, 1.0)": (
        lambda x: kernels.adasum(x, x, weights=(math.nan, 1.0)), ValueError,
    ),
    "weights[1] is an int that no float64 holds": (
        lambda x: kernels.adasum(x, x, weights=(1, 10**400)), ValueError,
    ),
    "tensors is empty": (lambda x: kernels.sum_n([]), ValueError),
    "must be a list or tuple of tensors, got Tensor": (lambda x: kernels.sum_n(x), TypeError),
    "tensors[1] has dtype torch.int32": (lambda x: kernels.pack([x, x.int()]), TypeError),
    "tensors[1] is not contiguous": (lambda x: kernels.pack([x[:4], x[::2]]), ValueError),
    "pass dtype=": (lambda x: kernels.pack([x, x.double()]), TypeError),
    "alignment is 3": (lambda x: kernels.layout_of([x], alignment=3), ValueError),
    "layout must be a kernels.Layout": (lambda x: kernels.pack([x], layout=(0, 8)), TypeError),
    "layout holds 2 tensors": (
        lambda x: kernels.pack([x], layout=kernels.layout_of([x, x])), ValueError,
    ),
    "out has shape (8,)": (lambda x: kernels.pack([x], out=x.clone()), ValueError),
    "found_inf must be one float32": (lambda x: kernels.sum_n([x], found_inf=x), TypeError),
    "found_inf must be a torch.Tensor": (
        lambda x: kernels.scaled_add(x, x, found_inf=True), TypeError,
    ),
    "found_inf is on meta": (
        lambda x: kernels.pack([x], found_inf=torch.zeros((), device="meta")), ValueError,
    ),
    "tensors[1] has dtype torch.float64 but": (lambda x: kernels.gram([x, x.double()]), TypeError),
    "tensors[1] has shape (7,)": (lambda x: kernels.gram([x, x[:7]]), ValueError),
    "out has shape (1, 1) but the other arguments ask for (1, 1, 1)": (
        lambda x: kernels.gram([x], out=rows(1, 1)), ValueError,
    ),
    "out has dtype torch.float32: pass float64": (
        lambda x: kernels.gram([x], out=x.new_zeros(1, 1, 1)), TypeError,
    ),
    "coefficients has shape (1, 3) but the other arguments ask for (1, 2)": (
        lambda x: kernels.weighted_sum([x, x], rows(1, 3)), ValueError,
    ),
    "coefficients has dtype torch.float32": (
        lambda x: kernels.weighted_sum([x], x[:1].view(1, 1)), TypeError,
    ),
    "coefficients is on meta": (
        lambda x: kernels.weighted_sum([x], rows(1, 1).to("meta")), ValueError,
    ),
    "out has dtype torch.float64 but tensors[0]": (
        lambda x: kernels.weighted_sum([x], rows(1, 1), out=x.double()), TypeError,
    ),
    "partials has dtype torch.float32": (
        lambda x: kernels.adasum_coefficients(T.float(), JOIN), TypeError,
    ),
    "partials has shape (1, 2, 2): pass gram's results stacked": (
        lambda x: kernels.adasum_coefficients(T[0], JOIN), ValueError,
    ),
    "partials has shape (1, 1, 2, 2, 3)": (
        lambda x: kernels.adasum_coefficients(T.new_zeros(1, 1, 2, 2, 3), []), ValueError,
    ),
    "spread has shape (2,)": (
        lambda x: kernels.adasum_coefficients(T, JOIN, spread=T.new_zeros(2)), ValueError,
    ),
    "tree must be a list or tuple of rows, got int": (
        lambda x: kernels.adasum_coefficients(T, 3), TypeError,  # type: ignore[arg-type]
    ),
    "tree[0] must be four numbers": (
        lambda x: kernels.adasum_coefficients(T, [(0, 1)]), TypeError,  # type: ignore[list-item]
    ),
    "tree[0] must name vectors by ints, got float": (
        lambda x: kernels.adasum_coefficients(T, [(0, 1.0, 1, 1)]),  # type: ignore[list-item]
        TypeError,
    ),
    "tree[0][3] must be a float, got str": (
        lambda x: kernels.adasum_coefficients(T, [(0, 1, 1, "1")]),  # type: ignore[list-item]
        TypeError,
    ),
    "tree[0] joins vector 2, which is not one of the 2": (
        lambda x: kernels.adasum_coefficients(T, [(0, 2, 1, 1)]), ValueError,
    ),
    "tree[0] joins vector 1 to itself": (
        lambda x: kernels.adasum_coefficients(T, [(1, 1, 1, 1)]), ValueError,
    ),
    "tree[0] has weights (0.0, 1.0)": (
        lambda x: kernels.adasum_coefficients(T, [(0, 1, 0, 1)]), ValueError,
    ),
    "tree must join 2 vectors into one by 1 rows": (
        lambda x: kernels.adasum_coefficients(T, []), ValueError,
    ),
    "tree[1] joins vector 1, which is not one of the 3, or was joined to another before": (
        lambda x: kernels.adasum_coefficients(T.new_zeros(1, 1, 3, 3), [*JOIN, (2, 1, 1, 1)]),
        ValueError,
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", ERRORS)
def test_error_names_the_argument(text: str) -> None:
    call, kind = ERRORS[text]
    x = torch.ones(8)
    with pytest.raises(kind, match=re.escape(text)):
        call(x)
    assert torch.equal(x, torch.ones(8))


# What may not share memory, by what the error says: calls with a tensor of 16 numbers, in which
# these lie.
OVERLAPS: dict[str, Callable[[Tensor], Any]] = {
    "out overlaps b": lambda m: kernels.adasum(X.double(), m[:8], out=m[4:12]),
    "out overlaps a": lambda m: kernels.scaled_add(m[:8], X, out=m[4:12]),
    "out overlaps dots": lambda m: kernels.combine(
        X[:3].double(), X[:3].double(), m[:3].view(1, 3), out=m[:3]
    ),
    "out overlaps tensors[0]": lambda m: kernels.pack([m[:8]], out=m[4:12]),
    "tensors[0] and tensors[1] overlap": lambda m: kernels.unpack(torch.ones(32), [m[:8], m[4:12]]),
    "out overlaps tensors[1]": lambda m: kernels.weighted_sum(
        [X.double(), m[:8]], rows(1, 2), out=m[4:12]
    ),
    "out overlaps coefficients": lambda m: kernels.weighted_sum(
        [m[:1]], m[:1].view(1, 1), out=m[:1]
    ),
    "out overlaps partials": lambda m: kernels.adasum_coefficients(
        m[:1].view(1, 1, 1, 1), [], out=m[:1].view(1, 1)
    ),
    "spread overlaps partials": lambda m: kernels.adasum_coefficients(
        m[:1].view(1, 1, 1, 1), [], spread=m[:1]
    ),
}


@pytest.mark.parametrize("text", OVERLAPS)
def test_memory_that_is_shared_and_written_is_named(text: str) -> None:
    memory = torch.ones(16, dtype=F64)
    with pytest.raises(ValueError, match=re.escape(text)):
        OVERLAPS[text](memory)
    assert (memory == 1).all()


ODD = {
    "sparse": (lambda x: x.to_sparse(), ValueError, "is torch.sparse_coo, not dense"),
    "rows": (lambda x: x.view(2, 4).to_sparse_csr(), ValueError, "is torch.sparse_csr, not dense"),
    "mkldnn": (lambda x: x.to_mkldnn(), ValueError, "is torch._mkldnn, not dense"),
    "nested": (lambda x: torch.nested.nested_tensor([x, x]), ValueError, "is a nested tensor"),
    "negative": (lambda x: torch.complex(x, x).conj().imag[:1], ValueError, "is a negative view"),
    "strided": (lambda x: x[::2], ValueError, "is not contiguous"),
    "elsewhere": (lambda x: x.to("meta"), ValueError, "is on meta"),
    "integers": (lambda x: x.int(), TypeError, "has dtype torch.int32"),
    "list": (lambda x: x.tolist(), TypeError, "must be a torch.Tensor, got list"),
}


@pytest.mark.filterwarnings("ignore:.*(nested|CSR)")
@pytest.mark.parametrize("count", [2, 40])
@pytest.mark.parametrize("odd", ODD)
def test_one_bad_tensor_of_a_list_is_named_before_shapes_are_compared(odd, count):
    """Whatever its place; many tensors are first read together."""
    make, error, words = ODD[odd]
    layout, buffer = kernels.layout_of([X] * count), torch.ones(64 * count)
    for place in (1, count - 1):
        tensors = [X] * count
        tensors[place] = make(X)
        words_of = re.escape(f"tensors[{place}] {words}")
        # The layout is of fewer tensors, or of other shapes.
        for one in (layout, kernels.layout_of([X[:4]] * count), kernels.layout_of([X])):
            with pytest.raises(error, match=words_of):
                kernels.pack(tensors, layout=one)
            with pytest.raises(error, match=words_of):
                kernels.unpack(buffer, tensors, layout=one)
        for call in (kernels.pack, kernels.sum_n, kernels.gram):
            with pytest.raises(error, match=words_of):
                call(tensors)


@pytest.mark.parametrize(
    "kind", [list, tuple, type("Mine", (list,), {}), type("Own", (tuple,), {})]
)
def test_lists_and_tuples_of_any_class_are_taken(kind):
    tensors = [torch.full((5,), float(i)) for i in range(3)]
    given, buffer = kind(tensors), kernels.pack(tensors)
    assert kernels.sum_n(given).tolist() == [3.0] * 5
    assert torch.equal(kernels.pack(given), buffer)
    back = kernels.unpack(buffer, given)
    assert type(back) is list and back is not given
    assert all(one is other for one, other in zip(back, tensors, strict=True))
    with pytest.raises(ValueError, match="tensors is empty"):
        kernels.sum_n(kind())


@pytest.mark.parametrize(
    "name", ["pack", "unpack", "sum_n", "scaled_add", "dot_and_norms", "combine", "adasum"]
)
def test_a_misspelt_keyword_names_the_function(name):
    for function in (name, f"plan_{name}"):
        with pytest.raises(TypeError, match=rf"^{function}\(\) got an unexpected keyword argument"):
            getattr(kernels, function)(X, X, X, found_in=torch.zeros(()))


def test_without_triton_cpu_works_under_a_default_device_and_cuda_says_what_to_install():
    code = """
import sys
sys.modules["triton"] = None
import torch, kernels
from kernels.gpu import launcher
assert kernels.__adasum__
x = torch.arange(8.0)
h = x.half()
torch.set_default_device("meta")
assert kernels.adasum(x, x).tolist() == x.tolist()
assert kernels.dot_and_norms(x, x).device.type == "cpu"
assert kernels.sum_n([h, h]).tolist() == (2 * x).tolist()
assert kernels.pack([h], scale=2.0).device.type == "cpu"
class Cuda:
    is_cuda = True
try:
    launcher.on_triton(Cuda())
except ImportError as error:
    print(error)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "kernels on CUDA tensors need Triton: pip install 'triton>=3.6'"


@pytest.mark.parametrize("wrong", [True, "1", None, 1j])
def test_what_is_no_float(wrong):
    x, words = torch.ones(3), f"must be a float, got {type(wrong).__name__}"
    for call, name in (
        (lambda: kernels.sum_n([x, x], scale=wrong), "scale"),
        (lambda: kernels.scaled_add(x, x, beta=wrong), "beta"),
    ):
        with pytest.raises(TypeError, match=f"{name} {words}"):
            call()
    with pytest.raises(ValueError, match="scale is an int that no float64 holds"):
        kernels.sum_n([x, x], scale=10**400)
    for number in (2, np.int64(2), np.float32(2.0)):
        assert torch.equal(kernels.sum_n([x, x], scale=number), 4 * x)


def test_outputs_made_in_inference_mode():
    with torch.inference_mode():
        inside, flag, buffer = torch.ones(3), torch.zeros(()), torch.ones(16)
        table = torch.zeros(1, 1, 1, dtype=F64)
    x, dots = torch.ones(3), torch.ones(1, 3, dtype=torch.float64)
    calls: list[tuple[Callable[..., Any], Tensor]] = [
        (partial(kernels.pack, [x]), buffer),
        (partial(kernels.sum_n, [x, inside]), inside),
        (partial(kernels.scaled_add, x, x), inside),
        (partial(kernels.combine, x, x, dots), inside),
        (partial(kernels.adasum, x, x), inside),
        (partial(kernels.weighted_sum, [x], rows(1, 1)), inside),
        (partial(kernels.gram, [x]), table),
        (partial(kernels.adasum_coefficients, table.clone()[None], []), table[0]),
    ]
    for call, out in calls:
        with pytest.raises(ValueError, match="out was made in inference mode"):
            call(out=out)
    for call in (*[call for call, _ in calls[:6]], partial(kernels.unpack, torch.ones(16), [x])):
        with pytest.raises(ValueError, match="found_inf was made in inference mode"):
            call(found_inf=flag)
    assert (inside == 1).all() and (buffer == 1).all() and flag == 0


def test_a_generator_is_read_once_where_a_list_is_taken() -> None:
    tensors = [torch.randn(4, 3) for _ in range(5)]
    layout = kernels.layout_of(iter(tensors))
    flat, rows = kernels.pack(tensors), torch.randn(1, 5, dtype=torch.float64)
    calls: list[Callable[[Any], Any]] = [
        *(kernels.pack, kernels.pack_bytes, kernels.pack_reference, kernels.layout_of),
        *(kernels.sum_n, kernels.sum_n_bytes, kernels.sum_n_reference),
        *(kernels.gram, kernels.gram_bytes, kernels.gram_reference, kernels.weighted_sum_bytes),
        lambda given: kernels.pack(given, layout=layout),
        lambda given: kernels.unpack_bytes(flat, given),
        lambda given: torch.cat(kernels.unpack(flat, given)),
        lambda given: kernels.weighted_sum(given, rows),
        lambda given: kernels.weighted_sum_reference(given, rows),
        lambda given: kernels.plan_sum_n(given)(),
    ]
    for call in calls:
        found, expected = call(one for one in tensors), call(tensors)
        assert torch.equal(found, expected) if torch.is_tensor(found) else found == expected
    # The order of a set is not that of the ranks.
    with pytest.raises(TypeError, match="tensors must be a list or tuple of tensors, got set"):
        kernels.sum_n(set(tensors))
    with pytest.raises(TypeError, match="tensors must be a list or tuple of tensors, got dict"):
        kernels.sum_n({"weight": tensors[0]})
