"""The CPU path compiled: kernels/_native.c, by the system's C compiler, loaded with ctypes.

As Triton does for its launchers: at first use, once a machine. Without a compiler, or on a
processor without AVX2, `library` is None, and the CPU path is torch's own functions.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import struct
import subprocess
import tempfile
import threading
from array import array
from collections.abc import Callable, Sequence
from ctypes import c_char_p, c_double
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from kernels._packed import PackedList

# In the order of the C file's enum.
_CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}
# Elements of a block, whose dot products are one partial result.
BLOCK = 8192
_SOURCE = Path(__file__).with_suffix(".c")
_FLAGS = (
    *("-std=gnu11", "-O3", "-march=x86-64", "-mavx2", "-mfma", "-mf16c"),
    *("-fPIC", "-shared", f"-DBLOCK={BLOCK}"),
    # The bits are the same on all machines, whatever $CC says beside the compiler's name.
    *("-fno-fast-math", "-ffp-contract=off"),
    # What is written as floats is looked at as integers.
    "-fno-strict-aliasing",
)
_COMPILE_SECONDS = 60.0
_VARIABLE = "ADASUM_CPU_KERNELS"
_CHOICES = ("auto", "native", "torch")
# The C file's REAL for each arithmetic.
_REALS = {torch.float32: "float", torch.float64: "double"}


class Library:
    """The compiled functions for one arithmetic, float or double. Tensors: checked, contiguous."""

    def __init__(self, path: Path) -> None:
        """OSError or AttributeError where it cannot be loaded."""
        library = ctypes.CDLL(str(path))
        self._copy = _function(library.copy)
        self._sum_n = _function(library.sum_n)
        self._blend = _function(library.blend)
        self._dot_and_norms = _function(library.dot_and_norms)

    def copy(
        self,
        pointers: array[int],
        listed: PackedList,
        buffer: Tensor,
        scale: float,
        found_inf: Tensor | None,
        packing: bool,
    ) -> None:
        """Between `buffer` and tensors of one dtype, at least one; into it, zeros for padding.

        pointers: the tensors' addresses, here and below maybe followed by others.
        """
        # Held here: another thread that reads it for the first time may put its own in its place.
        numels, bounds = listed.in_c
        self._copy(
            _COPY(
                _address(pointers),
                _CODES[listed.dtypes[0]],
                _address(numels),
                _address(bounds),
                len(listed.dtypes),
                buffer.data_ptr(),
                _CODES[buffer.dtype],
                packing,
                scale,
                _flag(found_inf),
                torch.get_num_threads(),
            )
        )

    def sum_n(
        self,
        pointers: array[int],
        count: int,
        dtype: torch.dtype,
        out: Tensor,
        scale: float,
        found_inf: Tensor | None,
    ) -> None:
        """out = scale * (the sum of `count` tensors, in order); `out` may be any of them."""
        self._sum_n(
            _SUM_N(
                _address(pointers),
                count,
                _CODES[dtype],
                out.data_ptr(),
                _CODES[out.dtype],
                out.numel(),
                scale,
                _flag(found_inf),
                torch.get_num_threads(),
            )
        )

    def blend(
        self,
        a: Tensor,
        b: Tensor,
        out: Tensor,
        bounds: Sequence[int],
        coefficients: Sequence[float],
        found_inf: Tensor | None,
    ) -> None:
        """out = alpha * a + beta * b a segment; coefficients: alpha, beta, alpha, ..."""
        cuts, factors = array("q", bounds), array("d", coefficients)
        self._blend(
            _BLEND(
                a.data_ptr(),
                _CODES[a.dtype],
                b.data_ptr(),
                _CODES[b.dtype],
                out.data_ptr(),
                _CODES[out.dtype],
                _address(cuts),
                len(cuts) - 1,
                _address(factors),
                _flag(found_inf),
                torch.get_num_threads(),
            )
        )

    def dot_and_norms(self, a: Tensor, b: Tensor, bounds: Sequence[int]) -> list[list[float]]:
        """S rows (a.b, |a|^2, |b|^2)."""
        cuts = array("q", bounds)
        count = len(cuts) - 1
        partials = (c_double * (3 * (a.numel() // BLOCK + count)))()
        rows = (c_double * (3 * count))()
        self._dot_and_norms(
            _DOT_AND_NORMS(
                a.data_ptr(),
                _CODES[a.dtype],
                b.data_ptr(),
                _CODES[b.dtype],
                _address(cuts),
                count,
                ctypes.addressof(partials),
                ctypes.addressof(rows),
                torch.get_num_threads(),
            )
        )
        return [rows[i : i + 3] for i in range(0, 3 * count, 3)]


# The C file's structs: q for an integer, P for a pointer, d for a double.
_COPY = struct.Struct("PqPPqPqqdPq").pack
_SUM_N = struct.Struct("PqqPqqdPq").pack
_BLEND = struct.Struct("PqPqPqPqPPq").pack
_DOT_AND_NORMS = struct.Struct("PqPqPqPPq").pack


def _function(function: Any) -> Callable[[bytes], None]:
    function.argtypes, function.restype = (c_char_p,), None
    return cast(Callable[[bytes], None], function)


def _address(values: array[int] | array[float]) -> int:
    """Of values that the caller keeps alive."""
    return values.buffer_info()[0]


def _flag(found_inf: Tensor | None) -> int:
    return 0 if found_inf is None else found_inf.data_ptr()


class _Unavailable(Exception):
    """Why there is no compiled path."""


class _State:
    """libraries: by arithmetic, once looked for. why_not: why torch's functions are used."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.libraries: dict[torch.dtype, Library] | None = None
        self.why_not = ""


_state = _State()


def library(wide: torch.dtype) -> Library | None:
    """The functions whose arithmetic is `wide`, float32 or float64; None: torch's are used.

    The first call may compile, for about a second. ADASUM_CPU_KERNELS says what to use: "auto", the
    default, "torch", or "native". Raises ValueError for another value, RuntimeError for "native"
    where it is not to be had.
    """
    libraries = _state.libraries
    return (_load() if libraries is None else libraries).get(wide)


def why_not() -> str:
    """Why torch's functions are used; "" where the compiled ones are. Raises as `library`."""
    library(torch.float32)
    return _state.why_not


def use_torch_on_cpu(why: str) -> None:
    """From now on use torch's functions on CPU tensors, in this process.

    Their last bits are others: for ranks of which one has no compiled functions. `why`: what
    `cpu_path` says of it, a string.
    """
    if not isinstance(why, str):
        raise TypeError(f"why must be a string, not {type(why).__name__}")
    with _state.lock:
        _state.libraries, _state.why_not = {}, why


def cpu_path() -> str:
    """What computes on CPU tensors: "compiled", or "torch: " and why.

    The first call may compile, for about a second. Raises ValueError or RuntimeError where the
    environment variable ADASUM_CPU_KERNELS is wrong, or demands what is not to be had.
    """
    reason = why_not()
    return f"torch: {reason}" if reason else "compiled"


def _load() -> dict[torch.dtype, Library]:
    choice = os.environ.get(_VARIABLE) or "auto"
    if choice not in _CHOICES:
        raise ValueError(f"{_VARIABLE} must be one of {', '.join(_CHOICES)}, got {choice!r}")
    with _state.lock:
        if _state.libraries is None:
            try:
                if choice == "torch":
                    raise _Unavailable(f"{_VARIABLE}=torch")
                _check_machine()
                _state.libraries = {wide: _built(real) for wide, real in _REALS.items()}
            except _Unavailable as error:
                if choice == "native":
                    raise RuntimeError(f"{_VARIABLE}=native: {error}") from error
                _state.libraries, _state.why_not = {}, str(error)
        return _state.libraries


def _check_machine() -> None:
    system, machine = platform.system(), platform.machine()
    if system != "Linux" or machine not in ("x86_64", "AMD64"):
        raise _Unavailable(f"compiled for Linux on x86-64, this is {system} on {machine}")
    capability = torch.backends.cpu.get_cpu_capability()
    if not capability.startswith("AVX"):
        raise _Unavailable(f"needs AVX2, torch says {capability}")


def _built(real: str) -> Library:
    """From the cache or, compiled into it, from the C file."""
    try:
        sources = [path.read_bytes() for path in (_SOURCE, _SOURCE.with_suffix(".h"))]
        key = hashlib.sha256(repr((sources, _FLAGS)).encode()).hexdigest()
        name = f"{real}-{key[:24]}.so"
        folder = _cache()
        if folder is not None and _is_whole(folder / name):
            return Library(folder / name)
        compiler = _compiler()
        # Takes its name when it is whole: other processes do the same at the same time.
        shared = folder if folder is not None and os.access(folder, os.W_OK) else None
        with tempfile.TemporaryDirectory(prefix="adasum-", dir=shared) as private:
            made = Path(private, name)
            _run([*compiler, *_FLAGS, f"-DREAL={real}", str(_SOURCE), "-o", str(made)])
            _seal(made)
            library = Library(made)
            if shared is not None:
                made.replace(shared / name)
            return library
    except (OSError, AttributeError) as error:
        raise _Unavailable(f"{_SOURCE.name} could not be compiled and loaded: {error}") from error


def _seal(path: Path) -> None:
    """Append a hash of what is there, which loading does not look at, and have it on the disk."""
    with path.open("r+b") as file:
        seal = hashlib.sha256(file.read()).digest()
        file.write(seal)
        file.flush()
        os.fsync(file.fileno())


def _is_whole(path: Path) -> bool:
    """Whether it is as `_seal` left it, and nobody else's: what is cut short ends the process."""
    try:
        if not _is_mine(path):
            return False
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _compiler() -> list[str]:
    """The command that $CC names, else the first of the usual ones."""
    try:
        named = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise _Unavailable(f"$CC is no command: {error}") from error
    for command in [named] if named else [["gcc"], ["cc"], ["clang"]]:
        if shutil.which(command[0]):
            return command
    wanted = f"$CC, {named[0]}," if named else "a C compiler"
    raise _Unavailable(f"{wanted} is not on the PATH: install gcc")


def _run(command: list[str]) -> None:
    try:
        subprocess.run(
            command,
            check=True,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_COMPILE_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise _Unavailable(f"{command[0]} took over {_COMPILE_SECONDS:.0f} s") from error
    except subprocess.CalledProcessError as error:
        said = (error.stderr.strip().splitlines() or [f"exit status {error.returncode}"])[0]
        raise _Unavailable(f"{command[0]} failed: {said}") from error


def _cache() -> Path | None:
    """A folder that only this user can write to; None where there is none.

    What lies there is loaded, so it may not be put there by others.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base, "adasum")
    if not folder.is_absolute():
        return None
    try:
        if not folder.exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder if _is_mine(folder) else None
    except OSError:
        return None


def _is_mine(path: Path) -> bool:
    info = path.stat()
    return info.st_uid == os.geteuid() and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
