"""Load the compiled CPU path with ctypes: kernels/cpu/native.c, which setup.py compiles.

All functions take one argument, a struct: with ctypes, separate arguments take four times as long.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import logging
import platform
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.autograd.graph import increment_version

from kernels.call import FUNCTIONS, Call
from kernels.layout import Layout

# The dtypes' numbers in the enum of native.c.
_CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}
LIBRARY = Path(__file__).with_name("libnative.so")
_MACHINES = ("x86_64", "aarch64")
_ANEW = (
    "with gcc, or what $CC names, run `make build` in a checkout that is used in place, or "
    "`pip install --force-reinstall --no-cache-dir --no-deps .` in one to install from"
)
# Functions whose arguments C checks.
READ = tuple([name for name in FUNCTIONS if name != "adasum_coefficients"])
_OPENMP = {
    "parallel": "GOMP_parallel",
    "thread_num": "omp_get_thread_num",
    "num_threads": "omp_get_num_threads",
}
# The functions of TorchStableABI in interfaces.h, and the version of torch that has them.
_STABLE_ABI = (
    *("torch_list_size", "torch_list_get_item", "torch_delete_list", "aoti_torch_get_data_ptr"),
    *("aoti_torch_get_storage_offset", "aoti_torch_get_storage_size"),
    "aoti_torch_delete_tensor_object",
)
_ABI_VERSION = ctypes.c_uint64(0x020A000000000000)
_OPERATORS = torch.library.Library("adasum", "FRAGMENT")
_OPERATORS.define("storages(Tensor[] tensors, int to) -> ()")
# Libraries that are loaded.
_registered: list[ctypes.CDLL] = []
_NONE = array("q")
_logger = logging.getLogger(__name__)


class Unavailable(Exception):
    """The compiled functions cannot be used; the text says why."""


class Task(ctypes.Structure):
    """The struct of task.h, which describes its fields. Pointers are passed as addresses."""

    _fields_ = (
        ("function", ctypes.c_int64),
        ("first", ctypes.c_double),
        ("second", ctypes.c_double),
        ("tensors", ctypes.c_void_p),
        ("dtypes", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("out_dtype", ctypes.c_int64),
        ("bounds", ctypes.c_void_p),
        ("segments", ctypes.c_int64),
        ("numels", ctypes.c_void_p),
        ("packing", ctypes.c_int64),
        ("balanced", ctypes.c_int64),
        ("accumulate", ctypes.c_int64),
        ("table", ctypes.c_void_p),
        ("precise", ctypes.c_int64),
        ("spread", ctypes.c_void_p),
        ("tables", ctypes.c_int64),
        ("tree", ctypes.c_void_p),
        ("found_inf", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
        ("parallel", ctypes.c_void_p),
        ("thread_num", ctypes.c_void_p),
        ("num_threads", ctypes.c_void_p),
        ("coefficients", ctypes.c_void_p),
        ("partials", ctypes.c_void_p),
        ("dots", ctypes.c_void_p),
    )


class Library:
    """The compiled functions.

    Attributes:
        calls: The functions of calls.h, by the names in `READ`. Each checks and runs a direct call
            on CPU tensors and returns its output, or checks a call on a GPU and returns it as a
            `Call`, or returns None if the checks in Python are to decide. Empty if this torch does
            not give C access to tensors, and in Python 3.10.
        reads: Likewise functions that return a `Call` on any device.
    """

    def __init__(self, path: Path) -> None:
        """Load the functions. Raises OSError or AttributeError if that fails."""
        self._run = ctypes.CDLL(str(path)).run_task
        self._run.argtypes = (ctypes.c_void_p,)
        self._team = _team()
        self.calls, self.reads = _calls(path, self._team)

    def bind(self, call: Call) -> Callable[..., None]:
        """Return a function of the call's scalars, which runs the call and can be used repeatedly.

        It holds the addresses of tensors but not the tensors: the caller must keep them alive.
        Scalars are the scale, alpha and beta, or the factors of the squared norms.
        """
        name, joins = call.function, call.function == "adasum_coefficients"
        if call.layout is None:
            numels, bounds = _NONE, array("q", call.bounds)
        else:
            numels, bounds = call.layout.in_c
        codes = array("q", map(_CODES.__getitem__, call.dtypes))
        tree = array("d", itertools.chain.from_iterable(call.tree))
        arrays = call.addresses, codes, bounds, numels, tree
        tensors, dtypes, starts, elements, rows = [one.buffer_info()[0] for one in arrays]
        task = Task(
            function=FUNCTIONS.index(name),
            tensors=tensors,
            dtypes=dtypes,
            count=call.out.shape[1] if joins else len(codes),
            out=call.out.data_ptr(),
            out_dtype=_CODES[call.out.dtype],
            bounds=starts,
            segments=call.out.shape[0] if joins else len(bounds) - 1,
            numels=elements,
            packing=call.packing,
            balanced=call.kind == "tree",
            accumulate=_CODES[call.accumulated] if name == "sum_n" else 0,
            table=_address(call.table),
            precise=call.precise,
            spread=_address(call.spread),
            tables=call.inputs[0].shape[0] if joins else 0,
            tree=rows,
            found_inf=_address(call.found_inf),
            **self._team,
        )
        execute, reference = self._run, ctypes.addressof(task)

        # `kept` keeps the arrays alive: the task has their addresses.
        def run(first: float = 1.0, second: float = 1.0, kept: object = arrays) -> None:
            task.first, task.second, task.threads = first, second, torch.get_num_threads()
            if not execute(reference):
                raise MemoryError(f"no memory for the partial sums of {name}")

        return run


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _calls(path: Path, team: dict[str, int]) -> list[dict[str, Callable[..., Any]]]:
    """Return a library's functions of direct calls, and the ones that only read, by name."""
    capsule = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    library = ctypes.PyDLL(str(path))
    library.direct_call.argtypes = ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_int
    library.direct_call.restype = ctypes.py_object
    try:
        storages, addresses = _storages(library), array("Q", (*_stable_abi(), *team.values()))
        # In the order of the fields in reading.h.
        handles = (
            *(None, Tensor, torch.nn.Parameter, list, tuple, int, str, Exception),
            *(Layout, "in_one", Call, array, "Q", storages),
            *(Tensor.is_neg, Tensor.is_inference, Tensor.untyped_storage, Tensor.storage_offset),
            *("requires_grad", torch.is_grad_enabled, torch.is_inference_mode_enabled, unpack_dual),
            *(increment_version, torch.get_num_threads, Tensor.new_empty, ("dtype",)),
            *(torch.empty_like, ("dtype", "memory_format")),
            *(torch.contiguous_format, torch.preserve_format, *_CODES, capsule),
        )
        at = addresses.buffer_info()[0]
        return [
            {
                name: library.direct_call(handles, at, (FUNCTIONS.index(name), name), reads)
                for name in READ
            }
            for reads in (False, True)
        ]
    except Exception as error:  # noqa: BLE001 - what C raises; Python does the same
        # Another version of torch, DLPack or Python: arguments are then checked in Python.
        _logger.info("arguments are checked in Python: %s", error)
        return [{}, {}]


@functools.cache
def _torchs() -> ctypes.CDLL:
    """Return an object that finds functions in all of torch's libraries."""
    return ctypes.CDLL(torch._C.__file__)


def _stable_abi() -> list[int]:
    """Return the addresses of the functions in `_STABLE_ABI`; AttributeError if one is missing."""
    found = [getattr(_torchs(), name) for name in _STABLE_ABI]
    return [ctypes.cast(one, ctypes.c_void_p).value or 0 for one in found]


def _storages(library: ctypes.CDLL) -> Any:
    """Return the operator whose kernel is `write_storages` of the library that was loaded first.

    It has kernels for CPUs and CUDA devices only. torch raises errors for tensors elsewhere.
    """
    torchs = _torchs()
    for key in () if _registered else (b"CPU", b"CUDA"):
        handle = ctypes.c_void_p()
        if torchs.aoti_torch_library_init_impl(b"adasum", key, b"", 0, ctypes.byref(handle)) or (
            torchs.torch_library_impl(handle, b"storages", library.write_storages, _ABI_VERSION)
        ):
            raise RuntimeError("torch takes no kernel by its stable ABI")
    _registered.append(library)
    return torch.ops.adasum.storages.default


def load() -> Library:
    """Return the functions; raise Unavailable if they were not compiled or cannot run here."""
    system, machine = platform.system(), platform.machine()
    if system != "Linux" or machine not in _MACHINES:
        wanted = " or ".join(_MACHINES)
        raise Unavailable(f"compiled for Linux on {wanted}, this is {system} on {machine}")
    capability = torch.backends.cpu.get_cpu_capability()
    if machine == "x86_64" and not capability.startswith("AVX"):
        raise Unavailable(f"needs AVX2, torch says {capability}")
    if not LIBRARY.exists():
        raise Unavailable(f"the C kernels were not compiled at installation: {_ANEW}")
    try:
        # Check the hash first: functions compiled for another struct could write anywhere.
        said = (ctypes.c_char * 64).in_dll(ctypes.CDLL(str(LIBRARY)), "compiled_from")
        if said.value.decode() != _sources():
            raise Unavailable(f"{LIBRARY.name} was compiled from other sources: {_ANEW}")
        return Library(LIBRARY)
    except (OSError, ValueError, AttributeError) as error:
        raise Unavailable(f"{LIBRARY.name} cannot be loaded: {error}: {_ANEW}") from error


def _sources() -> str:
    """Return the hash of the C files in this folder, computed as in setup.py."""
    texts = [path.read_bytes() for path in sorted(LIBRARY.parent.glob("*.[ch]"))]
    return hashlib.sha256(b"".join(texts)).hexdigest()


def _team() -> dict[str, int]:
    """Return the addresses of the OpenMP functions that run torch's threads; 0 without OpenMP.

    Not all of torch's wheels make these symbols visible in the whole process. The extension module
    that links them always gives access to them, but it has no public name.
    """
    try:
        found = {field: getattr(_torchs(), name) for field, name in _OPENMP.items()}
    except (OSError, AttributeError):
        return dict.fromkeys(_OPENMP, 0)
    return {field: ctypes.cast(one, ctypes.c_void_p).value or 0 for field, one in found.items()}
