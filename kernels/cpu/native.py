"""The CPU path compiled: kernels/cpu/native.c, loaded with ctypes.

Without a compiler, or on an x86-64 processor without AVX2, `library` is None, and the CPU path is
torch's own functions.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
import threading
from array import array
from collections.abc import Callable, Sequence
from ctypes import c_char_p, c_double
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from kernels.cpu.build import Unavailable, built
from kernels.packed_list import PackedList

# In the order of the C file's enum.
_CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}
# Elements of a block, whose dot products are one partial result.
BLOCK = 8192
_FILES = ("native.c", "native.h", "vectors.h", "tasks.h")
_SOURCES = [Path(__file__).with_name(name) for name in _FILES]
# What is written as floats is looked at as integers.
_FLAGS = ("-O3", "-funroll-loops", f"-DBLOCK={BLOCK}", "-fno-strict-aliasing")
_PROCESSORS = {
    "x86_64": ("-march=x86-64", "-mavx2", "-mfma", "-mf16c"),
    "aarch64": ("-march=armv8-a",),
}
_VARIABLE = "ADASUM_CPU_KERNELS"
_CHOICES = ("auto", "native", "torch")
# The C file's REAL for each arithmetic.
_REALS = {torch.float32: "float", torch.float64: "double"}


class Library:
    """The compiled functions for one arithmetic, float or double. Tensors: checked, contiguous."""

    def __init__(self, path: Path) -> None:
        """OSError or AttributeError where it cannot be loaded."""
        library = ctypes.CDLL(str(path))
        self._library = library
        self._copy = _function(library.copy)
        self._sum_n = _function(library.sum_n)
        self._blend = _function(library.blend)
        self._dot_and_norms = _function(library.dot_and_norms)
        if team := _team():
            _function(library.use_team)(_TEAM(*team))

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

    def copy_job(self, listed: PackedList, buffer: Tensor, packing: bool) -> Job | None:
        """How kernels/_recall.c makes `copy` again; None where it is not to do so."""
        numels, bounds = kept = listed.in_c
        task = _COPY(
            *(0, _CODES[listed.dtypes[0]], _address(numels), _address(bounds)),
            *(len(listed.dtypes), 0, _CODES[buffer.dtype], packing, 1.0, 0, 1),
        )
        return _job(self, self._library.copy, task, buffer, kept)

    def sum_n_job(self, count: int, dtype: torch.dtype, out: Tensor) -> Job | None:
        task = _SUM_N(0, count, _CODES[dtype], 0, _CODES[out.dtype], out.numel(), 1.0, 0, 1)
        return _job(self, self._library.sum_n, task, out)

    def blend_job(self, a: Tensor, b: Tensor, out: Tensor) -> Job | None:
        """With one segment."""
        cuts = array("q", (0, out.numel()))
        task = _BLEND(
            *(0, _CODES[a.dtype], 0, _CODES[b.dtype], 0, _CODES[out.dtype]),
            *(_address(cuts), 1, 0, 0, 1),
        )
        return _job(self, self._library.blend, task, out, cuts)


class Job(NamedTuple):
    """How kernels/_recall.c makes a call again, while this module's state has these libraries.

    task: the C file's struct, for it to fill in. like: of an output's dtype and shape. kept: what
    the struct points to.
    """

    module: ModuleType
    libraries: dict[torch.dtype, Library]
    function: int
    task: bytes
    like: Tensor
    kept: object


def _job(
    library: Library, function: Any, task: bytes, out: Tensor, kept: object = None
) -> Job | None:
    # Another thread may have called use_torch_on_cpu; a mode of the user's can have made another
    # output than is made without it.
    libraries = _state.libraries or {}
    if library not in libraries.values() or torch._C._is_torch_function_mode_enabled():
        return None
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    # Takes no memory, and torch.empty_like makes of it what it makes of a whole one.
    like = torch.empty((1,) * out.dim(), dtype=out.dtype, device="cpu").expand(out.shape)
    return Job(sys.modules[__name__], libraries, address, task, like, kept)


def _team() -> list[int]:
    """What starts torch's own threads, by address; nothing where that is not OpenMP.

    Not all of torch's wheels have it among what every library in the process can see.
    """
    try:
        itself = ctypes.CDLL(torch._C.__file__)
        found = [getattr(itself, name) for name in _OPENMP]
    except (OSError, AttributeError):
        return []
    return [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in found]


_OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
# The C file's structs: q for an integer, P for a pointer, d for a double.
_COPY = struct.Struct("PqPPqPqqdPq").pack
_SUM_N = struct.Struct("PqqPqqdPq").pack
_BLEND = struct.Struct("PqPqPqPqPPq").pack
_DOT_AND_NORMS = struct.Struct("PqPqPqPPq").pack
_TEAM = struct.Struct("PPP").pack


def _function(function: Any) -> Callable[[bytes], None]:
    function.argtypes, function.restype = (c_char_p,), None
    return cast(Callable[[bytes], None], function)


def _address(values: array[int] | array[float]) -> int:
    """Of values that the caller keeps alive."""
    return values.buffer_info()[0]


def _flag(found_inf: Tensor | None) -> int:
    return 0 if found_inf is None else found_inf.data_ptr()


class _State:
    """libraries: by arithmetic, once looked for. why_not: why torch's functions are used."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.libraries: dict[torch.dtype, Library] | None = None
        self.why_not = ""


_state = _State()


def _forked() -> None:
    """A thread that compiles is not in a child of the process, the lock that it held is."""
    _state.lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


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
                    raise Unavailable(f"{_VARIABLE}=torch")
                flags = [*_FLAGS, *_flags_here()]
                _state.libraries = {
                    wide: built(real, _SOURCES, [*flags, f"-DREAL={real}"], Library)
                    for wide, real in _REALS.items()
                }
            except Unavailable as error:
                if choice == "native":
                    raise RuntimeError(f"{_VARIABLE}=native: {error}") from error
                _state.libraries, _state.why_not = {}, str(error)
        return _state.libraries


def _flags_here() -> tuple[str, ...]:
    """The compiler's for this processor."""
    system, machine = platform.system(), platform.machine()
    if system != "Linux" or machine not in _PROCESSORS:
        wanted = " or ".join(_PROCESSORS)
        raise Unavailable(f"compiled for Linux on {wanted}, this is {system} on {machine}")
    capability = torch.backends.cpu.get_cpu_capability()
    if machine == "x86_64" and not capability.startswith("AVX"):
        raise Unavailable(f"needs AVX2, torch says {capability}")
    return _PROCESSORS[machine]
