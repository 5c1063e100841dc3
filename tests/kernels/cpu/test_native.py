"""The compiled CPU path: what is used where it cannot be, and what it writes."""

from __future__ import annotations

import ctypes
import itertools
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import kernels
from kernels import arithmetic
from kernels.cpu import dispatch, native
from tests.kernels.cases import BLOCK, DTYPES, bits, random
from tests.kernels.cpu.cases import ROOT, need_compiled, works


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("system", "machine", "capability", "named"),
    [
        ("Linux", "ppc64le", "VSX", "Linux on ppc64le"),
        ("Darwin", "x86_64", "AVX2", "Darwin on x86_64"),
        ("Linux", "x86_64", "DEFAULT", "AVX2"),
        # torch has no name for what every aarch64 can do.
        ("Linux", "aarch64", "DEFAULT", "compiled"),
    ],
)
def test_other_machines(
    monkeypatch: pytest.MonkeyPatch, system: str, machine: str, capability: str, named: str
) -> None:
    need_compiled()
    dispatch._state.clear()
    monkeypatch.setattr(native.platform, "system", lambda: system)
    monkeypatch.setattr(native.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert named in kernels.backend_info().cpu_path and works()


def lack(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "LIBRARY", path.with_name("libother.so"))


def cut(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(path.read_bytes()[:100])


def put_another(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "LIBRARY", Path(torch._C.__file__))


def change_its_sources(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path.parent / "task.h").open("a").write("\n")


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("happens", "reason"),
    [
        (lack, "the C kernels were not compiled at installation: "),
        (cut, "libnative.so cannot be loaded: "),
        (put_another, " cannot be loaded: "),
        (change_its_sources, "libnative.so was compiled from other sources: "),
    ],
)
def test_torch_takes_over_where_the_library_is_not_that_of_its_sources(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    happens: Callable[[Path, pytest.MonkeyPatch], None],
    reason: str,
) -> None:
    need_compiled()
    dispatch._state.clear()
    for path in (native.LIBRARY, *native.LIBRARY.parent.glob("*.[ch]")):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(native, "LIBRARY", tmp_path / native.LIBRARY.name)
    happens(native.LIBRARY, monkeypatch)
    said = kernels.backend_info().cpu_path
    assert said.startswith("torch: ") and reason in said and "run `make build`" in said
    assert works()
    dispatch._state.clear()
    monkeypatch.setenv("ADASUM_CPU_KERNELS", "native")
    with pytest.raises(RuntimeError, match=r"ADASUM_CPU_KERNELS=native: .*`make build`"):
        works()


def test_header_and_python_have_the_same_fields_and_numbers() -> None:
    text = (ROOT / "kernels" / "cpu" / "task.h").read_text()
    header = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    (struct,) = re.findall(r"struct task \{(.*?)\};", header, re.S)
    fields = re.findall(r"(\w+);", struct)
    assert fields == [name for name, _ in native.Task._fields_] and len(fields) > 10
    assert ctypes.sizeof(native.Task) == 8 * len(fields)
    numbers = dict(re.findall(r"#define (\w+) (\S+)", header))
    assert int(numbers["BLOCK"]) == BLOCK
    assert float.fromhex(numbers["TINY"]) == arithmetic.TINY
    assert float.fromhex(numbers["CANCELLED"]) == arithmetic.CANCELLED
    assert float.fromhex(numbers["SPREAD_LIMIT"]) == arithmetic.SPREAD_LIMIT


def test_library_loads_in_python_3_10_which_lacks_a_function() -> None:
    need_compiled()
    if not shutil.which("nm"):
        pytest.skip("no nm on the PATH")
    symbols = subprocess.run(
        ["nm", "-D", "--undefined-only", native.LIBRARY], capture_output=True, text=True, check=True
    ).stdout.split()
    # "U" would be an error where the function is missing.
    assert ("w", "PyObject_Vectorcall") in itertools.pairwise(symbols)


@pytest.mark.usefixtures("fresh")
def test_the_choice_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADASUM_CPU_KERNELS", "torch")
    assert kernels.backend_info().cpu_path == "torch: ADASUM_CPU_KERNELS=torch" and works()
    dispatch._state.clear()
    monkeypatch.setenv("ADASUM_CPU_KERNELS", "fortran")
    message = "ADASUM_CPU_KERNELS must be one of auto, native, torch, got 'fortran'"
    for call in (works, kernels.backend_info):
        with pytest.raises(ValueError, match=message):
            call()


def test_bits_of_scaled_add_are_torchs() -> None:
    """Fused as torch's vectors fuse it."""
    need_compiled()
    for dtype in DTYPES:
        # Whole vectors: torch rounds the product apart in what is left of them.
        a, b = (random(1 << 16, dtype, "cpu", seed) for seed in (1, 2))
        for alpha, beta, wide in (
            (0.3, -1.7, torch.promote_types(dtype, torch.float32)),
            # Factors that would leave float32's range.
            (1e-30, 1e30, torch.float64),
        ):
            expected = torch.add(a.to(wide) * alpha, b.to(wide), alpha=beta).to(dtype)
            assert bits(kernels.scaled_add(a, b, alpha=alpha, beta=beta)) == bits(expected), dtype
