"""The report that users paste in an issue."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch

from adasum.check import checks, processes, report
from adasum.check.__main__ import main
from tests.processes.commands import ran

CHECK = (sys.executable, "-m", "adasum.check")


@pytest.mark.slow
def test_check_that_passes_reports_what_is_there_and_exits_with_0() -> None:
    # As from within a job: what torchrun set there must not reach the check's own ranks.
    done = ran(*CHECK, timeout=150, RANK="3", WORLD_SIZE="4", NCCL_DEBUG="INFO")
    assert done.returncode == 0, done.stderr
    assert "\nok       two ranks" in done.stdout
    assert "Sum and Adasum over" in done.stdout
    for line in ("torch ", "processors", "shared memory", "gloo ", "NCCL through cupy"):
        assert f"\n  {line}" in done.stdout, line
    assert torch.__version__ in done.stdout
    assert "NCCL_DEBUG               INFO" in done.stdout
    if not torch.cuda.is_available():
        assert done.stdout.endswith("torch sees no GPU here\n")


@pytest.mark.slow
def test_check_that_fails_exits_with_1_and_its_error() -> None:
    done = ran(*CHECK, "two ranks", timeout=150, ADASUM_TRANSPORT="pigeon")
    assert done.returncode == 1
    assert done.stdout.startswith("FAILED   two ranks")
    assert "ADASUM_TRANSPORT must be one of" in done.stdout


def test_check_without_self_test_starts_no_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--no-self-test"]) == 0
    assert capsys.readouterr().out.endswith("self-test: left out\n")


def test_check_names_a_variable_that_the_library_does_not_have(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ADASUM_FLIGHT_FODLER", "/records")
    assert main(["--no-self-test"]) == 0
    told = "/records: not a variable of adasum: did you mean ADASUM_FLIGHT_FOLDER?"
    assert told in capsys.readouterr().out


@pytest.mark.parametrize("passed", [True, False])
def test_check_on_a_gpu_runs_the_whole_list(
    passed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def run(name: str, ranks: int) -> str:
        ran.append(name)
        return processes.line("ok" if passed or name != "kernels" else "FAILED", name, 0.0)

    monkeypatch.setattr(report, "_devices", dict)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(processes, "run", run)
    assert main([]) == (0 if passed else 1)
    assert ran == [*checks.checks()] and {"two ranks", "kernels"} < {*ran}


def test_check_that_is_not_known_is_refused_with_the_list(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["adasums"])
    assert "no check 'adasums': there are two ranks" in capsys.readouterr().err


def test_check_of_what_is_missing_reports_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError("not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setattr(report, "load_nccl", refuse)
    main(["--no-self-test"])
    said = capsys.readouterr().out.splitlines()
    assert "  shared memory            no: not permitted" in said
    assert "  NCCL through cupy        no: not permitted" in said


def test_check_of_packages_for_another_cuda_says_what_to_uninstall(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    versions = dict.fromkeys(("cupy-cuda13x", "nvidia-nccl-cu13"), "1.0")
    monkeypatch.setattr(report, "_version", lambda name: versions.get(name, "not installed"))
    for cuda, said in (
        (None, "none: a CPU build"),
        ("11.8", "none: torch is for CUDA 11"),
        ("13.0", 'pip install "cupy-cuda13x>=14.2"'),
        (
            "12.8",
            'pip install "cupy-cuda12x>=14.2", '
            "but first pip uninstall cupy-cuda13x nvidia-nccl-cu13 "
            "and pip install --force-reinstall --no-deps nvidia-nccl-cu12: torch is for CUDA 12",
        ),
    ):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        assert report._extra() == said


def test_check_of_a_torch_without_a_private_name_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_foreach_sub_")
    assert report._private_names().endswith("not supported yet: torch:_foreach_sub_")
