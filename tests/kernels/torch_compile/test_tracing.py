"""What torch sees of an operator while it traces: errors, schemas, tags, graphs for export."""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported

import kernels
from kernels.call import FUNCTIONS
from tests.kernels.cases import misaligned, random
from tests.kernels.gpu import test_launches
from tests.kernels.test_arguments import ERRORS
from tests.kernels.torch_compile.cases import (
    BF16,
    CUTS,
    F16,
    F32,
    F64,
    compiled,
    flat,
    options,
    pair,
)

# What torch itself deprecates in its compiler.
pytestmark = pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled", "ignore:.*torch.jit")

X = torch.ones(16)
# One of each kind of argument is quick: all come from the checks that eager calls run.
QUICK = ("alpha must be", "b has shape", "must hold ints", "tensors[1] is not", "layout holds")


@pytest.mark.parametrize(
    "text",
    [
        text if text.startswith(QUICK) else pytest.param(text, marks=pytest.mark.slow)
        for text in ERRORS
        # dynamo ends at float() of such an int with an error of its own.
        if "that no float64 holds" not in text
    ],
)
def test_errors_while_tracing(text):
    call, kind = ERRORS[text]
    with pytest.raises(kind) as eager:
        call(X[:8])
    with pytest.raises(kind) as traced:
        torch.compile(call, backend="aot_eager")(X[:8])
    assert text in str(eager.value) and str(traced.value) == str(eager.value)


@pytest.mark.parametrize("out", [None, X.clone()], ids=["", "out"])
def test_a_compiled_call_leaves_its_checks_to_the_operator(out):
    """dynamo adds a guard for each global name in code it traces, which every call checks."""
    names: list[str] = []

    def note(guards: Any) -> list[bool]:
        names.extend(guard.name for guard in guards if "kernels" in guard.name)
        return [True] * len(guards)

    torch.compile(
        lambda x, y: kernels.scaled_add(x, y, alpha=0.5, out=out),
        backend="aot_eager",
        fullgraph=True,
        options={"guard_filter_fn": note},
    )(X, X)
    assert names and not [name for name in names if "kernels_dot_arguments" in name]


def test_overlap_is_found_when_the_operator_runs():
    with pytest.raises(ValueError, match=r"tensors\[0\] and tensors\[1\] overlap"):
        compiled(lambda b, x: kernels.unpack(b, [x[:8], x[4:12]]))[0](torch.ones(32), X.clone())
    base = X.clone()
    with pytest.raises(ValueError, match="out overlaps a"):
        torch.ops.adasum.adasum_10.out(
            *([base[:8], base[8:]], *options(first=2.0, second=2.0), base[4:12], None)
        )
    with pytest.raises(ValueError, match=r"out overlaps tensors\[0\]"):
        torch.ops.adasum.pack_10([base], base, [0], 64, 2.0, None, None)
    assert torch.equal(base, X)


def vector(seed: int, dtype: torch.dtype = F32, numel: int = 16) -> Tensor:
    return random(numel, dtype, "cpu", seed)


@pytest.mark.parametrize("flag", [None, torch.zeros(())], ids=["", "found_inf"])
def test_opcheck(flag):
    ops, x, y, out, starts = torch.ops.adasum, vector(1), vector(2), vector(3), [0, 5]
    cuts, slots = [*starts, 16], [0, 16]
    dots = kernels.dot_and_norms(x, y, cuts)
    half, tree = options(first=0.5), options(first=0.5, kind="tree", accumulate=F32)
    adds, blend = options(first=0.5, second=-1.0), options(starts=starts, table=dots, first=3.0)
    halves, cut = options(starts=starts, first=2.0, second=2.0), options(starts=starts)
    tables, rows = kernels.gram([x, y], cuts)[None], torch.full((2, 2), 0.5, dtype=F64)
    weighted, joins = options(starts=starts, table=rows), [0.0, 1.0, 1.0, 1.0]
    gram = torch.zeros(2, 2, 2, dtype=F64)
    for op, args in [
        (ops.pack_10.default, ([x, y[:5]], vector(4, F16, 32), slots, 64, 0.5, None, flag)),
        (
            ops.pack_10.default,
            ([x, y[:5]], vector(4, F16, 32), slots, 64, 1.0, vector(5, F64, 1)[0], None),
        ),
        (
            ops.unpack_10.default,
            ([x.clone(), out[:5].clone()], vector(4, BF16, 32), slots, 64, 0.5, None, flag),
        ),
        (ops.sum_n_10.default, ([x, y], *half)),
        (ops.sum_n_10.out, ([x, y], *half, out.double(), flag)),
        (ops.sum_n_10.out, ([x, y, out], *tree, out, flag)),
        (ops.scaled_add_10.out, ([x, y], *adds, out, flag)),
        (ops.dot_and_norms_10.default, ([x, y], *cut)),
        (ops.combine_10.out, ([x, y], *blend, out, flag)),
        (ops.adasum_10.out, ([x, y], *halves, out, flag)),
        (ops.gram_10.out, ([x, y], *options(starts=starts, kind="False"), gram, None)),
        (ops.adasum_coefficients_10.default, ([tables], rows.clone(), joins, rows[:, 0].clone())),
        (ops.weighted_sum_10.out, ([x, y], *weighted, misaligned(out), flag)),
    ]:
        torch.library.opcheck(op, args)


def test_calls_that_leave_memory_stay_out_of_torchs_own_cuda_graphs():
    if not hasattr(torch.Tag, "cudagraph_unsafe"):
        pytest.skip("this torch has no such tag")
    for name in FUNCTIONS:
        packet = getattr(torch.ops.adasum, f"{name}_10")
        # These two leave neither tables nor scratch on the device.
        safe = name in ("sum_n", "scaled_add")
        for overload in packet.overloads():
            assert (torch.Tag.cudagraph_unsafe in getattr(packet, overload).tags) != safe


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


@pytest.mark.slow
def test_compiled_ahead_of_time_with_an_empty_list(tmp_path):
    """AOTInductor passes None where a call has no segments."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("no C++ compiler for inductor")

    class Both(torch.nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return kernels.adasum(a, b) + kernels.scaled_add(a, b, alpha=0.5)

    a, b = vector(1), vector(2)
    program = torch.export.export(Both(), (a, b))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "b.pt2"))
    assert torch.equal(torch._inductor.aoti_load_package(path)(a, b), Both()(a, b))


def test_a_plan_in_a_compiled_function_says_so():
    a, b = vector(1), vector(2)
    plan = kernels.plan_sum_n([a, b])
    with pytest.raises(Unsupported, match=r"does not see what a plan does: .* call kernels\.sum_n"):
        compiled(lambda: plan() + 1)[0]()
    with pytest.raises(Unsupported, match=r"no plan is made while torch\.compile"):
        compiled(lambda: kernels.plan_sum_n([a, b])())[0]()
    # torch runs such a function uncompiled.
    assert torch.equal(torch.compile(lambda: plan() + 1, backend="aot_eager")(), a + b + 1)


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
