"""The Makefile: its set-up where a Python is there whose torch sees a GPU, and what it compiles."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
import venv
from pathlib import Path

import pytest

from tests.processes.commands import ROOT, printed

TORCH = """
class cuda:
    @staticmethod
    def is_available():
        return True
"""
LIBRARY = "kernels/cpu/libnative.so"
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


def site_packages(environment: Path) -> Path:
    (found,) = environment.glob("lib/python3*/site-packages")
    return found


def test_environment_borrows_torch_from_a_python_that_lives_in_one_itself(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    venv.create(theirs, symlinks=True)
    (site_packages(theirs) / "torch.py").write_text(textwrap.dedent(TORCH))
    # What an editable or a namespace package leaves there counts, too.
    extra = tmp_path / "extra"
    extra.mkdir()
    (extra / "found_by_pth.py").write_text("")
    (site_packages(theirs) / "extra.pth").write_text(f"{extra}\n")
    python = tmp_path / "python"
    # pip, which takes seconds to install, is not asked for anything here.
    no_pip = '[ "$2" = venv ] && set -- "$@" --without-pip'
    python.write_text(f'#!/bin/sh\n{no_pip}\nexec {theirs}/bin/python "$@"\n')
    python.chmod(0o755)
    made = printed("make", f"VENV={ours}", f"PYTHON={python}", ours / ".made")
    assert "borrowing the torch of" in made
    code = "import torch, found_by_pth, sys; print(torch.__file__, sys.prefix)"
    assert printed(ours / "bin" / "python", "-c", code).split() == [
        str(site_packages(theirs) / "torch.py"),
        str(ours),
    ]
    # What is installed into it comes first.
    (site_packages(ours) / "torch.py").write_text("")
    found = printed(ours / "bin" / "python", "-c", code).split()
    assert found[0] == str(site_packages(ours) / "torch.py")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What compiling needs of the tree, where nothing is compiled and .venv is set up."""
    pytest.importorskip("setuptools", minversion="77", reason="building needs setuptools>=77")
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels", ignore=ignored)
    for name in ("Makefile", "README.md", "LICENSE", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copy(ROOT / "constraints.txt", tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    for name in (".made", ".ready", ".docs", ".recipes"):
        (tmp_path / ".venv" / name).touch()
    return tmp_path


def make(checkout: Path, *arguments: str, **variables: str) -> str:
    """Return what it prints."""
    return printed("make", *arguments, place=checkout, **variables)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc on the PATH")
def test_build_compiles_in_place_where_something_changed_and_else_does_nothing(
    checkout: Path,
) -> None:
    library, header = checkout / LIBRARY, checkout / "kernels" / "cpu" / "real.h"
    # Nothing runs what it makes: without optimization that takes a fifth of the time.
    quick = checkout / "quick"
    quick.write_text('#!/bin/sh\nexec gcc "$@" -O0\n')
    quick.chmod(0o755)
    assert "build_ext" in make(checkout, "build", CC="/bin/false") and not library.exists()
    assert "build_ext" in make(checkout, "build", CC=str(quick))
    made = library.stat()
    assert "build_ext" not in make(checkout, "build", CC=str(quick))
    assert library.stat().st_mtime_ns == made.st_mtime_ns
    later = made.st_mtime + 1.0
    os.utime(header, (later, later))
    assert "build_ext" in make(checkout, "build", CC=str(quick))
    assert library.stat().st_ino != made.st_ino or library.stat().st_mtime_ns > made.st_mtime_ns


def test_every_target_that_runs_something_compiles_first(checkout: Path) -> None:
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.M)
    # The last two run others.
    running = [one for one in targets if one not in ("help", "clean", "nightly", "test-newest")]
    assert len(running) > 12
    for target in running:
        assert "build_ext" in make(checkout, "--dry-run", target), target


def test_build_takes_an_environment_as_it_is_and_makes_one_where_there_is_none(
    checkout: Path,
) -> None:
    """Other checkouts may share it: to make it anew would take it from them."""
    (checkout / ".venv" / ".made").unlink()
    assert "-m venv" not in make(checkout, "--dry-run", "build")
    assert "-m venv" in make(checkout, "--dry-run", "test")
    shutil.rmtree(checkout / ".venv")
    assert "-m venv" in make(checkout, "--dry-run", "build")
