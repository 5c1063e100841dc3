"""The C files under each compiler that is here, and for each processor that it compiles for.

Those that are not here are skipped; the tests of what the files do use the first that is found.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kernels
from kernels.cpu import dispatch, native
from tests.kernels.cases import DTYPES, bits, random
from tests.kernels.cpu.cases import ROOT, compile_library, need_compiled, setup_py

HERE = platform.machine()
# By the processor that they compile for; Debian's other name of the gcc for this one is left out.
OTHERS = {"x86_64-linux-gnu-gcc": "x86_64", "aarch64-linux-gnu-gcc": "aarch64"}
COMPILERS = {"gcc": HERE, "clang": HERE} | {k: v for k, v in OTHERS.items() if v != HERE}
# clang says that one of two options of ours overrides the other.
STRICT = ("-Wall", "-Wextra", "-Werror", "-Wno-unknown-warning-option", "-Wno-overriding-t-option")


def _compile_strictly(compiler: str, machine: str, folder: Path) -> Path:
    if not shutil.which(compiler):
        pytest.skip(f"no {compiler} on the PATH")
    names = setup_py()
    if machine not in names["PROCESSORS"]:
        pytest.skip(f"compiled for {', '.join(names['PROCESSORS'])}, not for {machine}")
    # Of another processor there may be the compiler alone, without libraries to link.
    kind = [] if machine == HERE else ["-S", "-Wno-unused-command-line-argument"]
    flags = [*names["FLAGS"], *names["PROCESSORS"][machine], *kind, *STRICT]
    source = ROOT / "kernels" / "cpu" / "native.c"
    return compile_library(compiler, source, folder / "native.so", '-DCOMPILED_FROM=""', *flags)


@pytest.fixture(scope="module")
def compile_strictly(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """As at installation, where a warning is an error: also that of clang, if a loop that is marked
    as elementwise has not become one of vectors. Each compiler once."""
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
        many, cuts = [a, b, c] * 3, (0, 7, 7, 20_011)
        found += [kernels.gram(many[:count], cuts) for count in range(1, 10)]
        precise = kernels.gram([a, b, a], cuts, precise=True)
        tree = [(0, 1, 1.0, 1.0), (0, 2, 2.0, 1.0)]
        factors = kernels.adasum_coefficients(precise[None], tree)
        found += [precise, factors, kernels.adasum_coefficients(found[-7][None], tree)]
        found += [kernels.weighted_sum([a, b, c], factors, cuts)]
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
    need_compiled()
    expected = answers()
    library = native.Library(compile_strictly(compiler))
    monkeypatch.setattr(dispatch, "library", lambda: library)
    for got, wanted in zip(answers(), expected, strict=True):
        assert bits(got) == bits(wanted)


SUBNORMALS_AND_BITS = """
import sys
from pathlib import Path
import kernels, torch
from kernels.cpu import native
native.LIBRARY = Path(sys.argv[1])
native._sources = lambda: sys.argv[2]
assert kernels.backend_info().cpu_path == "compiled", kernels.backend_info().cpu_path
print((torch.tensor([1e-40]) * 1).item(), kernels.sum_n([torch.tensor([1e-40])]).item())
from tests.kernels.cpu.test_compilers import digest_of_answers
print(digest_of_answers())
"""


def digest_of_answers() -> str:
    return hashlib.sha256(b"".join(map(bits, answers()))).hexdigest()


@pytest.mark.parametrize(
    "option", ["-ffast-math", pytest.param("-funsafe-math-optimizations", marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_a_compilers_own_options_change_no_numbers(option: str, tmp_path: Path) -> None:
    """With these gcc would have the whole process flush subnormal numbers to zero."""
    need_compiled()
    sources = setup_py()["compiled_from"]()
    if not shutil.which("gcc"):
        pytest.skip("no gcc on the PATH")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CC": f"gcc {option} -march=native",
        "CFLAGS": option,
    }
    made = tmp_path / "kernels" / "cpu" / "libnative.so"
    place = ["-b", str(tmp_path), "-t", str(tmp_path)]
    for command in (
        ["setup.py", "-q", "build_ext", *place],
        ["-c", SUBNORMALS_AND_BITS, str(made), sources],
    ):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    first, second, digest = done.stdout.split()
    assert float(first) == float(second) == torch.tensor(1e-40).item()
    assert digest == digest_of_answers()


def test_hash_of_the_sources_is_the_one_that_is_compiled_in() -> None:
    assert setup_py()["compiled_from"]() == native._sources()


@pytest.mark.parametrize(
    ("system", "machine", "flag"),
    [
        ("Linux", "x86_64", "-mavx2"),
        ("Linux", "aarch64", "-march=armv8-a"),
        ("Linux", "ppc64le", None),
        ("Darwin", "x86_64", None),
    ],
)
def test_flags_are_the_processors(
    monkeypatch: pytest.MonkeyPatch, system: str, machine: str, flag: str | None
) -> None:
    """A compiler for aarch64 takes no -mavx2; for others nothing is compiled."""
    names = setup_py()
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    found = [
        option
        for library in names["libraries"]()
        for option in library.extra_compile_args
        if option in ("-mavx2", "-march=armv8-a")
    ]
    assert found == ([] if flag is None else [flag])
