"""Compile the pretended libraries, and get cupy's wheel: each once, in a folder that stays."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
# Ignored by git, and kept between runs.
CACHE = ROOT / "out" / "pretended_gpu"
CUPY = ("cupy-cuda13x==14.2.0", "cuda-pathfinder")


def _package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def _compiled(source: str, name: str, command: Sequence[str], *libraries: str) -> Path:
    """Return the library of a source, compiled anew where the source or the command has changed."""
    text = (HERE / source).read_bytes() + repr((command, libraries)).encode() + sys.version.encode()
    folder = CACHE / hashlib.sha256(text).hexdigest()[:16]
    if not (folder / name).exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as made:
            output = Path(made) / name
            flags = ["-O1", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(output)]
            subprocess.run([*command, str(HERE / source), *flags, *libraries], check=True)
            folder.mkdir(exist_ok=True)
            os.replace(output, folder / name)
    return folder / name


def libcuda() -> Path:
    """Return the pretended libcuda.so.1."""
    include = _package("triton") / "backends" / "nvidia" / "include"
    compiler = (sysconfig.get_config_var("CC") or "gcc").split()[0]
    return _compiled("libcuda.c", "libcuda.so.1", [compiler, f"-I{include}"], "-lpthread")


def libnccl() -> Path:
    """Return the pretended libnccl.so.2."""
    compiler = (sysconfig.get_config_var("CC") or "gcc").split()[0]
    return _compiled("libnccl.c", "libnccl.so.2", [compiler], "-lpthread")


def guard() -> Path:
    """Return what makes torch's CPU build take tensors of CUDA."""
    torch = _package("torch")
    compiler = os.environ.get("CXX") or shutil.which("g++") or "c++"
    command = [compiler, "-std=c++20", f"-I{torch / 'include'}"]
    return _compiled("guard.cpp", "libguard.so", command, f"-L{torch / 'lib'}", "-lc10")


def cupy() -> Path | None:
    """Return a folder that has cupy's wheel, which pip gets at first; None where it cannot."""
    folder = CACHE / CUPY[0]
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        made = tempfile.mkdtemp(dir=CACHE)
        # What depends on it, NCCL's 216 MB, is pretended.
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", made]
        try:
            subprocess.run([*command, *CUPY], check=True, timeout=120.0, capture_output=True)
        except (OSError, subprocess.SubprocessError):
            shutil.rmtree(made)
            return None
        try:
            os.rename(made, folder)
        except OSError:
            # Another process was first.
            shutil.rmtree(made)
    return folder
