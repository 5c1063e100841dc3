"""The report that users paste in an issue."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from adasum import check


def report(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "adasum.check", *options],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.mark.slow
def test_check_with_self_test_passes_and_reports() -> None:
    # As from within a job: what torchrun set there must not reach the self-test's own ranks.
    done = report(RANK="3", WORLD_SIZE="4", NCCL_DEBUG="INFO")
    assert done.returncode == 0, done.stderr
    assert "self-test of two ranks: passed" in done.stdout
    assert done.stdout.count("Adasum 1.1 MiB in") == 2
    for line in ("torch ", "processors", "shared memory", "gloo ", "NCCL through cupy"):
        assert f"\n  {line}" in done.stdout, line
    assert torch.__version__ in done.stdout
    assert "NCCL_DEBUG               INFO" in done.stdout


@pytest.mark.slow
def test_check_with_failing_self_test_exits_with_1() -> None:
    done = report(ADASUM_TRANSPORT="pigeon")
    assert done.returncode == 1
    assert "self-test of two ranks: FAILED" in done.stdout
    assert "ADASUM_TRANSPORT must be one of" in done.stdout


def test_check_without_self_test_starts_no_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["--no-self-test"]) == 0
    assert "self-test: left out" in capsys.readouterr().out


def test_check_of_what_is_missing_reports_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError("not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setattr(check, "load_nccl", refuse)
    check.main(["--no-self-test"])
    said = capsys.readouterr().out.splitlines()
    assert "  shared memory            no: not permitted" in said
    assert "  NCCL through cupy        no: not permitted" in said


def test_check_of_packages_for_another_cuda_says_what_to_uninstall(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    versions = dict.fromkeys(("cupy-cuda13x", "nvidia-nccl-cu13"), "1.0")
    monkeypatch.setattr(check, "_version", lambda name: versions.get(name, "not installed"))
    for cuda, said in (
        (None, "none: a CPU build"),
        ("11.8", "none: torch is for CUDA 11"),
        ("13.0", 'pip install "adasum[cuda13]"'),
        (
            "12.8",
            'pip install "adasum[cuda12]", but first pip uninstall cupy-cuda13x nvidia-nccl-cu13 '
            "and pip install --force-reinstall --no-deps nvidia-nccl-cu12: torch is for CUDA 12",
        ),
    ):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        assert check._extra() == said


def test_check_of_a_torch_without_a_private_name_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_foreach_sub_")
    assert check._private_names().endswith("not supported yet: torch:_foreach_sub_")
