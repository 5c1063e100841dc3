"""The checks of `adasum.check`, as far as they go without a GPU, and what runs them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import kernels
from adasum.check import checks, processes
from tests.processes.harness import run_ranks

# Behaves as the name that follows says.
FAKE = """
import os, sys, time
name, rank = sys.argv[1], os.environ["RANK"]
assert os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"]
if name == "hangs":
    time.sleep(60)
if name == "dies":
    print("illegal memory access", file=sys.stderr)
    os._exit(3)
if name == "wrong" and rank == "1":
    print("FAILED: off by 1")
    sys.exit(1)
print(f"ok: rank {rank}", flush=True)
print("a word of a library")
sys.exit(name == "ends badly")
"""


@pytest.mark.parametrize(
    ("name", "verdict", "text"),
    [
        ("right", "ok", "rank 0"),
        ("wrong", "FAILED", "off by 1"),
        ("hangs", "FAILED", "no answer in time: it wrote nothing"),
        ("dies", "FAILED", "ended with status 3: illegal memory access"),
        ("ends badly", "FAILED", "ended with status 1: a word of a library"),
    ],
)
def test_check_that_fails_hangs_or_dies_has_its_line(
    name: str, verdict: str, text: str, tmp_path: Path
) -> None:
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    seconds = 2.0 if name == "hangs" else 30.0
    said = processes.run(name, 2, seconds, [sys.executable, str(script)])
    assert said.startswith(f"{verdict:8} {name} ") and said.endswith(text)


def test_several_gpus_have_checks_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for cupy in (None, "cupy"):
        monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name, cupy=cupy: cupy)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        one = {*checks.checks()}
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
        found = ["torch", *([cupy] if cupy else [])]
        assert one == {"two ranks", "kernels", *(f"NCCL of {each}" for each in found)}
        assert {*checks.checks()} - one == {f"NCCL of {each}, ranks: 4" for each in found}


@pytest.mark.parametrize("name", ["pack", "sum_n", "adasum", "gram"])
def test_check_of_kernels_finds_one_element_off(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "NUMEL", 1003)
    assert checks.run_kernels("cpu") == ""
    right = getattr(kernels, name)

    def off(*arguments: object) -> torch.Tensor:
        result: torch.Tensor = right(*arguments)
        result.view(-1)[-1] += torch.nan if name == "adasum" else 1e4
        return result

    monkeypatch.setattr(kernels, name, off)
    with pytest.raises(AssertionError, match=f"{name} of torch.* off by"):
        checks.run_kernels("cpu")


def reduce(rank: int) -> None:
    assert "Sum and Adasum over" in checks.reduce("cpu", "auto")


def test_ranks_together_find_their_reductions_right() -> None:
    run_ranks(2, reduce)
