"""The checks of `adasum.check`, as far as they go without a GPU, and what runs them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import kernels
from adasum.check import checks, one_gpu, ranks, supervisor
from collectives.transport import Transport
from collectives.transport.base import Messages
from tests.processes.harness import run_ranks
from tests.ptx_emulator.driver import emulated

SMALL = (1, 1003, 2051)
# Says and does by the names that follow what a process of checks may.
FAKE = """
import os, sys, time
for name in sys.argv[1:]:
    if name == "hangs":
        time.sleep(60)
    if name == "dies":
        print("illegal memory access", file=sys.stderr)
        os._exit(3)
    print("a word of a library")
    verdict = "FAILED" if name == "wrong" else "ok"
    print(f"{verdict:8} {name}", flush=True)
    if verdict == "FAILED":
        break
"""


@pytest.mark.parametrize("name", one_gpu.KERNELS)
def test_check_of_each_kernel_passes_on_the_cpu(name: str) -> None:
    one_gpu.KERNELS[name]("cpu", SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("name", one_gpu.KERNELS)
def test_check_of_each_kernel_passes_on_its_compiled_code(name: str) -> None:
    pytest.importorskip("triton")
    with emulated(races=False):
        one_gpu.KERNELS[name]("cpu", (1, 515, 1031))


@pytest.mark.parametrize("name", [name for name in one_gpu.KERNELS if name != "plans"])
def test_check_of_a_kernel_with_one_element_off_fails(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(kernels, name)

    def off(*arguments: object, **options: object) -> object:
        result = right(*arguments, **options)
        written = result[0] if isinstance(result, list) else result
        written.view(-1)[-1] += 1.0
        return result

    monkeypatch.setattr(kernels, name, off)
    with pytest.raises(AssertionError, match=r"float64 gives .*; 1 of \d+ are wrong"):
        one_gpu.KERNELS[name]("cpu", SMALL)


def test_check_of_a_kernel_that_writes_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "scaled_add", lambda a, b, **options: options["out"])
    with pytest.raises(AssertionError, match="element 0 is nan"):
        one_gpu.KERNELS["scaled_add"]("cpu", SMALL)


def test_checks_that_fail_hang_or_die_leave_the_others_to_run(tmp_path: Path) -> None:
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    said: list[str] = []
    names = ["first", "wrong", "second", "hangs", "dies", "last"]
    passed = supervisor.supervise(names, said.append, 2.0, [sys.executable, str(script)])
    assert not passed
    assert [line.split()[:2] for line in said] == [
        ["ok", "first"],
        ["FAILED", "wrong"],
        ["ok", "second"],
        ["FAILED", "hangs"],
        ["FAILED", "dies"],
        ["ok", "last"],
    ]
    assert "no answer within 2 s" in said[3]
    assert "status 3: illegal memory access" in said[4]


def test_checks_that_all_pass_run_in_one_process(tmp_path: Path) -> None:
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    said: list[str] = []
    assert supervisor.supervise(["a", "b"], said.append, 20.0, [sys.executable, str(script)])
    assert len(said) == 2


def test_lines_of_checks_run_here_end_with_the_first_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(device: str, sizes: object) -> None:
        raise RuntimeError("CUDA error:\nan illegal address")

    def missing(device: str, sizes: object) -> None:
        raise ranks.NotInstalledError("cupy is not installed")

    known = {"missing": missing, "wrong": wrong, "never": wrong}
    monkeypatch.setattr(checks, "checks", lambda: known)
    assert checks.run_here([*known], "cpu") == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("left out missing") and first.endswith("cupy is not installed")
    assert second.startswith("FAILED   wrong") and second.endswith("CUDA error: an illegal address")


def test_several_gpus_have_checks_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    one = [*checks.checks()]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    several = {*checks.checks()} - {*one}
    assert several == {"a GPU not current", "NCCL of torch, ranks: 4", "NCCL of cupy, ranks: 4"}
    assert one[-2:] == ["NCCL of torch, ranks: 1", "NCCL of cupy, ranks: 1"]


def reduce(rank: int) -> None:
    said = ranks.together(ranks.TORCH, torch.device("cpu"))
    assert "Adasum 1.1 MiB in" in said


def test_ranks_together_find_their_reductions_right() -> None:
    run_ranks(2, reduce)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_rank_that_fails_is_named_with_its_error() -> None:
    with pytest.raises(AssertionError, match=r"rank 0: .*Error: "):
        ranks.start(ranks.TORCH, 1)


def test_cupy_that_is_not_installed_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ranks.NotInstalledError, match="cupy is not installed"):
        ranks.start(ranks.CUPY, 1)


def alone_over_a_stand_in(rank: int) -> list[str]:
    """Run `alone` with a transport that copies; return what it was asked for."""
    asked = []

    class Copying:
        def __init__(self, host: Transport, backend: object, timeout: float) -> None:
            assert (host.rank, host.size) == (0, 1)

        def exchange(self, sends: Messages, recvs: Messages, step: str, timeout: float) -> None:
            asked.append("exchange")
            recvs[0].tensor.copy_(sends[0].tensor)

        def close(self) -> None:
            asked.append("close")

    ranks.NcclTransport = Copying  # type: ignore[assignment,misc]
    ranks.CupyBackend = lambda device: None  # type: ignore[assignment,misc]
    ranks.alone(ranks.CUPY, torch.device("cpu"))
    return asked


def test_rank_alone_sends_to_itself_over_cupy() -> None:
    assert run_ranks(1, alone_over_a_stand_in) == [["exchange", "close"]]


def test_check_of_plans_finds_a_run_that_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.UnpackPlan, "__call__", lambda plan, scale=1.0: None)
    with pytest.raises(AssertionError, match="unpack: 1003 elements have other bits"):
        one_gpu.KERNELS["plans"]("cpu", SMALL)


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
    plans = one_gpu._plans
    monkeypatch.setattr(
        one_gpu, "_plans", lambda *given: (each for each in plans(*given) if each[0] == "sum_n")
    )
    if good:
        one_gpu.replayed("cpu", SMALL)
    else:
        with pytest.raises(AssertionError, match="sum_n: 1003 elements have other bits"):
            one_gpu.replayed("cpu", SMALL)
