"""The compiled CPU path: what is used where it cannot be, and what it writes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kernels
from kernels.cpu import dispatch, native
from tests.kernels.cases import DTYPES, bits, random
from tests.kernels.cpu.cases import need_compiled, works


@pytest.mark.usefixtures("library", "fresh")
@pytest.mark.parametrize(
    "option", ["-ffast-math", pytest.param("-funsafe-math-optimizations", marks=pytest.mark.slow)]
)
def test_a_compilers_own_options_change_no_numbers(option: str) -> None:
    """With these gcc would have the whole process flush subnormal numbers to zero."""
    if not shutil.which("gcc"):
        pytest.skip("no gcc on the PATH")
    code = """
import kernels, torch
assert kernels.backend_info().cpu_path == "compiled", kernels.backend_info().cpu_path
print((torch.tensor([1e-40]) * 1).item(), kernels.sum_n([torch.tensor([1e-40])]).item())
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "CC": f"gcc {option} -march=native"},
    )
    assert [float(word) for word in done.stdout.split()] == [torch.tensor(1e-40).item()] * 2


@pytest.mark.usefixtures("built")
def test_torchs_zeros_without_memory_are_summed_and_packed_as_zeros() -> None:
    zeros, ones = torch._efficientzerotensor(100), torch.ones(100)
    assert zeros.data_ptr() == 0
    assert torch.equal(kernels.scaled_add(zeros, ones, alpha=2.0, beta=3.0), 3 * ones)
    assert torch.equal(kernels.sum_n([ones, zeros]), ones)
    layout = kernels.layout_of([zeros, ones])
    first, second = layout.views(kernels.pack([zeros, ones], layout=layout, scale=2.0))
    assert torch.equal(first, 0 * ones) and torch.equal(second, 2 * ones)
    with pytest.raises(TypeError, match=r"^a has no memory of its own"):
        kernels.dot_and_norms(zeros, ones)


@pytest.mark.parametrize(
    ("system", "machine", "capability"),
    [("Linux", "ppc64le", "VSX"), ("Darwin", "x86_64", "AVX2"), ("Linux", "x86_64", "DEFAULT")],
)
def test_other_machines(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, system: str, machine: str, capability: str
) -> None:
    monkeypatch.setattr(native.platform, "system", lambda: system)
    monkeypatch.setattr(native.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    named = "AVX2" if (system, machine) == ("Linux", "x86_64") else f"{system} on {machine}"
    assert named in kernels.backend_info().cpu_path and works()


def test_the_choice_is_the_users(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADASUM_CPU_KERNELS", "torch")
    assert kernels.backend_info().cpu_path == "torch: ADASUM_CPU_KERNELS=torch" and works()
    assert not fresh.exists()
    monkeypatch.setattr(dispatch, "_state", dispatch._State())
    monkeypatch.setenv("ADASUM_CPU_KERNELS", "fortran")
    message = "ADASUM_CPU_KERNELS must be one of auto, native, torch, got 'fortran'"
    for call in (works, kernels.backend_info):
        with pytest.raises(ValueError, match=message):
            call()


def test_torch_can_be_demanded(fresh: Path) -> None:
    dispatch.use_torch("of a reason")
    assert kernels.backend_info().cpu_path == "torch: of a reason" and works()
    assert not fresh.exists()


def test_autograd_sees_what_is_written() -> None:
    need_compiled()
    a, b = (random(100, torch.float32, "cpu", seed) for seed in (1, 2))
    layout = kernels.layout_of([a])
    buffer = kernels.pack([a])
    calls: list[tuple[Tensor, Callable[[], object]]] = [
        (a, lambda: kernels.sum_n([a, b], out=a)),
        (a, lambda: kernels.scaled_add(a, b, out=a)),
        (a, lambda: kernels.adasum(a, b, out=a)),
        (a, lambda: kernels.unpack(buffer, [a], layout=layout)),
        (buffer, lambda: kernels.pack([a], layout=layout, out=buffer)),
    ]
    for written, call in calls:
        before = written._version
        call()
        assert written._version > before


def test_elementwise_bits_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused as torch's vectors fuse it, whichever way is taken; sums are added in order."""
    need_compiled()
    for dtype in DTYPES:
        # Whole vectors: torch rounds the product apart in what is left of them.
        a, b, c = (random(1 << 16, dtype, "cpu", seed) for seed in (1, 2, 3))

        def results(a: Tensor = a, b: Tensor = b, c: Tensor = c) -> list[bytes]:
            tensors = [
                kernels.sum_n([a, b, c], scale=0.3),
                kernels.scaled_add(a, b, alpha=0.3, beta=-1.7),
                kernels.scaled_add(a, b, alpha=1e-30, beta=1e30),
                kernels.pack([a, b], scale=1.7),
            ]
            return [bits(tensor) for tensor in tensors]

        compiled = results()
        with monkeypatch.context() as patched:
            patched.setattr(dispatch, "library", lambda: None)
            assert results() == compiled, dtype
