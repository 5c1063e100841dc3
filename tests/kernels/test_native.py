"""The compiled CPU path: how it comes to be, what is used where it cannot, what it writes."""

from __future__ import annotations

import itertools
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kernels
from kernels import _native
from tests.kernels.cases import DTYPES, bits, random


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nothing looked for yet, in a home of its own; the folder of the cache."""
    monkeypatch.setattr(_native, "_state", _native._State())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("ADASUM_CPU_KERNELS", raising=False)
    return tmp_path / "cache" / "adasum"


def need_compiled() -> None:
    if why_not := _native.why_not():
        pytest.skip(f"no compiled CPU path: {why_not}")


def works() -> bool:
    a, b = (random(1000, torch.float32, "cpu", seed) for seed in (1, 2))
    return torch.equal(kernels.scaled_add(a, b, alpha=0.5, beta=2.0), a * 0.5 + b * 2.0)


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_it_is_compiled_once(fresh: Path) -> None:
    need_compiled()
    assert kernels.cpu_path() == "compiled" and works()
    made = {path: path.stat().st_mtime_ns for path in fresh.iterdir()}
    assert sorted(path.name.partition("-")[0] for path in made) == ["double", "float"]
    assert stat.S_IMODE(fresh.stat().st_mode) == 0o700
    code = "import kernels; print(kernels.cpu_path())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "compiled"
    assert {path: path.stat().st_mtime_ns for path in fresh.iterdir()} == made


def test_what_is_cut_short_is_made_anew(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_compiled()
    for path in list(fresh.iterdir()):
        whole = path.read_bytes()
        # A new file: the old one is in use.
        path.unlink()
        path.write_bytes(whole[:100])
    monkeypatch.setattr(_native, "_state", _native._State())
    assert kernels.cpu_path() == "compiled" and works()
    assert all(path.stat().st_size > 100 for path in fresh.iterdir())


def test_a_folder_that_others_may_write_to_is_not_used(fresh: Path) -> None:
    fresh.mkdir(parents=True)
    fresh.chmod(0o777)
    need_compiled()
    assert works() and not list(fresh.iterdir())


def test_a_home_that_is_no_folder(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for home in ("/dev/null", "relative"):
        monkeypatch.setattr(_native, "_state", _native._State())
        monkeypatch.setenv("XDG_CACHE_HOME", home)
        need_compiled()
        assert works()
    assert not Path("relative").exists()


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("", "a C compiler is not on the PATH: install gcc"),
        ("no-such-compiler -O1", "$CC, no-such-compiler, is not on the PATH"),
        ("echo what; exit 3", "failed: exit status 3"),
        ("echo what >&2; exit 3", "failed: what"),
        ("sleep 30", "took over 0 s"),
        ("exit 0", "could not be compiled and loaded"),
    ],
)
def test_torch_takes_over(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, reason: str
) -> None:
    monkeypatch.setattr(_native, "_check_machine", lambda: None)
    monkeypatch.setattr(_native, "_COMPILE_SECONDS", 0.3)
    if compiler.startswith("no-such"):
        monkeypatch.setenv("CC", compiler)
    elif compiler:
        # With an argument of its own, as "ccache gcc" has.
        path = fresh.parent.parent / "compiler"
        monkeypatch.setenv("CC", f"{script(path, compiler)} -pipe")
    else:
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setenv("PATH", str(fresh))
    assert kernels.cpu_path().startswith("torch: ") and reason in kernels.cpu_path()
    assert works()
    assert not (fresh.exists() and list(fresh.iterdir()))
    monkeypatch.setattr(_native, "_state", _native._State())
    monkeypatch.setenv("ADASUM_CPU_KERNELS", "native")
    with pytest.raises(RuntimeError, match="ADASUM_CPU_KERNELS=native: "):
        works()


@pytest.mark.parametrize(
    ("system", "machine", "capability"),
    [("Linux", "aarch64", "DEFAULT"), ("Darwin", "x86_64", "AVX2"), ("Linux", "x86_64", "DEFAULT")],
)
def test_other_machines(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, system: str, machine: str, capability: str
) -> None:
    monkeypatch.setattr(_native.platform, "system", lambda: system)
    monkeypatch.setattr(_native.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    named = "AVX2" if (system, machine) == ("Linux", "x86_64") else f"{system} on {machine}"
    assert named in kernels.cpu_path() and works()


def test_the_choice_is_the_users(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADASUM_CPU_KERNELS", "torch")
    assert kernels.cpu_path() == "torch: ADASUM_CPU_KERNELS=torch" and works()
    assert not fresh.exists()
    monkeypatch.setattr(_native, "_state", _native._State())
    monkeypatch.setenv("ADASUM_CPU_KERNELS", "fortran")
    message = "ADASUM_CPU_KERNELS must be one of auto, native, torch, got 'fortran'"
    for call in (works, kernels.cpu_path):
        with pytest.raises(ValueError, match=message):
            call()


def test_torch_can_be_demanded(fresh: Path) -> None:
    with pytest.raises(TypeError, match="why must be a string, not int"):
        kernels.use_torch_on_cpu(3)  # type: ignore[arg-type]
    kernels.use_torch_on_cpu("of a reason")
    assert kernels.cpu_path() == "torch: of a reason" and works()
    assert not fresh.exists()


def test_it_has_torchs_threads() -> None:
    """One OpenMP in the process: two would put two pools of threads on the same cores."""
    need_compiled()
    code = """
import os, kernels, torch
torch.set_num_threads(3)
a, before = torch.empty(1 << 20), len(os.listdir("/proc/self/task"))
kernels.scaled_add(a, a, out=a)
print(len(os.listdir("/proc/self/task")) - before)
print(*{line.split()[-1] for line in open("/proc/self/maps") if "omp" in line.split("/")[-1]})
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    if "OpenMP" in torch.__config__.parallel_info():
        more, runtime = done.stdout.splitlines()
        assert more == "2" and len(runtime.split()) == 1


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


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_nothing_beside_the_output_is_written(
    source: torch.dtype, target: torch.dtype, cpu_path: str
) -> None:
    """Of every length up to two vectors, and around tiles, at places that are not aligned."""
    for numel, place in itertools.product([*range(18), 1023, 1025, 8193], (1, 3)):
        a, b = (random(numel, source, "cpu", seed) for seed in (1, 2))
        around = torch.full((numel + 20,), -7.0, dtype=target)
        out = around[place : place + numel]
        kernels.sum_n([a, b], out=out)
        kernels.scaled_add(a, b, alpha=0.3, beta=0.5, out=out)
        if source == target:
            kernels.adasum(a, b, out=out)
        assert (around[:place] == -7).all() and (around[place + numel :] == -7).all()
        whole = torch.full((numel + 20,), -7.0, dtype=source)
        layout = kernels.layout_of([out], alignment=target.itemsize)
        kernels.unpack(out, [whole[place : place + numel]], layout=layout)
        assert (whole[:place] == -7).all() and (whole[place + numel :] == -7).all()
        layout = kernels.layout_of([a, b[:1]], dtype=target)
        around = torch.full((layout.numel + 20,), -7.0, dtype=target)
        kernels.pack([a, b[:1]], layout=layout, out=around[place : place + layout.numel])
        assert (around[:place] == -7).all() and (around[place + layout.numel :] == -7).all()


def test_every_nan_stays_one(cpu_path: str) -> None:
    """Also those whose set bits are all rounded away, and that rounding up makes another number."""
    patterns = [0x7F800001, 0x7FC00000, 0x7FFFFFFF, -0x7FFFFF, -1]
    nans = torch.tensor(patterns, dtype=torch.int32).view(torch.float32)
    assert nans.isnan().all()
    for dtype in DTYPES:
        assert kernels.sum_n([nans], dtype=dtype).isnan().all()
        layout = kernels.layout_of([nans], dtype=dtype)
        assert kernels.pack([nans], layout=layout)[: len(nans)].isnan().all()


def test_padding_longer_than_a_block_is_zero(cpu_path: str) -> None:
    tensors = [random(numel, torch.float32, "cpu", numel) for numel in (3, 0, _native.BLOCK + 1)]
    layout = kernels.layout_of(tensors, alignment=4 * 5 * _native.BLOCK)
    out = kernels.pack(tensors, layout=layout, out=torch.full((layout.numel,), torch.nan))
    expected = torch.zeros(layout.numel)
    for view, tensor in zip(layout.views(expected), tensors, strict=True):
        view.copy_(tensor)
    assert torch.equal(out, expected)


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
            patched.setattr(_native._state, "libraries", {})
            assert results() == compiled, dtype
