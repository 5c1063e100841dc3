"""What the tests of the compiled functions ask, and how they compile."""

from __future__ import annotations

import platform
import runpy
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kernels
from tests.kernels.cases import random

ROOT = Path(__file__).parents[3]


def need_compiled() -> None:
    if why_not := kernels.backend_info().why_torch:
        pytest.skip(f"no compiled CPU path: {why_not}")


def works() -> bool:
    a, b = (random(1000, torch.float32, "cpu", seed) for seed in (1, 2))
    return torch.equal(kernels.scaled_add(a, b, alpha=0.5, beta=2.0), a * 0.5 + b * 2.0)


def setup_py() -> dict[str, Any]:
    """The names of setup.py, which does not run."""
    pytest.importorskip("setuptools", minversion="77", reason="building needs setuptools>=77")
    return runpy.run_path(str(ROOT / "setup.py"))


def compile_changed(folder: Path, change: Callable[[str, str], str]) -> Path:
    """Compile the sources as installation does, each as `change` of its name and text makes it."""
    for file in (ROOT / "kernels" / "cpu").glob("*.[ch]"):
        (folder / file.name).write_text(change(file.name, file.read_text()))
    names = setup_py()
    flags = [*names["FLAGS"], *names["PROCESSORS"][platform.machine()]]
    made = folder / "changed.so"
    return compile_library("gcc", folder / "native.c", made, '-DCOMPILED_FROM=""', *flags)


def compile_library(compiler: str, source: Path, made: Path, *flags: str) -> Path:
    command = [compiler, "-fPIC", "-shared", *flags, str(source), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return made
