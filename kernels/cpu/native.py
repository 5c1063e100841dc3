"""The CPU path compiled: kernels/cpu/native.c, loaded with ctypes.

Each method returns what runs one function of it any number of times. It has the addresses of
tensors, not the tensors: whoever calls keeps those alive.
"""

from __future__ import annotations

import ctypes
import platform
from array import array
from collections.abc import Callable, Sequence
from functools import partial
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
    """The compiled functions, each of a reference to one task."""

    def __init__(self, path: Path) -> None:
        """Load them. Raises OSError or AttributeError where that fails."""
        # Where it is short, Python's other threads wait, which takes less time.
        apart, at_once = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        self._apart = {name: _function(apart, name) for name in _FUNCTIONS}
        self._at_once = {name: _function(at_once, name) for name in _FUNCTIONS}
        if found := _team():
            team = tasks.Team(*found)
            _function(apart, "use_team")(ctypes.byref(team))

    def _ready(self, name: str, task: Any, elements: int, *kept: object) -> tuple[Any, Any]:
        """A function, on all threads where that is worth it, and the reference to pass it.

        elements: how many it reads from one input. kept: what the task points to that is no tensor.
        """
        task.threads, task.kept = 1, kept
        if elements <= _ALONE:
            return self._at_once[name], ctypes.byref(task)
        function = self._apart[name]

        def on_all_threads(reference: Any) -> None:
            task.threads = torch.get_num_threads()
            function(reference)

        return on_all_threads, ctypes.byref(task)

    def copy(
        self,
        packed: PackedList,
        addresses: array[int],
        buffer: Tensor,
        findings: Findings,
        packing: bool,
    ) -> Callable[[float], None]:
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
        function, reference = self._ready(
            "copy", task, packed.layout.numel, addresses, numels, bounds
        )

        def run(scale: float) -> None:
            task.scale = scale
            function(reference)

        return run

    def sum_n(
        self, addresses: array[int], dtype: torch.dtype, out: Tensor, findings: Findings
    ) -> Callable[[float], None]:
        """Bind out = scale * (t0 + t1 + ...), in order; `out` may be any of the tensors."""
        task = tasks.Sum(
            inputs=_address(addresses),
            count=len(addresses),
            dtype=_CODES[dtype],
            out=out.data_ptr(),
            out_dtype=_CODES[out.dtype],
            numel=out.numel(),
            findings=_pointers(findings),
        )
        function, reference = self._ready("sum_n", task, out.numel(), addresses)

        def run(scale: float) -> None:
            task.scale = scale
            function(reference)

        return run

    def scaled_add(
        self, a: Tensor, b: Tensor, out: Tensor, findings: Findings
    ) -> Callable[[float, float], None]:
        """Bind out = alpha*a + beta*b."""
        bounds, factors = array("q", (0, out.numel())), array("d", (1.0, 1.0))
        task = _pair(a, b, bounds, out, findings)
        task.coefficients = _address(factors)
        function, reference = self._ready("scaled_add", task, out.numel(), bounds, factors)

        def run(alpha: float, beta: float) -> None:
            factors[0] = alpha
            factors[1] = beta
            function(reference)

        return run

    def projection(
        self,
        name: str,
        a: Tensor,
        b: Tensor,
        dots: Tensor | None,
        bounds: Sequence[int],
        out: Tensor | None,
        findings: Findings,
    ) -> Callable[[], None]:
        """dot_and_norms (no out), combine, or adasum (no dots), a segment at a time."""
        cuts = array("q", bounds)
        count = len(cuts) - 1
        task = _pair(a, b, cuts, out, findings)
        factors = array("d", bytes(16 * count))
        blocks = 0 if name == "combine" else a.numel() // BLOCK + count
        partials, rows = array("d", bytes(24 * blocks)), array("d", bytes(24 * count))
        task.coefficients, task.partials = _address(factors), _address(partials)
        task.dots = _address(rows) if dots is None else dots.data_ptr()
        kept = cuts, factors, partials, rows
        function, reference = self._ready(name, task, a.numel(), *kept)
        return partial(function, reference)


def build() -> Library:
    """Return the functions, compiled now or before. Raises Unavailable."""
    return built("native", _SOURCES, tasks.HEADERS, [*_FLAGS, *_flags_here()], Library)


def _address(values: array[Any]) -> int:
    """Of values that the caller keeps alive."""
    return values.buffer_info()[0]


def _pointers(findings: Findings) -> Any:
    return tasks.Findings(*[0 if one is None else one.data_ptr() for one in findings])


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
