"""Calls that were made before, recognised and made again in C: kernels/_recall.c.

Without a compiler, or Python's own headers, Python does the same: see kernels/_known.py.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
import sysconfig
import threading
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.cpu.build import Unavailable, built
from kernels.validation import PLAIN

# Where memory begins: more bytes than any tensor has. Most addresses are higher.
FAR = 2**40
# Coefficients inside this range times any float32 lose nothing to float32's exponent.
SAFE_LOW, SAFE_HIGH = 2.0**-60, 2.0**60
_SOURCES = [Path(__file__).with_name(name) for name in ("_recall.c", "_recall.h", "_tasks.h")]


def not_known(*_: object) -> None:
    """Stands in for the functions of the C file, until they are loaded."""


recognise: Callable[..., Any] = not_known
sum_n: Callable[..., Any] = not_known
scaled_add: Callable[..., Any] = not_known
copy: Callable[..., Any] = not_known

# Without a call in Python where there is one.
_increment_version = getattr(torch._C, "_increment_version", torch.autograd.graph.increment_version)
# Why Python does it; None until it has been looked for, "" where C does.
_why_not: str | None = None
_lock = threading.Lock()


def _forked() -> None:
    """A thread that compiles is not in a child of the process, the lock that it held is."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def load(wait: bool = False) -> None:
    """Have the functions from now on, if they can be had; the first call may take a second.

    wait: for another thread that is about it.
    """
    global _why_not, recognise, sum_n, scaled_add, copy
    lock = _lock
    if _why_not is not None or not lock.acquire(blocking=wait):
        return
    try:
        if _why_not is None:
            functions = _functions()
            recognise, sum_n = functions.recognise, functions.sum_n
            scaled_add, copy = functions.scaled_add, functions.copy
            _why_not = ""
    except Unavailable as error:
        _why_not = str(error)
    finally:
        lock.release()


def calls_recognised_by() -> str:
    """What recognises calls: "C", or "Python: " and why. The first call may take a second."""
    load(wait=True)
    return f"Python: {_why_not}" if _why_not else "C"


def _functions() -> Any:
    if os.environ.get("ADASUM_CPU_KERNELS") == "torch":
        raise Unavailable("ADASUM_CPU_KERNELS=torch")
    if platform.system() != "Linux" or sys.implementation.name != "cpython":
        raise Unavailable("compiled for CPython on Linux")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise Unavailable("what is known is kept by one thread at a time")
    include = sysconfig.get_path("include")
    # Of one version of Python, and one build.
    version = f"-DVERSION={sys.hexversion:#x}"
    return built("recall", _SOURCES, ["-O2", version, f"-I{include}"], _module)


def _module(path: Path) -> Any:
    loader = ExtensionFileLoader("kernels._recall_c", str(path))
    spec = importlib.util.spec_from_file_location(loader.name, path, loader=loader)
    assert spec is not None
    module: Any = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    module.prepare(
        *(Tensor.__dlpack_c_exchange_api__, PLAIN, Tensor, torch.empty_like),
        *(_increment_version, torch.get_num_threads, FAR, SAFE_LOW, SAFE_HIGH),
    )
    return module
