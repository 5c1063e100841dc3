"""What C must not do, or may not, of the calls that it makes again."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import kernels
from kernels import packing, reduction
from kernels.cpu import build, native, torch_fallback
from kernels.packed_list import PackedList
from tests.kernels.cases import random
from tests.kernels.conftest import forget_calls
from tests.kernels.recall_case import Call, Case
from tests.ptx_emulator.driver import emulated


@pytest.fixture(autouse=True)
def no_call_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_calls(monkeypatch)


def test_what_is_no_scale() -> None:
    a = torch.ones(3)
    for good in range(4):
        kernels.sum_n([a, a.clone()], scale=float(good))
    b = torch.ones(3)
    for _ in range(4):
        kernels.sum_n([a, b])
        kernels.scaled_add(a, b)
        kernels.pack([a, b])
    bad: list[tuple[Any, type[Exception], str]] = [
        (True, TypeError, "must be a float, not bool"),
        ("1", TypeError, "must be a float, not str"),
        (None, TypeError, "must be a float, not NoneType"),
        (10**400, ValueError, "is an int that no float64 holds"),
    ]
    for scale, error, words in bad:
        with pytest.raises(error, match=f"scale {words}"):
            kernels.sum_n([a, b], scale=scale)
        with pytest.raises(error, match=f"scale {words}"):
            kernels.pack([a, b], scale=scale)
        with pytest.raises(error, match=f"alpha {words}"):
            kernels.scaled_add(a, b, alpha=scale)


@pytest.mark.usefixtures("in_c")
@pytest.mark.parametrize("function", ["pack", "unpack", "sum_n", "scaled_add"])
def test_torchs_functions_from_now_on(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(function, torch.float32, False, True, False)
    case.fill(1)
    for _ in range(4):
        case.call()
    state = native._State()
    state.libraries = native._state.libraries
    monkeypatch.setattr(native, "_state", state)
    kernels.use_torch_on_cpu("of a test")
    called: list[str] = []
    for name in ("pack", "unpack", "sum_n", "scaled_add"):
        path = f"kernels.cpu.torch_fallback.{name}"
        monkeypatch.setattr(path, lambda *_, name=name: called.append(name))
    case.call()
    assert called == [function]


@pytest.mark.usefixtures("in_c")
def test_the_emulator_emulates_what_c_would_do() -> None:
    pytest.importorskip("triton")
    a, b = (random(64, torch.float32, "cpu", seed) for seed in (1, 2))
    layout = kernels.layout_of([a, b])
    calls: list[Call] = [
        lambda: kernels.sum_n([a, b]),
        lambda: kernels.scaled_add(a, b),
        lambda: kernels.pack([a, b], layout=layout),
    ]
    for call in calls:
        for _ in range(4):
            call()
        with emulated() as emulator:
            before = len(emulator.launches)
            call()
            assert len(emulator.launches) == before + 1


@pytest.mark.parametrize(
    "kind", [list, tuple, type("Mine", (list,), {}), type("Own", (tuple,), {})]
)
def test_lists_of_all_kinds(kind: Any) -> None:
    tensors = [random(5, torch.float32, "cpu", seed) for seed in range(3)]
    expected = tensors[0] + tensors[1] + tensors[2]
    given = kind(tensors)
    buffer = kernels.pack(tensors)
    for _ in range(5):
        assert torch.equal(kernels.sum_n(given), expected)
        assert torch.equal(kernels.pack(given), buffer)
        back = kernels.unpack(buffer, given)
        assert type(back) is list and back is not given
        assert all(map(lambda one, other: one is other, back, tensors))
    for nothing in (kind(), ()):
        with pytest.raises(ValueError, match="tensors is empty"):
            kernels.sum_n(nothing)


@pytest.mark.usefixtures("in_c")
@pytest.mark.parametrize("function", ["pack", "unpack", "sum_n", "scaled_add"])
@pytest.mark.parametrize("given", [False, True], ids=["", "out"])
def test_nothing_is_kept(function: str, given: bool) -> None:
    """Nothing C touches is counted once too often, or too rarely, whatever the answer."""
    case = Case(function, torch.float32, False, given, True)
    case.fill(1)
    for _ in range(4):
        case.call()
    calls = packing._PACKS if function == "pack" else packing._UNPACKS
    calls = {"sum_n": reduction._SUMS, "scaled_add": reduction._SCALED_ADDS}.get(function, calls)
    [known] = [known for alike in calls.calls.values() for known in alike]
    assert known.job is not None
    scale = 123.25
    kept = [
        *(case.tensors, *case.tensors, case.whole, case.found_inf, case.layout, scale),
        *(calls.calls, known, known.check, known.job, known.places, *known.places.values()),
        *(known.job.libraries, torch.Tensor, None, torch.float32),
    ]
    bad = Case(function, torch.float32, False, given, True).tensors

    def counts() -> list[int]:
        gc.collect()
        return [sys.getrefcount(one) for one in kept if one is not None]

    def again(wrong: Any) -> None:
        if function == "pack":
            kernels.pack(wrong, layout=case.layout, out=case.whole, scale=scale)
        elif function == "unpack":
            kernels.unpack(case.whole, wrong, layout=case.layout, scale=scale)
        elif function == "sum_n":
            kernels.sum_n(wrong, out=case.whole, scale=scale)
        else:
            kernels.scaled_add(bad[0], wrong, alpha=scale)

    def once() -> None:
        case.call()
        for wrong in ([*bad[:2], bad[0].to("meta")], [*bad[:2], 3], [bad[0].to_sparse()] * 2, 5):
            with pytest.raises((TypeError, ValueError)):
                again(wrong)

    once()
    before = counts()
    for _ in range(50):
        once()
    # Fifty calls, and five errors of each: what is counted wrongly differs by as many.
    assert max(map(abs, np.subtract(counts(), before))) < 10


@pytest.mark.usefixtures("in_c")
def test_no_memory_is_kept() -> None:
    tensors = [random(3, torch.float32, "cpu", seed) for seed in range(200)]
    layout = kernels.layout_of(tensors)
    buffer = kernels.pack(tensors)
    strange = [*tensors[:-1], tensors[-1].to("meta")]

    def calls() -> None:
        for _ in range(50):
            kernels.pack(tensors, layout=layout)
            # Where one of the user's lies is remembered, so it is always the same.
            kernels.pack(tensors, layout=layout, out=buffer)
            kernels.unpack(buffer, tensors, layout=layout)
            kernels.sum_n(tensors)
            for function in (kernels.pack, kernels.sum_n):
                with pytest.raises(ValueError, match="is on"):
                    function(strange)  # type: ignore[operator]

    calls()
    tracemalloc.start()
    try:
        calls()
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        calls()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The addresses of a single call are 1,600 bytes.
    assert after - before < 50 * 100


class Foreign(Tensor):
    pass


class Otherwise(TorchFunctionMode):
    """What is allocated under it is something else."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return self.change(found) if func is torch.empty_like else found


@pytest.mark.usefixtures("in_c")
def test_what_modes_allocate_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = (random(20, torch.float32, "cpu", seed) for seed in (1, 2))
    for _ in range(4):
        kernels.sum_n([a, b])
    called: list[Tensor] = []
    real = torch_fallback.sum_n

    def watched(tensors: Any, wide: Any, out: Tensor, *rest: Any) -> None:
        called.append(out)
        real(tensors, wide, out, *rest)

    monkeypatch.setattr(torch_fallback, "sum_n", watched)
    with Otherwise(lambda made: made.as_subclass(Foreign)):
        found = kernels.sum_n([a, b])
    assert type(found) is Foreign and torch.equal(found.as_subclass(Tensor), a + b)
    # C does not write to what may lie elsewhere.
    assert len(called) == 1 and called[0] is found


@pytest.mark.usefixtures("in_c")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "change",
    [Tensor.half, Tensor.bfloat16, lambda made: made[:7].clone()],
    ids=["half", "bfloat16", "shorter"],
)
@pytest.mark.parametrize("begun_inside", [False, True])
def test_what_modes_make_of_an_output_is_theirs_alone(
    dtype: torch.dtype, change: Callable[[Tensor], Tensor], begun_inside: bool
) -> None:
    """C would write beyond a smaller one's end."""
    a, b = (random(20_000, dtype, "cpu", seed) for seed in (1, 2))
    # In float32, as kernels do: from float64 processors round to float16 once, or twice.
    total = a.float() + b.float()
    expected = total.to(dtype)
    if not begun_inside:
        for _ in range(4):
            kernels.sum_n([a, b])
    with Otherwise(change):
        like = torch.empty_like(a)
        for _ in range(4):
            found = kernels.sum_n([a, b])
            want = total[: len(like)].to(like.dtype)
            assert torch.equal(found, want) and found.dtype == like.dtype
    for _ in range(3):
        assert torch.equal(kernels.sum_n([a, b]), expected)


@pytest.mark.usefixtures("in_c")
def test_to_know_how_takes_no_memory() -> None:
    a, b = (random(1 << 16, torch.float64, "cpu", seed) for seed in (1, 2))
    for _ in range(3):
        kernels.sum_n([a, b], out=a)
    [known] = [known for alike in reduction._SUMS.calls.values() for known in alike]
    assert isinstance(known.job, native.Job)
    assert known.job.like.untyped_storage().nbytes() == 8


@pytest.mark.usefixtures("in_c")
def test_functions_out_of_use_are_not_made_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when another thread says so while they compute."""
    library = native.library(torch.float32)
    assert library is not None
    out, dtype = torch.ones(3), torch.float32
    listed = PackedList(kernels.layout_of([out]), (dtype,))
    assert library.sum_n_job(2, dtype, out) is not None
    monkeypatch.setattr(native._state, "libraries", {})
    assert library.sum_n_job(2, dtype, out) is None
    assert library.blend_job(out, out, out) is None
    assert library.copy_job(listed, out, True) is None


def test_what_was_known_inside_a_transform_says_nothing_of_others() -> None:
    a, b = (random((4,), torch.float32, "cpu", seed) for seed in (1, 2))

    def within(x: Tensor) -> Tensor:
        packed = kernels.pack([a, b])
        packed[:4].add_(x)
        return packed

    for _ in range(4):
        torch.func.vmap(lambda x: kernels.pack([a, b])[:4] + x)(torch.ones(2, 4))
    expected = within(torch.ones(4))
    for _ in range(2):
        assert torch.equal(torch.func.functionalize(within)(torch.ones(4)), expected)


@pytest.mark.usefixtures("in_c")
def test_threads_do_not_meet() -> None:
    wrong: list[object] = []

    def work(seed: int) -> None:
        tensors = [random(40_000, torch.float32, "cpu", 10 * seed + i) for i in range(2)]
        expected, layout = tensors[0] + tensors[1], kernels.layout_of(tensors)
        out, buffer = torch.empty(40_000), torch.empty(layout.numel)
        for _ in range(300):
            out.fill_(torch.nan)
            kernels.sum_n(tensors, out=out)
            kernels.pack(tensors, layout=layout, out=buffer)
            parts = layout.views(buffer)
            if not (torch.equal(out, expected) and all(map(torch.equal, parts, tensors))):
                wrong.append(seed)
            if seed == 0:
                reduction._SUMS.calls.clear()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)


@pytest.mark.usefixtures("in_c")
def test_others_go_on_while_c_computes(tmp_path: Path) -> None:
    source = tmp_path / "slow.c"
    source.write_text("#include <unistd.h>\nvoid slow(const void *task) { usleep(500000); }\n")
    slow = build.built("slow", [source], [], lambda path: ctypes.CDLL(str(path)).slow)
    address = ctypes.cast(slow, ctypes.c_void_p).value
    a, b = (random(1 << 17, torch.float32, "cpu", seed) for seed in (1, 2))
    for _ in range(3):
        kernels.scaled_add(a, b, out=a)
    [known] = [known for alike in reduction._SCALED_ADDS.calls.values() for known in alike]
    assert isinstance(known.job, native.Job) and address is not None
    known.job = known.job._replace(function=address)
    thread = threading.Thread(target=lambda: kernels.scaled_add(a, b, out=a))
    turns = 0
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        turns += 1
    # Had it been kept from them, there would be one or two.
    assert turns > 20
