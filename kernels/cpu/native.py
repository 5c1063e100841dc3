"""The CPU path compiled: kernels/cpu/native.c, loaded with ctypes.

All functions take one argument, a struct: to pass as many with ctypes takes four times as long.
"""

from __future__ import annotations

import ctypes
import operator
import platform
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kernels.arguments import Call
from kernels.arithmetic import CANCELLED, TINY
from kernels.cpu.build import Unavailable, built

# In the order of the C file's enum.
_CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}
# Elements of a block, whose dot products are one partial result.
BLOCK = 8192
_SOURCES = [Path(__file__).with_name(name) for name in ("native.c", "real.h", "vectors.h")]
_FLAGS = (
    # What is written as floats is looked at as integers.
    *("-O3", "-funroll-loops", "-fno-strict-aliasing"),
    *(f"-DBLOCK={BLOCK}", f"-DTINY={TINY!r}", f"-DCANCELLED={CANCELLED!r}"),
    # Coefficients inside this range times any float32 lose nothing to float32's exponent.
    *("-DSAFE_LOW=0x1p-60", "-DSAFE_HIGH=0x1p60"),
)
_PROCESSORS = {
    "x86_64": ("-march=x86-64", "-mavx2", "-mfma", "-mf16c"),
    "aarch64": ("-march=armv8-a",),
}
FUNCTIONS = ("sum_n", "copy", "scaled_add", "dot_and_norms", "combine", "adasum")
_OPENMP = {
    "parallel": "GOMP_parallel",
    "thread_num": "omp_get_thread_num",
    "num_threads": "omp_get_num_threads",
}
# The struct's fields with their C types, 8 bytes each.
_FIELDS = {
    # What is read or, by `copy` out of a buffer, written, and how many.
    "tensors": "void *const *",
    "dtypes": "const int64_t *",
    "count": "int64_t",
    # What is written: of `copy` the buffer, which it may read.
    "out": "void *",
    "out_dtype": "int64_t",
    # The elements of `out`, or of a and b, where segments start, and end.
    "bounds": "const int64_t *",
    "segments": "int64_t",
    # Of `copy` alone: the tensors' elements; whether into the buffer.
    "numels": "const int64_t *",
    "packing": "int64_t",
    "coefficients": "double *",
    # (a.b, |a|^2, |b|^2) of each block and each segment.
    "partials": "double *",
    "dots": "double *",
    # What to report of the values written: set to 1, and raised.
    "found_inf": "float *",
    "largest": "uint64_t *",
    # The most that may be used, and what runs them.
    "threads": "int64_t",
    "parallel": "run_in_team *",
    "thread_num": "count_threads *",
    "num_threads": "count_threads *",
}
_ROWS = "\n".join(f"    {kind} {name};" for name, kind in _FIELDS.items())
# What native.c includes.
HEADERS = {"task.h": f"struct task {{\n{_ROWS}\n}};\n"}
_THREADS = list(_FIELDS).index("threads")
# What a call says; what runs the threads follows, the same for all.
_in_order = operator.itemgetter(*list(_FIELDS)[: _THREADS + 1])
_WITH_PARTIALS = ("dot_and_norms", "adasum")
_NONE = array("q")


class Library:
    """The compiled functions."""

    def __init__(self, path: Path) -> None:
        """Load them. Raises OSError or AttributeError where that fails."""
        library = ctypes.CDLL(str(path))
        self._functions = {name: library[name] for name in FUNCTIONS}
        self._functions["pack"] = self._functions["unpack"] = library["copy"]
        for function in self._functions.values():
            function.argtypes, function.restype = (ctypes.c_void_p,), None
        self._team = operator.itemgetter(*list(_FIELDS)[_THREADS + 1 :])(_team())

    def bind(self, call: Call) -> Callable[..., None]:
        """Return what runs a call any number of times, with its scalars.

        It has the addresses of tensors, not the tensors: whoever calls keeps those alive. Scalars
        are the scale, alpha and beta, or the factors of the squared norms.
        """
        name, (found_inf, max_abs) = call.function, call.findings
        if call.packed is None:
            numels, bounds = _NONE, array("q", call.bounds)
        else:
            numels, bounds = call.packed.layout.in_c
        segments = len(bounds) - 1
        codes = array("q", map(_CODES.__getitem__, call.dtypes))
        # One after the other: coefficients, the largest value, dots of its own, partials.
        largest = 2 * max(1, segments)
        rows = segments + bounds[-1] // BLOCK + segments if name in _WITH_PARTIALS else 0
        scratch = array("d", bytes(8 * (largest + 1 + 3 * rows)))
        start = _address(scratch)
        own_dots = start + 8 * (largest + 1)
        out = call.out.data_ptr()
        if call.dots is not None:
            dots = call.dots.data_ptr()
        else:
            dots = own_dots if name == "adasum" else out
        arrays = call.addresses, codes, bounds, numels
        tensors, dtypes, starts, elements = [one.buffer_info()[0] for one in arrays]
        fields = {
            "tensors": tensors,
            "dtypes": dtypes,
            "count": len(codes),
            "out": out,
            "out_dtype": _CODES[call.out.dtype],
            "bounds": starts,
            "segments": segments,
            "numels": elements,
            "packing": call.packing,
            "coefficients": start,
            "partials": own_dots + 24 * segments,
            "dots": dots,
            "found_inf": 0 if found_inf is None else found_inf.data_ptr(),
            "largest": 0 if max_abs is None else start + 8 * largest,
            "threads": 1,
        }
        task = array("Q", _in_order(fields) + self._team)
        function, reference = self._functions[name], _address(task)

        # `kept`: the arrays live as long as what runs.
        def run(first: float = 1.0, second: float = 1.0, kept: object = arrays) -> None:
            scratch[0], scratch[1], scratch[largest] = first, second, 0.0
            task[_THREADS] = torch.get_num_threads()
            function(reference)
            if max_abs is not None:
                max_abs.detach().fill_(scratch[largest])

        return run


def _address(values: array[Any]) -> int:
    return values.buffer_info()[0]


def build() -> Library:
    """Return the functions, compiled now or before. Raises Unavailable."""
    return built("native", _SOURCES, HEADERS, [*_FLAGS, *_flags_here()], Library)


def _team() -> dict[str, int]:
    """What starts torch's own threads, by address; nothing where that is not OpenMP.

    Not all of torch's wheels have it among what every library in the process can see: then only
    the extension module that links it knows it, which has no public name.
    """
    try:
        itself = ctypes.CDLL(torch._C.__file__)
        found = {field: getattr(itself, name) for field, name in _OPENMP.items()}
    except (OSError, AttributeError):
        return dict.fromkeys(_OPENMP, 0)
    return {field: ctypes.cast(one, ctypes.c_void_p).value or 0 for field, one in found.items()}


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
