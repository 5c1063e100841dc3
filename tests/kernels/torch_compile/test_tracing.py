"""What torch sees of an operator while it traces: errors, schemas, tags, graphs for export."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import kernels
from tests.kernels.cases import random
from tests.kernels.gpu import test_launches
from tests.kernels.torch_compile.cases import BF16, CUTS, F16, F32, F64, compiled, flat, pair

# What torch itself deprecates in its compiler.
pytestmark = pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled", "ignore:.*torch.jit")

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


# One of each kind of argument is quick: all come from the checks that eager calls run.
QUICK = ("alpha must be", "b has shape", "must hold ints", "tensors[1] is not", "layout holds")


@pytest.mark.parametrize(
    "text",
    [
        text if text.startswith(QUICK) else pytest.param(text, marks=pytest.mark.slow)
        for text in ERRORS
    ],
)
def test_errors_while_tracing(text):
    call, kind = ERRORS[text]
    with pytest.raises(kind) as eager:
        call(X)
    with pytest.raises(kind) as traced:
        torch.compile(call, backend="aot_eager")(X)
    assert text in str(eager.value) and str(traced.value) == str(eager.value)


def test_errors_in_a_whole_graph_are_wrapped_by_torch():
    """fullgraph=True turns what the traced code raises into an error of torch's own."""
    call, _ = ERRORS["alpha must be a float, not str"]
    with pytest.raises(Unsupported):
        compiled(call)[0](X)


def test_overlap_is_found_when_the_operator_runs():
    with pytest.raises(ValueError, match=r"tensors\[0\] and tensors\[1\] overlap"):
        compiled(lambda b, x: kernels.unpack(b, [x[:8], x[4:12]]))[0](torch.ones(32), X.clone())
    base = X.clone()
    with pytest.raises(ValueError, match="out overlaps a"):
        torch.ops.adasum.adasum_7(
            [base[:8], base[8:]], [0, 8], None, 0, [2.0, 2.0], True, base[4:12], None, None
        )
    with pytest.raises(ValueError, match=r"out overlaps tensors\[0\]"):
        torch.ops.adasum.pack_7([base], [0, 16], None, 64, [2.0], True, base, None, None)
    assert torch.equal(base, X)


def vector(seed: int, dtype: torch.dtype = F32, numel: int = 16) -> Tensor:
    return random(numel, dtype, "cpu", seed)


@pytest.mark.parametrize("flag", [None, torch.zeros(())], ids=["", "found_inf"])
def test_opcheck(flag):
    ops, x, y, out, cuts = torch.ops.adasum, vector(1), vector(2), vector(3), [0, 5, 16]
    dots, slots = kernels.dot_and_norms(x, y, cuts), [0, 16, 32]
    # found_inf and max_abs.
    flags = (None, None) if flag is None else (flag, torch.zeros(()))
    double = (flag, None if flag is None else torch.zeros((), dtype=torch.float64))
    for op, args in [
        (ops.pack_7, ([x, y[:5]], slots, None, 64, [0.5], True, vector(4, F16, 32), *flags)),
        (
            ops.unpack_7,
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
        (ops.sum_n_7, ([x, y], [], None, 0, [0.5], True, out.double(), *double)),
        (ops.sum_n_7, ([x, y, out], [], None, 0, [0.5], True, out, *flags)),
        (ops.scaled_add_7, ([x, y], [], None, 0, [0.5, -1.0], True, out, *flags)),
        (ops.dot_and_norms_7, ([x, y], [5], None, 0, [], True, dots.clone(), None, None)),
        (ops.combine_7, ([x, y], [5], dots, 0, [3.0, 1.5], True, out, *flags)),
        (ops.adasum_7, ([x, y], [5], None, 0, [2.0, 2.0], True, out, *flags)),
    ]:
        torch.library.opcheck(op.default, args)


def test_calls_stay_out_of_torchs_own_cuda_graphs():
    if not hasattr(torch.Tag, "cudagraph_unsafe"):
        pytest.skip("this torch has no such tag")
    names = ["pack", "unpack", "sum_n", "scaled_add", "dot_and_norms", "combine", "adasum"]
    for name in names:
        operator = getattr(torch.ops.adasum, f"{name}_7")
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
        "adasum.sum_n_functional_2.default", "adasum.adasum_7.default",
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
