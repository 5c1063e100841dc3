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
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from ctypes import POINTER, c_double, c_int, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from kernels._packed import PackedList

# In the order of the C file's enum.
_CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}
# Elements of a block of dot products, as the C file has it.
BLOCK = 8192
_SOURCE = Path(__file__).with_suffix(".c")
_FLAGS = ("-O3", "-mavx2", "-mfma", "-mf16c", "-fPIC", "-shared", "-std=gnu11")
_COMPILE_SECONDS = 60.0
_VARIABLE = "ADASUM_CPU_KERNELS"
_CHOICES = ("auto", "native", "torch")
# The C file's REAL for each arithmetic.
_REALS = {torch.float32: "float", torch.float64: "double"}


class Library:
    """The compiled functions for one arithmetic, float or double. Tensors: checked, contiguous."""

    def __init__(self, path: Path) -> None:
        """OSError where it cannot be loaded."""
        library = ctypes.CDLL(str(path))
        pointers, doubles = POINTER(c_void_p), POINTER(c_double)
        bounds = (POINTER(c_int64), c_int64)
        pair = (c_void_p, c_int, c_void_p, c_int)
        self._copy, self._sum_n = library.copy, library.sum_n
        self._blend, self._dot_and_norms = library.blend, library.dot_and_norms
        self._copy.argtypes = (
            *(pointers, c_int, POINTER(c_int64), *bounds),
            *(c_void_p, c_int, c_int, c_double, c_void_p),
        )
        self._sum_n.argtypes = (
            *(pointers, c_int64, c_int, c_void_p, c_int, c_int64, c_double, c_void_p),
        )
        self._blend.argtypes = (*pair, c_void_p, c_int, *bounds, doubles, c_void_p)
        self._dot_and_norms.argtypes = (*pair, *bounds, doubles, doubles)
        for function in (self._copy, self._sum_n, self._blend, self._dot_and_norms):
            function.restype = None

    def copy(
        self,
        addresses: Sequence[int],
        listed: PackedList,
        buffer: Tensor,
        scale: float,
        found_inf: Tensor | None,
        packing: bool,
    ) -> None:
        """Between `buffer` and tensors of one dtype, at least one; into it, zeros for padding."""
        count = len(addresses)
        self._copy(
            (c_void_p * count)(*addresses),
            _CODES[listed.dtypes[0]],
            *listed.in_c,
            count,
            buffer.data_ptr(),
            _CODES[buffer.dtype],
            packing,
            scale,
            None if found_inf is None else found_inf.data_ptr(),
        )

    def sum_n(
        self, tensors: Sequence[Tensor], out: Tensor, scale: float, found_inf: Tensor | None
    ) -> None:
        """out = scale * (tensors[0] + ...); `out` may be any of the tensors."""
        addresses = (c_void_p * len(tensors))(*map(Tensor.data_ptr, tensors))
        codes = _CODES[tensors[0].dtype], _CODES[out.dtype]
        self._sum_n(
            addresses,
            len(tensors),
            codes[0],
            out.data_ptr(),
            codes[1],
            out.numel(),
            scale,
            None if found_inf is None else found_inf.data_ptr(),
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
        self._blend(
            *_pair(a, b),
            out.data_ptr(),
            _CODES[out.dtype],
            (c_int64 * len(bounds))(*bounds),
            len(bounds) - 1,
            (c_double * len(coefficients))(*coefficients),
            None if found_inf is None else found_inf.data_ptr(),
        )

    def dot_and_norms(self, a: Tensor, b: Tensor, bounds: Sequence[int]) -> list[list[float]]:
        """S rows (a.b, |a|^2, |b|^2)."""
        count = len(bounds) - 1
        partials = (c_double * (3 * (a.numel() // BLOCK + count)))()
        rows = (c_double * (3 * count))()
        self._dot_and_norms(*_pair(a, b), (c_int64 * len(bounds))(*bounds), count, partials, rows)
        return [rows[i : i + 3] for i in range(0, 3 * count, 3)]


def _pair(a: Tensor, b: Tensor) -> tuple[int, int, int, int]:
    return a.data_ptr(), _CODES[a.dtype], b.data_ptr(), _CODES[b.dtype]


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


def use_torch(why: str) -> None:
    """From now on use torch's functions in this process."""
    with _state.lock:
        _state.libraries, _state.why_not = {}, why


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
    command = [*_compiler(), *_FLAGS, f"-DREAL={real}", str(_SOURCE)]
    # What else is in the command is the same in all versions, or does not matter.
    key = hashlib.sha256(_SOURCE.read_bytes() + repr((_FLAGS, command[0])).encode())
    name = f"{real}-{key.hexdigest()[:24]}.so"
    folder = _cache()
    try:
        if folder is not None and (folder / name).exists():
            try:
                return Library(folder / name)
            except (OSError, AttributeError):
                # Cut short or of another machine: made anew.
                (folder / name).unlink(missing_ok=True)
        # Takes its name when it is whole: other processes do the same at the same time.
        with tempfile.TemporaryDirectory(prefix="adasum-", dir=folder) as private:
            made = Path(private, name)
            _run([*command, "-o", str(made)])
            library = Library(made)
            if folder is not None:
                made.replace(folder / name)
            return library
    except (OSError, AttributeError) as error:
        raise _Unavailable(f"{_SOURCE.name} could not be compiled and loaded: {error}") from error


def _compiler() -> list[str]:
    """The command that $CC names, else the first of the usual ones."""
    named = shlex.split(os.environ.get("CC", ""))
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
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = folder.stat()
    except OSError:
        return None
    others = stat.S_IWGRP | stat.S_IWOTH
    mine = info.st_uid == os.geteuid() and not info.st_mode & others
    return folder if mine and os.access(folder, os.W_OK) else None
