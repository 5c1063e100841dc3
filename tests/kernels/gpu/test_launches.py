"""How many kernels one call launches: the promise of one, whatever the list."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

import kernels
from kernels.gpu import chunking, launcher, sum_kernels
from kernels.gpu.launcher import Chip, Kernel, Launch, _in_triton, triton
from tests.kernels.cases import random, relative_l2, reserved
from tests.kernels.conftest import Backend
from tests.ptx_emulator.driver import emulated


@contextmanager
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the kernels launched inside, in order."""
    log: list[str] = []

    def counted(run: Callable[..., None]) -> Callable[..., None]:
        def logged(launch: Launch, *leading: Any, **given: Any) -> None:
            log.append(launch.name)
            run(launch, *leading, **given)

        return logged

    with monkeypatch.context() as patch:
        # `start` is of a launch behind another one.
        for name in ("__call__", "start"):
            patch.setattr(Launch, name, counted(getattr(Launch, name)))
        yield log


@pytest.fixture
def on_triton(backend: Backend) -> Backend:
    if not backend.launches:
        pytest.skip("the CPU path launches nothing")
    return backend


def tensors_of(backend: Backend, count: int, numel: int) -> list[Tensor]:
    return list(random(count * numel, torch.float32, backend.device, 1).split(numel))


@pytest.mark.parametrize(("count", "numel"), [(1, 5), (300, 16), (3, 4099)])
def test_a_list_is_one_launch(on_triton, monkeypatch, count, numel):
    tensors = tensors_of(on_triton, count, numel)
    with launches(monkeypatch) as log:
        buffer = kernels.pack(tensors, scale=0.5)
        kernels.unpack(buffer, tensors)
        kernels.sum_n(tensors)
    assert log == ["_copy_kernel", "_copy_kernel", "_sum_kernel"]


def test_a_list_of_two_dtypes_is_two_launches(on_triton, monkeypatch):
    tensors = [
        t.to(torch.float16) if i % 2 else t for i, t in enumerate(tensors_of(on_triton, 9, 7))
    ]
    layout = kernels.layout_of(tensors, dtype=torch.float32)
    with launches(monkeypatch) as log:
        kernels.pack(tensors, layout=layout)
    assert log == ["_copy_kernel"] * 2


ONE, TWO = ["_one_launch_kernel"], ["_dots_kernel", "_combine_kernel"]
INPUTS = 2 * 4 * 5000


@pytest.mark.parametrize(
    ("chip", "segments", "expected"),
    [
        # Five tiles of 1024 elements, where a multiprocessor has room for four.
        (Chip(2, 0), None, ONE),
        (Chip(1, 0), None, TWO),
        (Chip(1, 2 * INPUTS), None, ONE),
        (Chip(1, 2 * INPUTS - 2), None, TWO),
        (Chip(2, 0), (0, 12, 3000, 5000), ONE),
        # Two chunks more.
        (Chip(2, 0), (0, 10, 3000, 5000), ONE),
        (Chip(1, 2 * INPUTS), (0, 10, 3000, 5000), ONE),
    ],
    ids=str,
)
def test_one_launch_or_two(on_triton, monkeypatch, chip, segments, expected):
    """One where all tiles are resident at once, or where half of L2 holds both inputs, whatever
    the segments. The bits are the same either way."""
    a, b = (random(5000, torch.float32, on_triton.device, seed) for seed in (1, 2))
    out = torch.full_like(a, float("nan"))
    with launches(monkeypatch) as log, mock.patch.object(launcher, "chip_of", return_value=chip):
        kernels.adasum(a, b, segments, out=out)
        apart = kernels.adasum(a, b, segments, cooperative=False)
        assert torch.equal(kernels.plan_adasum(a, b, segments, cooperative=False)(), apart)
    assert log == [*expected, *TWO, *TWO]
    assert torch.equal(out, apart)
    dots = kernels.dot_and_norms(a, b, segments)
    assert torch.equal(out, kernels.combine(a, b, dots, segments))
    # Half an eps for each of a dot's 16 roundings (a product, 8 sums a thread, a tree of 128
    # threads), halved in the coefficient of two vectors that are near orthogonal and about as long;
    # half for the coefficient itself, one for the products and their sum: 5.5.
    reference = kernels.adasum_reference(a, b, segments)
    assert ((out - reference).abs() <= 8 * torch.finfo(a.dtype).eps * (a.abs() + b.abs())).all()


def keep_last_chunks(monkeypatch: pytest.MonkeyPatch, base: int) -> None:
    """Launch the last chunks of a buffer alone: no memory stands behind most of it."""
    cut = chunking.cut

    def last(bounds: tuple[int, ...], block: int, vector: int, tiles: int) -> Any:
        rows, shares = cut((5, bounds[-1] - base), 1024, vector, tiles)
        return np.add(rows, (base, 0, 0)), shares

    monkeypatch.setattr(chunking, "cut", last)
    monkeypatch.setattr(chunking, "_tiles", lambda *_: 1)


@pytest.mark.parametrize("cooperative", [True, False])
def test_chunks_past_2_31_elements(monkeypatch, cooperative):
    """The last chunks of a buffer of 4 GiB, most of which no memory stands behind."""
    base, numel = 1 << 31, (1 << 31) + 4099
    keep_last_chunks(monkeypatch, base)
    tensors = [reserved(2 * numel).view(torch.bfloat16) for _ in range(3)]
    a, b, out = (tensor[base + 5 :] for tensor in tensors)
    for tensor, seed in ((a, 1), (b, 2)):
        tensor.copy_(random(len(tensor), torch.bfloat16, "cpu", seed))
    out.fill_(float("nan"))
    with emulated(races=False, chip=Chip(2, 0)) as emulator:
        kernels.adasum(*tensors[:2], out=tensors[2], cooperative=cooperative)
    assert [each.name for each in emulator.launches] == (ONE if cooperative else TWO)
    reference = kernels.adasum_reference(a, b)
    assert relative_l2(out, reference) <= torch.finfo(torch.bfloat16).eps


def test_sums_of_chunks_past_2_31_elements(monkeypatch):
    """As above, where the element behind the chunks lies in a vector that they share."""
    base, numel = 1 << 31, (1 << 31) + 2051
    keep_last_chunks(monkeypatch, base)
    whole = [reserved(2 * numel).view(torch.bfloat16) for _ in range(2)]
    tensors = [one[base + 5 :] for one in whole]
    for seed, tensor in enumerate(tensors):
        tensor.copy_(random(len(tensor), torch.bfloat16, "cpu", seed))
    factors = torch.tensor([[0.5, -3.0]]).double()
    expected = kernels.gram_reference(tensors), kernels.weighted_sum_reference(tensors, factors)
    with emulated(races=False):
        matrices, precise = kernels.gram(whole), kernels.gram(whole, precise=True)
        kernels.weighted_sum(whole, factors, out=whole[0])
    # A rounding for each of 2046 sums, and in the reference one for each product as well.
    bound = 2 * 2046 * torch.finfo(torch.float64).eps
    assert relative_l2(matrices, expected[0]) <= bound
    assert relative_l2(precise.sum(3), expected[0]) <= bound
    assert relative_l2(tensors[0], expected[1]) <= torch.finfo(torch.bfloat16).eps


def test_other_calls_are_one_launch_and_precise_gram_two(on_triton, monkeypatch):
    a, b = (random(5000, torch.float32, on_triton.device, seed) for seed in (1, 2))
    with launches(monkeypatch) as log:
        kernels.dot_and_norms(a, b)
        kernels.scaled_add(a, b)
        matrices = kernels.gram([a, b])
        factors = kernels.adasum_coefficients(matrices[None], [(0, 1, 1, 1)])
        kernels.weighted_sum([a, b], factors)
        kernels.gram([a, b], precise=True)
    assert log == [
        *("_dots_kernel", "_scaled_add_kernel", "_gram_kernel", "_coefficients_kernel"),
        *("_weighted_sum_kernel", "_gram_kernel", "_precise_gram_kernel"),
    ]


def test_nothing_is_launched_for_nothing(on_triton, monkeypatch):
    empty = torch.empty(0, device=on_triton.device)
    with launches(monkeypatch) as log:
        kernels.adasum(empty, empty)
        kernels.sum_n([empty, empty])
        kernels.scaled_add(empty, empty)
        kernels.pack([])
    assert log == []


def calls(device: torch.device) -> None:
    """Every kernel, in the ways that its code may depend on."""
    flag = torch.zeros((), device=device)
    for numel, start, found_inf in itertools.product((64, 1501), (0, 1), (None, flag)):
        memory = random(4 * numel + 1, torch.float32, device, numel)
        a, b, c, out = memory[start : start + 4 * numel].split(numel)
        for scale in (1.0, 0.0, 0.3):
            packed = kernels.pack([a, b], scale=scale, found_inf=found_inf)
            kernels.unpack(packed, [b, c], scale=scale, found_inf=found_inf)
            kernels.sum_n([a, b, c], scale=scale, out=out, found_inf=found_inf)
            kernels.scaled_add(a, b, alpha=scale, out=out, found_inf=found_inf)
        for bounds in (None, (0, 8, numel)):
            kernels.adasum(a, b, bounds, out=out, found_inf=found_inf)
            dots = kernels.dot_and_norms(a, b, bounds)
            kernels.combine(a, b, dots, bounds, out=out, found_inf=found_inf)
            matrices = kernels.gram([a, b, c], bounds)
            tree = [(0, 1, 1, 1), (0, 2, 2, 1)]
            spread = torch.ones_like(matrices[:, 0, 0])
            factors = kernels.adasum_coefficients(matrices[None], tree, spread=spread)
            kernels.gram([a, b, c], bounds, precise=True)
            kernels.weighted_sum([a, b, c], factors, bounds, out=out, found_inf=found_inf)


def test_a_launch_finds_the_code_that_triton_would(on_triton, monkeypatch):
    """And from the second call on without compiling, whatever sizes, scales and addresses."""
    bind, found = Kernel.bind, set()

    def compared(
        kernel: Kernel, programs: int, leading: Any, *arguments: Any, **constants: Any
    ) -> Launch:
        launch = bind(kernel, programs, leading, *arguments, **constants)
        given = {name: _in_triton(value) for name, value in constants.items()} | launcher.OPTIONS
        passed = (*leading, *arguments)
        given["num_warps"] = launcher._warps(given["num_warps"])
        theirs = kernel.function.warmup(*passed, grid=(programs,), **given)
        names = kernel.function.arg_names[len(passed) :]
        values = tuple([given[name] for name in names])
        known = kernel._compiled.values()
        assert any(ours is theirs and values == mine for ours, _, mine in known)
        found.add(launch.name)
        return launch

    monkeypatch.setattr(Kernel, "bind", compared)
    # What is bound is not run: that takes the emulator seconds.
    monkeypatch.setattr(Launch, "__call__", lambda launch, *leading, **kept: None)
    calls(on_triton.device)
    assert len(found) == 10

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("looked for by Triton again")

    monkeypatch.setattr(triton.JITFunction, "run", refused)
    monkeypatch.setattr(Kernel, "bind", bind)
    calls(on_triton.device)


def test_products_are_fused_whatever_tritons_default(on_triton, monkeypatch):
    """And Triton does not warn of it, which asks for an answer from 3.9 on."""
    asked = []
    if hasattr(triton.knobs, "warn_once"):
        monkeypatch.setattr(triton.knobs, "warn_once", asked.append)
    monkeypatch.setattr(triton.knobs.language, "default_fp_fusion", False)
    fresh = Kernel(sum_kernels._sum_kernel.function.fn)
    monkeypatch.setattr(sum_kernels, "_sum_kernel", fresh)
    x = torch.ones(5, device=on_triton.device)
    kernels.sum_n([x, x])
    ((compiled, *_),) = fresh._compiled.values()
    assert compiled.metadata.enable_fp_fusion
    assert asked == []


def test_threads_that_come_at_once_compile_once(on_triton, monkeypatch):
    """Triton alone would compile in each, and keep what came last."""
    fresh = Kernel(sum_kernels._sum_kernel.function.fn)
    monkeypatch.setattr(sum_kernels, "_sum_kernel", fresh)
    x, ready, compiled = torch.ones(5, device=on_triton.device), threading.Barrier(3), []
    compile_kernel = triton.compiler.compile

    def compile_slowly(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.1)
        compiled.append(compile_kernel(*arguments, **options))
        return compiled[-1]

    monkeypatch.setattr(triton.compiler, "compile", compile_slowly)

    def total(_: int) -> Tensor:
        ready.wait(30)
        return kernels.sum_n([x, x])

    with ThreadPoolExecutor(3) as executor:
        assert all((each == 2).all() for each in executor.map(total, range(3)))
    assert len(compiled) == 1
    assert [code for code, *_ in fresh._compiled.values()] == compiled


def test_hooks_of_triton_are_told_of_the_launches_while_they_are_there(on_triton, monkeypatch):
    """As a profiler's are, which come and go behind the making of a plan."""
    x, told = torch.ones(5, device=on_triton.device), []
    plan = kernels.plan_sum_n([x, x])

    def enter(launch: Any) -> None:
        told.append(f"enter {launch.get()['name']}")

    def leave(launch: Any) -> None:
        told.append(f"leave {launch.get()['name']}")

    assert (plan() == 2).all() and told == []
    runtime = triton.knobs.runtime
    for chain, hook in ((runtime.launch_enter_hook, enter), (runtime.launch_exit_hook, leave)):
        chain.add(hook)
        try:
            plan()
        finally:
            chain.remove(hook)
    assert told == ["enter _sum_kernel", "leave _sum_kernel"]
    told.clear()
    assert (plan() == 2).all() and told == []
    # Triton takes these in the place of a chain, too.
    for name, hook in (("launch_enter_hook", enter), ("launch_exit_hook", leave)):
        for given in (None, hook):
            with monkeypatch.context() as patch:
                patch.setattr(runtime, name, given)
                plan()
    assert told == ["enter _sum_kernel", "leave _sum_kernel"]
