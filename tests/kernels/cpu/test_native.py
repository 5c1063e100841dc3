"""The compiled CPU path: how it comes to be, what is used where it cannot, what it writes."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map

import kernels
from kernels.cpu import build, dispatch, native
from tests.kernels.cases import DTYPES, bits, random


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nothing looked for yet, in a home of its own; the folder of the cache."""
    monkeypatch.setattr(dispatch, "_state", dispatch._State())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("ADASUM_CPU_KERNELS", raising=False)
    return tmp_path / "cache" / "adasum"


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that is compiled at first use, in a home of its own."""
    need_compiled()
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "_state", dispatch._State())
        patch.setenv("XDG_CACHE_HOME", str(home))
        patch.delenv("ADASUM_CPU_KERNELS", raising=False)
        assert kernels.backend_info().cpu_path == "compiled" and works()
    (made,) = (home / "adasum").iterdir()
    return made


@pytest.fixture
def copier(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that copies what was compiled before, where only its place is in question."""
    # Without the hash that follows what the compiler wrote.
    (tmp_path / "copied").write_bytes(library.read_bytes()[:-32])
    text = f'for to; do :; done\nexec cp "{tmp_path}/copied" "$to"'
    monkeypatch.setenv("CC", script(tmp_path / "copier", text))


@pytest.fixture
def built(library: Path, fresh: Path) -> Path:
    """The folder of a cache that holds what was compiled before, of which nothing is loaded."""
    fresh.mkdir(mode=0o700, parents=True)
    shutil.copy2(library, fresh)
    return fresh


def need_compiled() -> None:
    if why_not := kernels.backend_info().why_torch:
        pytest.skip(f"no compiled CPU path: {why_not}")


def works() -> bool:
    a, b = (random(1000, torch.float32, "cpu", seed) for seed in (1, 2))
    return torch.equal(kernels.scaled_add(a, b, alpha=0.5, beta=2.0), a * 0.5 + b * 2.0)


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_it_is_compiled_once(library: Path) -> None:
    """Another process finds what this one has compiled, and leaves it as it is."""
    folder, before = library.parent, library.stat()
    assert library.name.startswith("native-") and stat.S_IMODE(folder.stat().st_mode) == 0o700
    code = "import kernels; print(kernels.backend_info().cpu_path)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "XDG_CACHE_HOME": str(folder.parent), "ADASUM_CPU_KERNELS": ""},
    )
    assert done.stdout.strip() == "compiled"
    after = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}
    assert after == {library: (before.st_ino, before.st_mtime_ns)}


def cut(whole: bytes) -> bytes:
    return whole[: len(whole) // 2]


def zero_a_page(whole: bytes) -> bytes:
    return whole[:4096] + bytes(4096) + whole[8192:]


@pytest.mark.usefixtures("copier")
@pytest.mark.parametrize(
    "damage",
    [
        cut,
        zero_a_page,
        *(lambda whole, length=length: whole[:length] for length in (0, 100)),
    ],
)
def test_what_is_damaged_is_made_anew(built: Path, damage: Callable[[bytes], bytes]) -> None:
    """Loading it could end the process."""
    wholes = {path: path.read_bytes() for path in built.iterdir()}
    for path, whole in wholes.items():
        path.write_bytes(damage(whole))
    assert kernels.backend_info().cpu_path == "compiled" and works()
    assert {path: path.stat().st_size for path in built.iterdir()} == {
        path: len(whole) for path, whole in wholes.items()
    }


@pytest.mark.usefixtures("copier")
def test_a_file_of_others_is_not_loaded(built: Path) -> None:
    old = {path: path.stat().st_ino for path in built.iterdir()}
    for path in old:
        path.chmod(0o777)
    assert kernels.backend_info().cpu_path == "compiled"
    assert len(old) == 1 and all(path.stat().st_ino != inode for path, inode in old.items())


@pytest.mark.usefixtures("copier")
def test_what_a_group_may_write_to_is_compiled_once(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with Debian's other usual umask: what others may write to is not loaded."""
    before = os.umask(0o002)
    try:
        need_compiled()
        old = {path: path.stat().st_ino for path in fresh.iterdir()}
        monkeypatch.setattr(dispatch, "_state", dispatch._State())
        assert kernels.backend_info().cpu_path == "compiled"
    finally:
        os.umask(before)
    assert {path: path.stat().st_ino for path in fresh.iterdir()} == old and len(old) == 1


def test_what_is_there_needs_no_compiler(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(built))
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and real(path, mode))
    assert kernels.backend_info().cpu_path == "compiled" and works()


@pytest.mark.usefixtures("copier", "fresh")
def test_a_full_disk_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(build, "_seal", full)
    assert kernels.backend_info().cpu_path.endswith("No space left on device") and works()


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
def test_tensors_without_memory() -> None:
    """torch's own functions know what to do with them, or say that they do not."""
    zeros, ones = torch._efficientzerotensor(100), torch.ones(100)
    assert zeros.data_ptr() == 0
    assert torch.equal(kernels.scaled_add(zeros, ones, alpha=2.0, beta=3.0), 3 * ones)
    assert torch.equal(kernels.sum_n([ones, zeros]), ones)
    assert kernels.dot_and_norms(zeros, ones).tolist() == [[0.0, 0.0, 100.0]]
    layout = kernels.layout_of([zeros, ones])
    first, second = layout.views(kernels.pack([zeros, ones], layout=layout, scale=2.0))
    assert torch.equal(first, 0 * ones) and torch.equal(second, 2 * ones)
    with FakeTensorMode():
        fake = torch.empty(100)
    for call in (lambda: kernels.dot_and_norms(fake, ones), lambda: kernels.sum_n([ones, fake])):
        with pytest.raises(AssertionError, match="FakeTensor"):
            call()


class Wrapper(Tensor):
    """Its own memory holds NaN; what it stands for lies elsewhere."""

    inner: Tensor

    @staticmethod
    def of(inner: Tensor) -> Wrapper:
        wrapper: Wrapper = Tensor._make_subclass(Wrapper, torch.full_like(inner, torch.nan))
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def inner(value: Any) -> Any:
            return value.inner if isinstance(value, Wrapper) else value

        return func(*tree_map(inner, args), **tree_map(inner, kwargs or {}))


@pytest.mark.usefixtures("built")
def test_wrappers_are_asked_for_what_they_stand_for() -> None:
    a, b = torch.randn(100), torch.randn(100)
    wrapper = Wrapper.of(a)
    for _ in range(3):
        assert torch.equal(kernels.sum_n([wrapper, b]), kernels.sum_n([a, b]))
        assert torch.equal(kernels.scaled_add(b, wrapper), b + a)


@pytest.mark.usefixtures("copier")
def test_a_folder_that_others_may_write_to_is_not_used(fresh: Path) -> None:
    fresh.mkdir(parents=True)
    fresh.chmod(0o777)
    need_compiled()
    assert works() and not list(fresh.iterdir())


@pytest.mark.usefixtures("copier")
def test_a_home_that_is_no_folder(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for home in ("/dev/null", "relative"):
        monkeypatch.setattr(dispatch, "_state", dispatch._State())
        monkeypatch.setenv("XDG_CACHE_HOME", home)
        need_compiled()
        assert works()
    assert not Path("relative").exists()


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("", "a C compiler is not on the PATH: install gcc"),
        ('no-such-compiler "', "$CC is no command: No closing quotation"),
        ("no-such-compiler -O1", "$CC, no-such-compiler, is not on the PATH"),
        ("echo what; exit 3", "failed: exit status 3"),
        ("echo what >&2; exit 3", "failed: what"),
        ("sleep 30", "took over 0 s"),
        ("exit 0", "could not be compiled and loaded"),
        ("printf 'caf\\351' >&2; exit 3", "failed: caf\ufffd"),
    ],
)
def test_torch_takes_over(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, reason: str
) -> None:
    monkeypatch.setattr(native, "_flags_here", lambda: ())
    monkeypatch.setattr(build, "_SECONDS", 0.3)
    if compiler.startswith("no-such"):
        monkeypatch.setenv("CC", compiler)
    elif compiler:
        # With an argument of its own, as "ccache gcc" has.
        path = fresh.parent.parent / "compiler"
        monkeypatch.setenv("CC", f"{script(path, compiler)} -pipe")
    else:
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setenv("PATH", str(fresh))
    assert (
        kernels.backend_info().cpu_path.startswith("torch: ")
        and reason in kernels.backend_info().cpu_path
    )
    assert works()
    assert not (fresh.exists() and list(fresh.iterdir()))
    monkeypatch.setattr(dispatch, "_state", dispatch._State())
    monkeypatch.setenv("ADASUM_CPU_KERNELS", "native")
    with pytest.raises(RuntimeError, match="ADASUM_CPU_KERNELS=native: "):
        works()


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


def test_without_its_source(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_SOURCES", [fresh / "native.c"])
    monkeypatch.setattr(native, "_flags_here", lambda: ())
    assert "native.c could not be compiled" in kernels.backend_info().cpu_path and works()


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
