"""Bad input: the right error, naming the argument, with nothing written."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import kernels

X = torch.ones(8)
PAIRS = [kernels.scaled_add, kernels.dot_and_norms, kernels.adasum]


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.bool, torch.float8_e5m2])
def test_dtypes_are_named(dtype):
    bad = torch.zeros(8, dtype=dtype)
    for call in PAIRS:
        with pytest.raises(TypeError, match=f"a has dtype {dtype}"):
            call(bad, bad)
    with pytest.raises(TypeError, match=rf"tensors\[1\] has dtype {dtype}"):
        kernels.sum_n([X, bad])
    with pytest.raises(TypeError, match=rf"tensors\[0\] has dtype {dtype}"):
        kernels.pack([bad])


ODD = {
    "sparse": (lambda x: x.to_sparse(), ValueError, "is torch.sparse_coo, not dense"),
    "rows": (lambda x: x.view(2, 4).to_sparse_csr(), ValueError, "is torch.sparse_csr, not dense"),
    "mkldnn": (lambda x: x.to_mkldnn(), ValueError, "is torch._mkldnn, not dense"),
    "nested": (lambda x: torch.nested.nested_tensor([x, x]), ValueError, "is a nested tensor"),
    "negative": (lambda x: torch.complex(x, x).conj().imag[:1], ValueError, "is a negative view"),
    "strided": (lambda x: x[::2], ValueError, "is not contiguous"),
    "elsewhere": (lambda x: x.to("meta"), ValueError, "is on meta"),
    "integers": (lambda x: x.int(), TypeError, "has dtype torch.int32"),
    "list": (lambda x: x.tolist(), TypeError, "must be a torch.Tensor, not list"),
}


@pytest.mark.filterwarnings("ignore:.*(nested|CSR)")
@pytest.mark.parametrize("count", [2, 5, 40])
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


@pytest.mark.parametrize("call", PAIRS)
def test_pairs(call):
    if call is not kernels.scaled_add:
        with pytest.raises(TypeError, match=r"b has dtype torch\.float64 but a has torch\.float32"):
            call(X, X.double())
    with pytest.raises(ValueError, match=r"b has shape \(7,\)"):
        call(X, X[:7])
    with pytest.raises(ValueError, match=r"a is not contiguous: pass a\.contiguous\(\)"):
        call(torch.ones(16)[::2], X)
    with pytest.raises(ValueError, match="b is on meta"):
        call(X, X.to("meta"))
    with pytest.raises(ValueError, match=r"not dense: call \.to_dense"):
        call(X.to_sparse(), X)
    with pytest.raises(TypeError, match=r"a must be a torch\.Tensor, not list"):
        call([1.0], X)


@pytest.mark.parametrize("call", [kernels.scaled_add, kernels.adasum])
def test_outputs_that_overlap_or_differ(call):
    base = torch.ones(16)
    with pytest.raises(ValueError, match="out overlaps b"):
        call(X, base[:8], out=base[4:12])
    assert torch.equal(base, torch.ones(16))
    with pytest.raises(ValueError, match="out has shape"):
        call(X, X, out=base)
    other = {"dtype": torch.float16} if call is kernels.scaled_add else {}
    with pytest.raises(TypeError, match="out has dtype"):
        call(X, X, out=X.double(), **other)


@pytest.mark.parametrize(
    ("segments", "error", "words"),
    [
        ((), ValueError, "not nothing"),
        ((0, 7), ValueError, "end at the 8 elements"),
        ((1, 8), ValueError, "start at 0"),
        ((0, 5, 4, 8), ValueError, r"\[2\] = 4 < \[1\] = 5"),
        ((0, 4.0, 8), TypeError, "must hold ints, not float"),
        (torch.tensor([0, 8]), TypeError, r"tolist\(\)"),
    ],
)
def test_segments(segments, error, words):
    for call in (kernels.dot_and_norms, kernels.adasum):
        with pytest.raises(error, match=words):
            call(X, X, segments)


def test_dots():
    with pytest.raises(TypeError, match=r"dots has dtype torch\.float32"):
        kernels.combine(X, X, torch.zeros(1, 3))
    with pytest.raises(ValueError, match=r"dots has shape \(2, 3\) but segments ask for \(1, 3\)"):
        kernels.combine(X, X, torch.zeros(2, 3).double())


def test_lists():
    with pytest.raises(ValueError, match="tensors is empty"):
        kernels.sum_n([])
    with pytest.raises(TypeError, match="tensors must be a list or tuple"):
        kernels.sum_n(X)
    with pytest.raises(TypeError, match="scale must be a float, not str"):
        kernels.sum_n([X], scale="1")
    with pytest.raises(TypeError, match="pass dtype="):
        kernels.pack([X, X.double()])
    with pytest.raises(ValueError, match="alignment is 3"):
        kernels.layout_of([X], alignment=3)
    with pytest.raises(TypeError, match=r"layout must be a kernels\.Layout"):
        kernels.pack([X], layout=(0, 8))
    with pytest.raises(ValueError, match="layout holds 1 tensors"):
        kernels.pack([X, X], layout=kernels.layout_of([X]))
    out = torch.ones(16)
    with pytest.raises(ValueError, match=r"out overlaps tensors\[0\]"):
        kernels.pack([out[:8]], out=out)
    with pytest.raises(ValueError, match="out has shape"):
        kernels.pack([X], out=torch.ones(8))
    with pytest.raises(ValueError, match=r"tensors\[0\] and tensors\[1\] overlap"):
        kernels.unpack(torch.ones(32), [out[:8], out[4:12]])
    assert torch.equal(out, torch.ones(16))


class Anew(Sequence[torch.Tensor]):
    """Makes its tensors when it is asked for them, and counts how often it is."""

    def __init__(self, count: int) -> None:
        self.count, self.asked = count, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: Any) -> Any:
        if i >= self.count:
            raise IndexError(i)
        self.asked += 1
        return torch.full((5,), float(i))


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


def test_sequence_is_read_once():
    for call in (
        kernels.sum_n,
        kernels.pack,
        lambda given: kernels.unpack(torch.ones(48), given),
        kernels.plan_sum_n,
        lambda given: kernels.plan_pack([torch.ones(5)] * 3).rebind(given),
    ):
        given = Anew(3)
        call(given)
        assert given.asked == 3


def test_found_inf_and_dtype():
    for bad, error, words in [
        (torch.zeros(2), TypeError, "pass one float32"),
        (torch.zeros((), dtype=torch.float64), TypeError, "pass one float32"),
        (True, TypeError, r"found_inf must be a torch\.Tensor"),
        (torch.zeros((), device="meta"), ValueError, "found_inf is on meta"),
    ]:
        calls = [
            lambda bad=bad: kernels.pack([X], found_inf=bad),
            lambda bad=bad: kernels.unpack(torch.ones(16), [X], found_inf=bad),
            lambda bad=bad: kernels.sum_n([X], found_inf=bad),
            lambda bad=bad: kernels.scaled_add(X, X, found_inf=bad),
            lambda bad=bad: kernels.adasum(X, X, found_inf=bad),
        ]
        for call in calls:
            with pytest.raises(error, match=words):
                call()
    with pytest.raises(TypeError, match=r"^dtype is torch\.int32"):
        kernels.sum_n([X], dtype=torch.int32)
    assert torch.equal(X, torch.ones(8))


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


def test_found_inf_and_dots_must_be_apart_from_what_is_read_or_written():
    memory = torch.zeros(16)
    inside, rest, other = memory[3], memory[:8], torch.ones(8)
    layout = kernels.layout_of([other])
    calls = [
        lambda: kernels.sum_n([other, rest], found_inf=inside),
        lambda: kernels.scaled_add(other, other, out=rest, found_inf=inside),
        lambda: kernels.adasum(rest, other, found_inf=inside),
        lambda: kernels.combine(
            other, other, torch.ones(1, 3).double(), out=rest, found_inf=inside
        ),
        lambda: kernels.pack([rest], found_inf=inside),
        lambda: kernels.unpack(memory, [other], layout=layout, found_inf=inside),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="found_inf overlaps"):
            call()
    dots = torch.ones(1, 3, dtype=torch.float64)
    pair = torch.ones(3, dtype=torch.float64)
    with pytest.raises(ValueError, match="out overlaps dots"):
        kernels.combine(pair, pair, dots, out=dots.view(3))
    assert torch.equal(memory, torch.zeros(16)) and torch.equal(other, torch.ones(8))


@pytest.mark.parametrize("wrong", [True, "1", None, 1j])
def test_what_is_no_float(wrong):
    x, words = torch.ones(3), f"must be a float, not {type(wrong).__name__}"
    for call, name in (
        (lambda: kernels.pack([x], scale=wrong), "scale"),
        (lambda: kernels.unpack(torch.ones(16), [x], scale=wrong), "scale"),
        (lambda: kernels.sum_n([x, x], scale=wrong), "scale"),
        (lambda: kernels.scaled_add(x, x, alpha=wrong), "alpha"),
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
    x, dots = torch.ones(3), torch.ones(1, 3, dtype=torch.float64)
    calls = {
        "pack": lambda **options: kernels.pack([x], **{"out": buffer, **options}),
        "sum_n": lambda **options: kernels.sum_n([x, inside], **{"out": inside, **options}),
        "scaled_add": lambda **options: kernels.scaled_add(x, x, **{"out": inside, **options}),
        "combine": lambda **options: kernels.combine(x, x, dots, **{"out": inside, **options}),
        "adasum": lambda **options: kernels.adasum(x, x, **{"out": inside, **options}),
    }
    for call in calls.values():
        with pytest.raises(ValueError, match="out was made in inference mode"):
            call()
        with pytest.raises(ValueError, match="found_inf was made in inference mode"):
            call(out=None, found_inf=flag)
    with pytest.raises(ValueError, match="found_inf was made in inference mode"):
        kernels.unpack(torch.ones(16), [x], found_inf=flag)
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
    with pytest.raises(TypeError, match="tensors must be a list or tuple of tensors, not set"):
        kernels.sum_n(set(tensors))
