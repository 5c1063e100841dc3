"""The CPU path compiled: kernels/cpu/native.c, loaded with ctypes.

Each class holds what one function of it is told, ready to be called any number of times. Addresses
are not tensors: whoever calls keeps those alive.
"""

from __future__ import annotations

import ctypes
import platform
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.arithmetic import TINY
from kernels.cpu import tasks
from kernels.cpu.build import Unavailable, built
from kernels.findings import Findings
from kernels.layout import PackedList

# In the order of the C file's enum.
_CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}
# Elements of a block, whose dot products are one partial result.
BLOCK = 8192
# More elements than these are worth a second thread: ALONE in native.c.
_ALONE = 32768
_SOURCES = [Path(__file__).with_name(name) for name in ("native.c", "real.h", "vectors.h")]
_FLAGS = (
    # What is written as floats is looked at as integers.
    *("-O3", "-funroll-loops", "-fno-strict-aliasing"),
    *(f"-DBLOCK={BLOCK}", f"-DTINY={TINY!r}"),
    # Coefficients inside this range times any float32 lose nothing to float32's exponent.
    *("-DSAFE_LOW=0x1p-60", "-DSAFE_HIGH=0x1p60"),
)
_PROCESSORS = {
    "x86_64": ("-march=x86-64", "-mavx2", "-mfma", "-mf16c"),
    "aarch64": ("-march=armv8-a",),
}
_FUNCTIONS = ("sum_n", "copy", "scaled_add", "dot_and_norms", "combine", "adasum")
_OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


class Library:
    """The compiled functions, each of one task's address."""

    def __init__(self, path: Path) -> None:
        """Load them. Raises OSError or AttributeError where that fails."""
        library = ctypes.CDLL(str(path))
        self.functions = {name: _function(library, name) for name in _FUNCTIONS}
        if found := _team():
            team = tasks.Team(*found)
            _function(library, "use_team")(ctypes.addressof(team))


def _function(library: ctypes.CDLL, name: str) -> Any:
    function = library[name]
    function.argtypes, function.restype = (ctypes.c_void_p,), None
    return function


def _team() -> list[int]:
    """What starts torch's own threads, by address; nothing where that is not OpenMP.

    Not all of torch's wheels have it among what every library in the process can see: then only
    the extension module that links it knows it, which has no public name.
    """
    try:
        itself = ctypes.CDLL(torch._C.__file__)
        found = [getattr(itself, name) for name in _OPENMP]
    except (OSError, AttributeError):
        return []
    return [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in found]


def build() -> Library:
    """Return the functions, compiled now or before. Raises Unavailable."""
    return built("native", _SOURCES, tasks.HEADERS, [*_FLAGS, *_flags_here()], Library)


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


def _address(values: array[Any]) -> int:
    """Of values that the caller keeps alive."""
    return values.buffer_info()[0]


def _pointers(findings: Findings) -> Any:
    return tasks.Findings(*[0 if one is None else one.data_ptr() for one in findings])


class _Call:
    """A function and its task. kept: what the task points to that is no tensor."""

    __slots__ = ("_address", "_function", "_kept", "_task", "_threaded")

    def __init__(self, function: Any, task: Any, elements: int, *kept: object) -> None:
        self._function, self._task, self._kept = function, task, kept
        self._address = ctypes.addressof(task)
        self._threaded = elements > _ALONE
        task.threads = 1

    def __call__(self) -> None:
        if self._threaded:
            self._task.threads = torch.get_num_threads()
        self._function(self._address)


class _Scaled(_Call):
    """One whose task has a scale."""

    def __call__(self, scale: float) -> None:  # type: ignore[override]
        task = self._task
        task.scale = scale
        if self._threaded:
            task.threads = torch.get_num_threads()
        self._function(self._address)


class _Blended(_Call):
    """scaled_add, whose coefficients are the first two of `coefficients`."""

    __slots__ = ("_coefficients",)

    def __init__(
        self, function: Any, task: Any, elements: int, factors: array[float], bounds: array[int]
    ) -> None:
        super().__init__(function, task, elements, factors, bounds)
        self._coefficients = factors

    def __call__(self, alpha: float, beta: float) -> None:  # type: ignore[override]
        self._coefficients[0], self._coefficients[1] = alpha, beta
        super().__call__()


def copy(
    library: Library,
    packed: PackedList,
    addresses: array[int],
    buffer: Tensor,
    findings: Findings,
    packing: bool,
) -> _Scaled:
    """Between `buffer` and tensors of one dtype; into it, with zeros for the padding.

    addresses: the tensors', uint64.
    """
    numels, bounds = packed.layout.in_c
    task = tasks.Copy(
        tensors=_address(addresses),
        dtype=_CODES[packed.dtypes[0]],
        numels=_address(numels),
        bounds=_address(bounds),
        count=len(numels),
        buffer=buffer.data_ptr(),
        buffer_dtype=_CODES[buffer.dtype],
        packing=packing,
        findings=_pointers(findings),
    )
    elements = packed.layout.numel
    return _Scaled(library.functions["copy"], task, elements, addresses, numels, bounds)


def sum_n(
    library: Library, addresses: array[int], dtype: torch.dtype, out: Tensor, findings: Findings
) -> _Scaled:
    """out = scale * (the sum of the tensors, in order); `out` may be any of them."""
    task = tasks.Sum(
        inputs=_address(addresses),
        count=len(addresses),
        dtype=_CODES[dtype],
        out=out.data_ptr(),
        out_dtype=_CODES[out.dtype],
        numel=out.numel(),
        findings=_pointers(findings),
    )
    return _Scaled(library.functions["sum_n"], task, out.numel(), addresses)


def _pair(a: Tensor, b: Tensor, bounds: array[int], out: Tensor | None, findings: Findings) -> Any:
    task = tasks.Pair(
        a=a.data_ptr(),
        a_dtype=_CODES[a.dtype],
        b=b.data_ptr(),
        b_dtype=_CODES[b.dtype],
        bounds=_address(bounds),
        segments=len(bounds) - 1,
        findings=_pointers(findings),
    )
    if out is not None:
        task.out, task.out_dtype = out.data_ptr(), _CODES[out.dtype]
    return task


def scaled_add(library: Library, a: Tensor, b: Tensor, out: Tensor, findings: Findings) -> _Blended:
    """out = alpha*a + beta*b."""
    bounds, factors = array("q", (0, out.numel())), array("d", (1.0, 1.0))
    task = _pair(a, b, bounds, out, findings)
    task.coefficients = _address(factors)
    return _Blended(library.functions["scaled_add"], task, out.numel(), factors, bounds)


def projection(
    library: Library,
    name: str,
    a: Tensor,
    b: Tensor,
    dots: Tensor | None,
    bounds: Sequence[int],
    out: Tensor | None,
    findings: Findings,
) -> _Call:
    """dot_and_norms (no out), combine, or adasum (no dots), a segment at a time."""
    cuts = array("q", bounds)
    count = len(cuts) - 1
    task = _pair(a, b, cuts, out, findings)
    factors = array("d", bytes(16 * count))
    partials = array("d", bytes(24 * (a.numel() // BLOCK + count) if name != "combine" else 0))
    rows = array("d", bytes(24 * count if dots is None else 0))
    task.coefficients, task.partials = _address(factors), _address(partials)
    task.dots = _address(rows) if dots is None else dots.data_ptr()
    return _Call(library.functions[name], task, a.numel(), cuts, factors, partials, rows)
