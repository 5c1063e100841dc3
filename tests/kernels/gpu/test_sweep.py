"""The sweep over every kernel, as far as it goes without a GPU, and that it finds faults."""

from __future__ import annotations

import pytest
import torch

import kernels
from tests.kernels.gpu import sweep
from tests.ptx_emulator.driver import emulated

SMALL = (1, 1003, 2051)
on_a_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("name", sweep.KERNELS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_a_gpu)])
def test_each_kernel_is_its_float64_reference(device: str, name: str) -> None:
    sweep.KERNELS[name](device, SMALL if device == "cpu" else sweep.SIZES)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_graphs_streams_and_another_gpu_give_the_same_bits() -> None:
    sweep.replayed("cuda", sweep.SIZES)
    sweep.two_streams("cuda", sweep.SIZES)
    if torch.cuda.device_count() > 1:
        sweep.second_gpu("cuda", sweep.SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("name", sweep.KERNELS)
def test_each_kernel_is_its_reference_in_its_compiled_code(name: str) -> None:
    pytest.importorskip("triton")
    with emulated(races=False):
        sweep.KERNELS[name]("cpu", (1, 515, 1031))


@pytest.mark.parametrize("name", [name for name in sweep.KERNELS if name != "plans"])
def test_one_element_off_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(kernels, name)

    def off(*arguments: object, **options: object) -> object:
        result = right(*arguments, **options)
        written = result[0] if isinstance(result, list) else result
        written.view(-1)[-1] += 1.0
        return result

    monkeypatch.setattr(kernels, name, off)
    with pytest.raises(AssertionError, match=r"float64 gives .*; 1 of \d+ are wrong"):
        sweep.KERNELS[name]("cpu", SMALL)


class FakeGraph:
    """A graph that replays what ran while it was captured."""

    running: FakeGraph | None = None

    def __init__(self) -> None:
        self.calls: list[object] = []

    def __enter__(self) -> None:
        FakeGraph.running = self

    def __exit__(self, *_: object) -> None:
        FakeGraph.running = None

    def replay(self) -> None:
        for plan in self.calls:
            plan()  # type: ignore[operator]


@pytest.mark.parametrize("good", [True, False])
def test_check_of_replays_finds_a_graph_that_does_nothing(
    good: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: graph)
    run = kernels.SumPlan.__call__

    def noted(plan: kernels.SumPlan, scale: float = 1.0) -> torch.Tensor:
        if FakeGraph.running is not None and good:
            FakeGraph.running.calls.append(plan)
        return run(plan, scale)

    monkeypatch.setattr(kernels.SumPlan, "__call__", noted)
    plans = sweep._plans
    monkeypatch.setattr(
        sweep, "_plans", lambda *given: (each for each in plans(*given) if each[0] == "sum_n")
    )
    if good:
        sweep.replayed("cpu", SMALL)
    else:
        with pytest.raises(AssertionError, match="sum_n: 1003 elements have other bits"):
            sweep.replayed("cpu", SMALL)
