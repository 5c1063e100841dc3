"""The C files under each compiler that is here, and for each processor that it compiles for.

Those that are not here are skipped; the tests of what the files do use the first that is found.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kernels
from kernels.cpu import build, dispatch, native
from tests.kernels.cases import DTYPES, bits, random

HERE = platform.machine()
# By the processor that they compile for; Debian's other name of the gcc for this one is left out.
OTHERS = {"x86_64-linux-gnu-gcc": "x86_64", "aarch64-linux-gnu-gcc": "aarch64"}
COMPILERS = {"gcc": HERE, "clang": HERE} | {k: v for k, v in OTHERS.items() if v != HERE}
# clang says that one of two options of ours overrides the other.
STRICT = ("-Wall", "-Wextra", "-Werror", "-Wno-unknown-warning-option", "-Wno-overriding-t-option")


def _compile_strictly(compiler: str, machine: str, folder: Path) -> Path:
    if not shutil.which(compiler):
        pytest.skip(f"no {compiler} on the PATH")
    if machine not in native._PROCESSORS:
        pytest.skip(f"compiled for {', '.join(native._PROCESSORS)}, not for {machine}")
    for name, text in native.HEADERS.items():
        (folder / name).write_text(text)
    flags = [*build._FLAGS, *native._FLAGS, *native._PROCESSORS[machine], f"-I{folder}"]
    # Of another processor there may be the compiler alone, without libraries to link.
    kind = [] if machine == HERE else ["-S", "-Wno-unused-command-line-argument"]
    made = folder / "native.so"
    command = [compiler, *flags, *kind, *STRICT, str(native._SOURCES[0]), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return made


@pytest.fixture(scope="module")
def compile_strictly(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """As at first use, where a warning is an error: also that of clang, if a loop that is marked as
    elementwise has not become one of vectors. Each compiler once."""
    return cache(
        lambda name: _compile_strictly(name, COMPILERS[name], tmp_path_factory.mktemp("strict"))
    )


@pytest.mark.parametrize("compiler", COMPILERS)
def test_arithmetic_compiles_without_a_warning(
    compiler: str, compile_strictly: Callable[[str], Path]
) -> None:
    assert compile_strictly(compiler).exists()


def answers() -> list[Tensor]:
    """Of every function and pair of dtypes, also in place; lengths that are no whole vectors."""
    found = []
    for source in DTYPES:
        a, b, c = (random(20_011, source, "cpu", seed) for seed in (1, 2, 3))
        found += [kernels.dot_and_norms(a, b, (0, 7, 7, 20_011)), kernels.adasum(a, b)]
        for target in DTYPES:
            layout = kernels.layout_of([a, b], dtype=target)
            packed = kernels.pack([a, b], layout=layout, scale=1 / 3)
            out = [torch.empty_like(a), torch.empty_like(b)]
            kernels.unpack(packed, out, layout=layout, scale=1.5)
            total = random(20_011, target, "cpu", 4)
            kernels.sum_n([total, total], scale=1.25, out=total)
            kernels.scaled_add(total, total, alpha=0.3, beta=-1.7, out=total)
            found += [packed, *out, total, kernels.sum_n([a, b, c], dtype=target, scale=0.1)]
    return found


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_the_bits_are_those_of_any_compiler(
    compiler: str, monkeypatch: pytest.MonkeyPatch, compile_strictly: Callable[[str], Path]
) -> None:
    if why_not := kernels.backend_info().why_torch:
        pytest.skip(f"no compiled CPU path: {why_not}")
    expected = answers()
    library = native.Library(compile_strictly(compiler))
    monkeypatch.setattr(dispatch, "library", lambda: library)
    for got, wanted in zip(answers(), expected, strict=True):
        assert bits(got) == bits(wanted)


def test_flags_are_the_processors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A compiler for aarch64 takes no -mavx2, and torch says nothing of AVX2 there."""
    said = tmp_path / "said"
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho "$@" > {said}\necho no such thing >&2; exit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("ADASUM_CPU_KERNELS", raising=False)
    monkeypatch.setattr(dispatch, "_state", dispatch._State())
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert kernels.backend_info().cpu_path == f"torch: {compiler} failed: no such thing"
    words = said.read_text().split()
    assert "-march=armv8-a" in words and not {"-mavx2", "-mfma", "-mf16c"} & {*words}
