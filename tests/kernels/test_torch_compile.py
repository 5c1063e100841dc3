"""Compiled by torch, every function gives the bits, the writes and the errors it gives in eager."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import kernels
from tests.kernels.cases import DTYPES, bits, random
from tests.kernels.gpu import test_launches

SHAPES = [(5, 3), (7,), (), (0,), (2, 1, 2)]
CUTS = (0, 0, 5, 36)
F16, BF16, F32, F64 = DTYPES

pytestmark = [
    pytest.mark.skipif(
        not torch._dynamo.is_dynamo_supported(), reason="torch.compile does not know this Python"
    ),
    pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled", "ignore:.*torch.jit"),
]
# An operator looks for its backend when it runs: a graph is the same for both ways of the CPU path.
SOME_BACKENDS = pytest.mark.parametrize(
    "backend",
    ["cpu", pytest.param("cpu_torch", marks=pytest.mark.slow), "emulator", "triton"],
    indirect=True,
)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    # Compiled graphs on disk know an operator by its name: an older checkout's must not be found.
    with torch._inductor.config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


def compiled(fn: Callable[..., Any], **options: Any) -> tuple[Any, CompileCounterWithBackend]:
    """The function compiled whole, and what notes its graphs."""
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(fn, fullgraph=True, backend=counter, **options), counter


def operators(counter: CompileCounterWithBackend) -> list[str]:
    """Names of the library's operators in the graphs, in order."""
    targets = [str(node.target) for graph in counter.graphs for node in graph.graph.nodes]
    names = [target.split(".")[1] for target in targets if target.startswith("adasum.")]
    # What follows an underscore and is a number tells schemas apart.
    return [name.removesuffix("_4") for name in names]


def several(dtype: torch.dtype, device: str, seed: int) -> list[Tensor]:
    return [random(shape, dtype, device, seed + i) for i, shape in enumerate(SHAPES)]


def pair(dtype: torch.dtype, device: str, seed: int) -> list[Tensor]:
    return [random((9, 4), dtype, device, seed + i) for i in range(3)]


def buffers(
    dtype: torch.dtype, device: str, seed: int, other: torch.dtype | None = None
) -> list[Tensor]:
    """Tensors, a buffer they fit in, of dtype `other`, and a flag."""
    tensors = several(dtype, device, seed)
    numel = kernels.layout_of(tensors, dtype=other).numel
    flag = torch.zeros((), device=device)
    return [*tensors, random(numel, other or dtype, device, seed + 9), flag]


def unpack_all(buffer: Tensor, tensors: list[Tensor], **options: Any) -> list[Tensor]:
    layout = kernels.layout_of(tensors, dtype=buffer.dtype)
    return kernels.unpack(buffer, tensors, layout=layout, **options)


def combined(a: Tensor, b: Tensor, **options: Any) -> Tensor:
    dots = kernels.dot_and_norms(a, b, CUTS)
    return kernels.combine(a, b, dots, CUTS, **options)


# name: (inputs, function of the inputs, operators in its graph)
CASES: dict[str, tuple[Callable[..., list[Tensor]], Callable[..., Any], list[str]]] = {
    "pack": (several, lambda *t: kernels.pack(t), ["pack"]),
    "pack out": (
        partial(buffers, other=F32),
        lambda *t: kernels.pack(
            t[:-2], layout=kernels.layout_of(t[:-2], dtype=F32), out=t[-2], scale=3e5,
            found_inf=t[-1],
        ),
        ["pack"],
    ),
    "unpack": (buffers, lambda *t: kernels.unpack(t[-2], t[:-2]), ["unpack"]),
    "unpack scaled": (
        partial(buffers, other=F64),
        lambda *t: unpack_all(t[-2], t[:-2], scale=1e39, found_inf=t[-1]),
        ["unpack"],
    ),
    "sum_n": (pair, lambda *t: kernels.sum_n(t, scale=0.3, dtype=F32), ["sum_n"]),
    "sum_n in place": (pair, lambda *t: kernels.sum_n(t, out=t[1]), ["sum_n"]),
    "scaled_add": (
        pair, lambda a, b, c: kernels.scaled_add(a, b, alpha=0.3, beta=-2), ["scaled_add"],
    ),
    "scaled_add in place": (
        pair, lambda a, b, c: kernels.scaled_add(a, b, alpha=0.3, out=b), ["scaled_add"],
    ),
    "dot_and_norms": (
        pair, lambda a, b, c: kernels.dot_and_norms(a, b, [0, 7, 36]), ["dot_and_norms"],
    ),
    "combine": (pair, lambda a, b, c: combined(a, b), ["dot_and_norms", "combine"]),
    "combine out": (pair, lambda a, b, c: combined(a, b, out=c), ["dot_and_norms", "combine"]),
    "adasum": (pair, lambda a, b, c: kernels.adasum(a, b), ["adasum"]),
    "adasum in two launches": (
        pair, lambda a, b, c: kernels.adasum(a, b, cooperative=False), ["adasum"],
    ),
    "adasum in place": (pair, lambda a, b, c: kernels.adasum(a, b, CUTS, out=a), ["adasum"]),
    "adasum of one": (pair, lambda a, b, c: kernels.adasum(a, a, out=a), ["adasum"]),
    "adasum into a view": (
        pair, lambda a, b, c: kernels.adasum(a[:3], b[3:6], out=a[3:6]), ["adasum"],
    ),
    "amid torch": (
        pair,
        lambda a, b, c: (kernels.adasum(a * 2, b.relu()).abs(), kernels.scaled_add(a, c) * 2),
        ["adasum", "scaled_add"],
    ),
    "written twice": (
        pair,
        lambda a, b, c: (kernels.sum_n([a, b], out=c), kernels.adasum(c, b, out=c) * 2, c + a),
        ["sum_n", "adasum"],
    ),
}  # fmt: skip


def flat(value: Any) -> list[bytes]:
    return [bits(t) for t in value] if isinstance(value, (list, tuple)) else [bits(value)]


@SOME_BACKENDS
@pytest.mark.parametrize("dtype", [F32, pytest.param(BF16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_bits_writes_and_one_call(backend, name, dtype):
    inputs, fn, names = CASES[name]
    call, counter = compiled(fn)
    for seed in (1, 2):
        ours, theirs = (inputs(dtype, backend.device, seed) for _ in range(2))
        assert flat(call(*ours)) == flat(fn(*theirs))
        assert flat(ours) == flat(theirs)
    assert operators(counter) == names and counter.frame_count == 1


@SOME_BACKENDS
@pytest.mark.parametrize("dtype", [F16, F64])
def test_other_dtypes(backend, dtype):
    def fn(*t: Tensor) -> Any:
        return kernels.pack(t), kernels.sum_n(t), kernels.adasum(t[0], t[1], CUTS)

    inputs = pair(dtype, backend.device, 3)
    assert flat(compiled(fn)[0](*inputs)) == flat(fn(*inputs))


def test_found_inf(backend):
    flag = torch.zeros((), device=backend.device)
    call, _ = compiled(lambda *t: kernels.pack(t[:-1], found_inf=t[-1]))
    tensors = several(F32, backend.device, 1)
    call(*tensors, flag)
    assert flag.item() == 0
    tensors[1][3] = float("inf")
    call(*tensors, flag)
    assert flag.item() == 1


def test_out_is_returned_itself_and_marked_as_written(backend):
    a, b, _ = pair(F32, backend.device, 1)
    call, _ = compiled(lambda a, b: kernels.adasum(a, b, out=a))
    before = a._version
    assert call(a, b) is a and a._version > before
    tensors = several(F32, backend.device, 1)
    buffer = kernels.pack(tensors)
    result = compiled(kernels.unpack)[0](buffer, tensors)
    assert all(x is y for x, y in zip(result, tensors, strict=True))


@SOME_BACKENDS
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_grad_modes(backend, mode):
    def fn(a: Tensor, b: Tensor, c: Tensor) -> Any:
        kernels.unpack(kernels.pack([a]), [c])
        return kernels.adasum(a, b), kernels.dot_and_norms(a, b), (a * b).sin()

    ours, theirs = ([t.requires_grad_() for t in pair(F32, backend.device, 1)] for _ in range(2))
    with mode():
        results, expected = compiled(fn)[0](*ours), fn(*theirs)
        assert flat([*results, *ours]) == flat([*expected, *theirs])
        assert [t.requires_grad for t in results] == [t.requires_grad for t in expected]
    if mode is torch.enable_grad:
        for result, tensors in ((results, ours), (expected, theirs)):
            result[2].sum().backward()
            assert tensors[2].grad is None
        assert flat([t.grad for t in ours[:2]]) == flat([t.grad for t in theirs[:2]])


@SOME_BACKENDS
def test_layouts(backend):
    tensors = several(F32, backend.device, 1)
    expected = kernels.layout_of(tensors, dtype=F16, alignment=16)
    call, _ = compiled(lambda t: kernels.layout_of(t, dtype=F16, alignment=16))
    assert call(tensors) == expected
    call, _ = compiled(lambda t: kernels.layout_of(t).views(kernels.pack(t)))
    assert flat(call(tensors)) == flat(tensors)
    call, counter = compiled(lambda t, layout: kernels.pack(t, layout=layout))
    for _ in range(2):
        assert flat(call(tensors, expected)) == flat(kernels.pack(tensors, layout=expected))
    assert counter.frame_count == 1


@SOME_BACKENDS
def test_dynamic_shapes(backend):
    def fn(a: Tensor, b: Tensor) -> Any:
        packed = kernels.pack([a, b])
        views = kernels.layout_of([a, b]).views(packed)
        kernels.unpack(packed, [b, a], scale=0.5)
        return kernels.sum_n(views), kernels.dot_and_norms(a, b), kernels.adasum(a, b, out=a)

    call, counter = compiled(fn, dynamic=True)
    frames = []
    for rows in (9, 5, 130):
        ours, theirs = ([random((rows, 4), F32, backend.device, i) for i in (1, 2)] for _ in "12")
        assert flat(call(*ours)) == flat(fn(*theirs)) and flat(ours) == flat(theirs)
        frames.append(counter.frame_count)
    assert len(set(frames)) == 1


@SOME_BACKENDS
def test_scalars_that_change(backend):
    call, _ = compiled(lambda a, b, scale: kernels.scaled_add(a, b, beta=scale))
    a, b, _ = pair(F32, backend.device, 1)
    for scale in (0.1, 0.2, 0.3):
        assert flat(call(a, b, scale)) == flat(kernels.scaled_add(a, b, beta=scale))


X = torch.ones(16)
ERRORS: dict[str, tuple[Callable[[Tensor], Any], type[Exception]]] = {
    "alpha must be a float, not str": (lambda x: kernels.scaled_add(x, x, alpha="1"), TypeError),
    "b has shape (3,) but a has (16,)": (lambda x: kernels.adasum(x, x[:3]), ValueError),
    "out has shape (3,)": (lambda x: kernels.adasum(x, x, out=x[:3]), ValueError),
    "end at the 16 elements": (lambda x: kernels.dot_and_norms(x, x, (0, 3)), ValueError),
    "must hold ints, not float": (lambda x: kernels.adasum(x, x, (0, 3.0, 16)), TypeError),
    "tensors is empty": (lambda x: kernels.sum_n([]), ValueError),
    "must be a list or tuple": (lambda x: kernels.sum_n(x), TypeError),
    "tensors[1] has dtype torch.int32": (lambda x: kernels.pack([x, x.int()]), TypeError),
    "tensors[1] is not contiguous": (lambda x: kernels.pack([x, x[::2]]), ValueError),
    "layout holds 2 tensors": (
        lambda x: kernels.pack([x], layout=kernels.layout_of([x, x])), ValueError,
    ),
    "pass one float32": (lambda x: kernels.sum_n([x], found_inf=x), TypeError),
    "dots has shape (2, 3)": (
        lambda x: kernels.combine(x, x, x.new_zeros(2, 3, dtype=F64)), ValueError,
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", ERRORS)
def test_errors_while_tracing(text):
    call, kind = ERRORS[text]
    with pytest.raises(kind) as eager:
        call(X)
    with pytest.raises(kind) as traced:
        torch.compile(call, backend="aot_eager")(X)
    assert text in str(eager.value) and str(traced.value) == str(eager.value)
    torch._dynamo.reset()
    # With fullgraph=True torch wraps what the traced code raises in an error of its own.
    with pytest.raises(Unsupported):
        compiled(call)[0](X)


def test_overlap_is_found_when_the_operator_runs():
    with pytest.raises(ValueError, match=r"tensors\[0\] and tensors\[1\] overlap"):
        compiled(lambda b, x: kernels.unpack(b, [x[:8], x[4:12]]))[0](torch.ones(32), X.clone())
    base = X.clone()
    with pytest.raises(ValueError, match="out overlaps a"):
        torch.ops.adasum.adasum_4(
            [base[:8], base[8:]], [0, 8], None, 0, [2.0, 2.0], True, base[4:12], None, None
        )
    with pytest.raises(ValueError, match=r"out overlaps tensors\[0\]"):
        torch.ops.adasum.pack_4([base], [0, 16], None, 64, [2.0], True, base, None, None)
    assert torch.equal(base, X)


def vector(seed: int, dtype: torch.dtype = F32, numel: int = 16) -> Tensor:
    return random(numel, dtype, "cpu", seed)


@pytest.mark.parametrize("flag", [None, torch.zeros(())], ids=["", "found_inf"])
def test_opcheck(flag):
    ops, x, y, out, cuts = torch.ops.adasum, vector(1), vector(2), vector(3), [0, 5, 16]
    dots, whole, slots = kernels.dot_and_norms(x, y, cuts), [0, 16], [0, 16, 32]
    # found_inf and max_abs.
    flags = (None, None) if flag is None else (flag, torch.zeros(()))
    double = (flag, None if flag is None else torch.zeros((), dtype=torch.float64))
    for op, args in [
        (ops.pack_4, ([x, y[:5]], slots, None, 64, [0.5], True, vector(4, F16, 32), *flags)),
        (
            ops.unpack_4,
            (
                [x.clone(), out[:5].clone()],
                slots,
                None,
                64,
                [0.5],
                True,
                vector(4, BF16, 32),
                *flags,
            ),
        ),
        (ops.sum_n_4, ([x, y], whole, None, 0, [0.5], True, out.double(), *double)),
        (ops.sum_n_4, ([x, y, out], whole, None, 0, [0.5], True, out, *flags)),
        (ops.scaled_add_4, ([x, y], whole, None, 0, [0.5, -1.0], True, out, *flags)),
        (ops.dot_and_norms_4, ([x, y], cuts, None, 0, [], True, dots.clone(), None, None)),
        (ops.combine_4, ([x, y], cuts, dots, 0, [3.0, 1.5], True, out, *flags)),
        (ops.adasum_4, ([x, y], cuts, None, 0, [2.0, 2.0], True, out, *flags)),
    ]:
        torch.library.opcheck(op.default, args)


def test_calls_stay_out_of_torchs_own_cuda_graphs():
    if not hasattr(torch.Tag, "cudagraph_unsafe"):
        pytest.skip("this torch has no such tag")
    names = ["pack", "unpack", "sum_n", "scaled_add", "dot_and_norms", "combine", "adasum"]
    for name in names:
        operator = getattr(torch.ops.adasum, f"{name}_4")
        assert torch.Tag.cudagraph_unsafe in operator.default.tags


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict):
    class Module(torch.nn.Module):
        def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Any:
            kernels.unpack(kernels.pack([a, b]), [b, c])
            return kernels.adasum(a, b, CUTS, out=a), kernels.dot_and_norms(a, c)

    ours, theirs = (pair(F32, "cpu", 1) for _ in range(2))
    program = torch.export.export(Module(), tuple(pair(F32, "cpu", 1)), strict=strict)
    assert flat(program.module()(*ours)) == flat(Module()(*theirs))
    assert flat(ours) == flat(theirs)


def test_dispatch_modes():
    a, b, _ = pair(F32, "cpu", 1)
    graph = make_fx(lambda a, b: kernels.adasum(a, kernels.sum_n([a, b])))(a, b)
    assert flat(graph(a, b)) == flat(kernels.adasum(a, kernels.sum_n([a, b])))
    targets = [str(node.target) for node in graph.graph.nodes]
    assert [t for t in targets if t.startswith("adasum")] == [
        "adasum.sum_n_4.default", "adasum.adasum_4.default",
    ]  # fmt: skip
    with FakeTensorMode():
        packed = kernels.pack([torch.empty(5), torch.empty(1 << 40)])
    assert packed.shape == ((1 << 40) + 16,)


def test_the_operator_launches_as_eager_does(backend, monkeypatch):
    if not backend.launches:
        pytest.skip("the CPU path launches nothing")
    a, b, _ = pair(F32, backend.device, 1)

    def fn(a: Tensor, b: Tensor) -> Tensor:
        return kernels.adasum(a, kernels.sum_n([a, b]))

    with test_launches.launches(monkeypatch) as eager:
        fn(a, b)
    with test_launches.launches(monkeypatch) as log:
        compiled(fn)[0](a, b)
    assert log == eager and len(log) > 1


def everything(a: Tensor, b: Tensor, c: Tensor, flag: Tensor) -> Any:
    """Every function, in place and not, between operations of torch's that round nothing."""
    packed = kernels.pack([a * 2, b, c.relu()], scale=0.5, found_inf=flag)
    total = kernels.sum_n([a, b, c], dtype=F64)
    kernels.scaled_add(a, b, alpha=0.3, out=b)
    both = kernels.combine(a, b, kernels.dot_and_norms(a, b, CUTS), CUTS)
    kernels.unpack(packed, [torch.empty_like(a), both, c], scale=4.0)
    kernels.adasum(c, both, out=c, found_inf=flag)
    views = kernels.layout_of([a, b, c]).views(packed)
    return packed, total, both, (c * 2).relu(), views[1] * 2


def everything_on(device: str, seed: int) -> list[Tensor]:
    return [*pair(F32, device, seed), torch.zeros((), device=device)]


@pytest.mark.parametrize(
    "backend", ["cpu", pytest.param("emulator", marks=pytest.mark.slow), "triton"], indirect=True
)
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor(backend, mode):
    if backend.device == "cpu" and mode != "default":
        pytest.skip("CUDA graphs need a CUDA device")
    if mode != "default" and not hasattr(torch.Tag, "cudagraph_unsafe"):
        pytest.skip("this torch cannot keep an operator out of its CUDA graphs")
    if backend.device == "cpu" and shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("no C++ compiler for inductor")
    call = torch.compile(everything, fullgraph=True, mode=mode)
    # CUDA graphs warm up, record and replay.
    for seed in range(4):
        ours, theirs = (everything_on(backend.device, seed) for _ in range(2))
        assert flat(call(*ours)) == flat(everything(*theirs))
        assert flat(ours) == flat(theirs)
