"""Compile kernels for warps of 64 threads, as AMD's GPUs have them, to PTX that no GPU runs.

Triton lays tensors out over warps of any width. Its backend for NVIDIA has 32 in three places, and
here they are changed: the width itself, how many threads a block has, and what the number of a
thread is divided by for that of its warp. The last two are changed before LLVM optimizes, which
draws conclusions from either. What is left is in instructions that the threads of a warp execute
together: the emulator takes a shuffle's lanes as those of 64 threads, and refuses all others. So
this compiles for sm_70, the last architecture that has no others.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from triton._C.libtriton import ir, llvm, passes
from triton.backends import Backend, backends
from triton.backends.nvidia.compiler import CUDABackend

WIDTH = 64

_CONSTANT = re.compile(r"(%[\w.]+) = llvm\.mlir\.constant\((\d+) : i32\)")
_THREAD = re.compile(r"(%[\w.]+) = nvvm\.read\.ptx\.sreg\.tid\.x : i32")
_THREADS = re.compile(r"nvvm\.reqntid = array<i32: (\d+)>")
_NAME = re.compile(r"%[\w.]+")
# Of the first threads, as many as there are values in shared memory, each takes one: Triton 3.6.
_ONE_EACH = re.compile(
    r'llvm\.(icmp "slt" %s, %s :|getelementptr %s\[%s\])'.replace("%s", r"%[\w.]+")
)
_BINARY = re.compile(r"(%[\w.]+) = llvm\.(\w+) (%[\w.]+), (%[\w.]+) : i32")


def widened(module: str) -> str:
    """Return the text of a kernel in MLIR's dialect of LLVM, made for warps of 64 threads.

    Raises:
        NotImplementedError: It does with the number of a thread what is not known here.
    """
    threads = [int(count) for count in _THREADS.findall(module)]
    if len(threads) != 1 or len(re.findall(r"\n +llvm\.func [^\n]*\{", module)) != 1:
        raise NotImplementedError("other than one kernel in one module")
    count = threads[0] // 32 * WIDTH
    module = _THREADS.sub(f"nvvm.reqntid = array<i32: {count}>", module)
    constants = {name: int(value) for name, value in _CONSTANT.findall(module)}
    # What holds a thread's number, or that with no bit masked that it can have.
    numbers: set[str] = set()
    lines = []
    for line in module.split("\n"):
        if found := _THREAD.search(line):
            numbers.add(found[1])
        elif not numbers.isdisjoint(_NAME.findall(line)):
            line = _divided(line, numbers, constants, count)
        lines.append(line)
    return "\n".join(lines)


def _divided(line: str, numbers: set[str], constants: dict[str, int], count: int) -> str:
    """Return what a line that reads a thread's number is where warps are wider."""
    if _ONE_EACH.search(line):
        return line
    found = _BINARY.search(line)
    if found is not None and found[3] in numbers:
        by = found[2], constants.get(found[4])
        if by == ("and", count - 1) and count > WIDTH:
            numbers.add(found[1])
            return line
        # The lane, and the warp in Triton 3.6.
        if by in (("urem", WIDTH), ("and", WIDTH - 1), ("udiv", WIDTH)):
            return line
        if by == ("udiv", 32):
            wide = f"%width_of_{found[1][1:]}"
            return (
                f"{wide} = llvm.mlir.constant({WIDTH} : i32) : i32\n"
                + line[: found.start(4)]
                + wide
                + line[found.end(4) :]
            )
    raise NotImplementedError(
        f"{line.strip()}: of the number of a thread only the lane and the warp are known, "
        "where warps are wide: add this to tests/ptx_emulator/wide_warps.py"
    )


def _replacing(owner: Any, name: str, call: Callable[..., Any]) -> Any:
    """Have `call` take the original function and what it is given."""
    original = getattr(owner, name)
    return mock.patch.object(owner, name, lambda *given: call(original, *given))


def _layouts(original: Any, passes: Any, target: str, warps: int, width: int, ctas: int) -> None:
    if width != 32:
        raise NotImplementedError(f"Triton asks for warps of {width}")
    original(passes, target, warps, WIDTH, ctas)


def _module(original: Any, module: Any, context: Any) -> Any:
    with tempfile.NamedTemporaryFile("w", suffix=".mlir") as file:
        file.write(widened(str(module)))
        file.flush()
        wide = ir.parse_mlir_module(file.name, module.context)
    return original(wide, context)


class NarrowBackend(CUDABackend):
    """NVIDIA's, which takes a target of any width."""

    @staticmethod
    def supports_target(target: Any) -> bool:
        """Leave wide warps to the other one."""
        return CUDABackend.supports_target(target) and target.warp_size != WIDTH


class WideBackend(CUDABackend):
    """NVIDIA's, changed. What it compiles to ends with the PTX."""

    @staticmethod
    def supports_target(target: Any) -> bool:
        """Take wide warps alone."""
        return CUDABackend.supports_target(target) and target.warp_size == WIDTH

    def hash(self) -> str:
        """Keep what is compiled apart on disk from all that this file was not made for."""
        return f"{super().hash()}-{_digest()}"

    @staticmethod
    def make_ttgir(*arguments: Any) -> Any:
        """Lay tensors out over warps of 64."""
        with _replacing(passes.ttir, "add_convert_to_ttgpuir", _layouts):
            return CUDABackend.make_ttgir(*arguments)

    def make_llir(self, *arguments: Any) -> Any:
        """Number warps by 64 threads."""
        with _replacing(llvm, "to_module", _module):
            return super().make_llir(*arguments)

    def make_cubin(self, *_: Any) -> bytes:
        """Leave out what no GPU could run."""
        return b""


@cache
def _digest() -> str:
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def compiling_wide() -> Any:
    """Have Triton compile for warps of 64, too, meanwhile."""
    driver = backends["nvidia"].driver
    narrow, wide = Backend(NarrowBackend, driver), Backend(WideBackend, driver)
    return mock.patch.dict(backends, nvidia=narrow, wide=wide)
