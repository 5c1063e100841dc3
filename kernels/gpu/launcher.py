"""Shared by all launchers: Triton if it is installed, the choice of path, compiling and binding."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import inspect
import struct
import threading
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    triton: Any = importlib.import_module("triton")
    tl: Any = importlib.import_module("triton.language")
except ImportError:
    # CPU tensors need no Triton, and it is not available on all platforms.
    triton = tl = None

# True while tests run the compiled kernels on CPU tensors: tests/ptx_emulator.
emulated = False
# Held while a kernel is compiled. Reentrant, because Triton's hooks, signal handlers or finalizers
# may launch another kernel in the same thread meanwhile.
_compiling = threading.RLock()
# Used again and again, since it has no state.
_HERE = contextlib.nullcontext()
_FLOAT = frozenset({float})
# By their number.
_DOUBLES, _INT64S = ([struct.Struct(f"<{n}{kind}") for n in range(3)] for kind in "dq")

# Options of every kernel. Without fusion, sums of products need more registers. It is set
# explicitly, because Triton's default is about to change; other kernels do not depend on it.
OPTIONS = {"enable_fp_fusion": True}


# Decorator of device functions, which kernels call.
jit: Any = triton.jit if triton else lambda fn: fn


@dataclass(slots=True)
class Launch:
    """A launch whose kernel is compiled and whose arguments are bound.

    name: The kernel's name. device: torch's number of the GPU; negative while a test emulates one.
    stream_of: Returns the handle of a device's current stream. run: Starts the kernel.
    """

    name: str
    device: int
    stream_of: Callable[[int], Any]
    run: Callable[..., Any]
    arguments: tuple[Any, ...]

    def __call__(
        self,
        *leading: Tensor | int,
        scratch: Callable[[int], tuple[Tensor, ...]] | None = None,
        then: Callable[..., None] | None = None,
    ) -> None:
        """Launch on the current stream with the kernel's leading arguments.

        scratch: Returns the arguments that follow those, for a stream. then: `start` of another
        launch on the same device, called with the same stream.
        """
        device = self.device
        if device >= 0 and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(*leading, scratch=scratch, then=then)
            return
        stream = self.stream_of(device)
        more = () if scratch is None else scratch(stream)
        self.run(*leading, *more, *self.arguments, stream=stream)
        if then is not None:
            then(stream=stream)

    def start(self, *leading: Tensor | int, stream: int) -> None:
        """Launch on a stream; the current device must be this launch's."""
        self.run(*leading, *self.arguments, stream=stream)


class Kernel:
    """A kernel to launch: `@Kernel` replaces `@triton.jit`.

    Its compiled code depends only on the constants and the device, so the constants must also
    determine the dtypes of its pointers. Triton does not specialise on alignment, which kernels
    test or take as a constant, nor on integers, whose width is annotated. So a new number of
    elements or scale compiles nothing, and the code is looked up by the constants, while Triton
    would inspect every argument at each launch. Triton's settings for compiling take effect when a
    variant is first bound, its launch hooks at each launch.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.function: Any = fn
        # By constants: the code, a function that starts it, and the constants' values in Triton.
        self._compiled: dict[tuple[Hashable, ...], tuple[Any, Any, tuple[Any, ...]]] = {}
        if triton is not None:
            kinds = inspect.signature(fn).parameters.values()
            passed = [kind.name for kind in kinds if "constexpr" not in str(kind.annotation)]
            self.function = triton.jit(fn, do_not_specialize=passed)

    def bind(
        self,
        programs: int,
        leading: tuple[Tensor | int, ...],
        *arguments: Tensor | int | None,
        **constants: Hashable,
    ) -> Launch:
        """Compile for the current device, if necessary, and bind arguments.

        Args:
            programs: How many programs to run.
            leading: Examples of the kernel's leading arguments, which each launch passes again.
            arguments: The arguments that follow and are not constants. Triton compiles None as a
                constant.
            constants: Constants and options of Triton's, always in one order; dtypes are torch's.
        """
        driver = triton.runtime.driver.active
        device = driver.get_current_device()
        key = (device, *[one is None for one in arguments], *constants.values())
        found = self._compiled.get(key)
        if found is None:
            given = {name: _in_triton(value) for name, value in constants.items()} | OPTIONS
            given["num_warps"] = _warps(given["num_warps"])
            names = self.function.arg_names[len(leading) + len(arguments) :]
            # Concurrent threads wait for the first one. Nothing is launched while the lock is held,
            # since a launch may have to wait for other threads' work on the GPU.
            with _compiling:
                compiled = self.function.warmup(*leading, *arguments, grid=(programs,), **given)
                if compiled is None:
                    raise RuntimeError("kernels cannot be interpreted: unset TRITON_INTERPRET")
                start = _runner(compiled)
            found = self._compiled[key] = compiled, start, tuple([given[name] for name in names])
        _, start, values = found
        return Launch(
            self.function.__name__,
            device,
            driver.get_current_stream,
            functools.partial(start, programs),
            (*arguments, *values),
        )


def _runner(compiled: Any) -> Callable[..., None]:
    """Load a kernel; return a function that starts programs as `compiled[programs, 1, 1]` does.

    Triton's own describes each launch to Triton's launch hooks. Without such hooks, which is usual,
    this function takes some 1.1 us less (bench/NOTES.md).
    """
    knobs = triton.knobs
    # `run` first: it loads the kernel on the GPU.
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata

    def start(programs: int, *arguments: Any, stream: int) -> None:
        enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        # Each hook is a chain, which may be empty, or a user's own: None or a function.
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            compiled[programs, 1, 1](*arguments, stream=stream)
        else:
            run(programs, 1, 1, stream, function, metadata, None, None, None, *arguments)

    return start


def _warps(count: int) -> int:
    """Return how many of this GPU's warps hold `count` * 32 threads: AMD's may have 64 threads."""
    width: int = triton.runtime.driver.active.get_current_target().warp_size
    return max(1, count * 32 // width)


def _in_triton(value: Hashable) -> Any:
    """Return a constant for Triton: a torch dtype becomes the Triton dtype of the same name."""
    if isinstance(value, torch.dtype):
        return getattr(tl, str(value).removeprefix("torch."))
    return value


# Decorator of functions that compute with constants while kernels are compiled.
constexpr_function: Any = triton.constexpr_function if triton else lambda fn: fn


def on_triton(tensor: Tensor) -> bool:
    """Return whether work on `tensor` goes to Triton.

    Raises:
        ImportError: It is a CUDA tensor, and Triton is not installed.
    """
    if not tensor.is_cuda:
        return emulated
    if triton is None:
        raise ImportError("kernels on CUDA tensors need Triton: pip install 'triton>=3.6'")
    return True


def on_device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Return a context with the tensor's device as the current one: Triton launches on that."""
    if not tensor.is_cuda or (device := tensor.get_device()) == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


def nothing(*_: float | Tensor) -> None:
    """Do nothing, in place of a launch without elements."""


def bits_of(*values: float | Tensor) -> tuple[int, ...]:
    """Return at most two float64s' bits as signed integers: Triton would pass floats as float32.

    The host waits to read a tensor on a GPU.
    """
    count = len(values)
    return _INT64S[count].unpack(_DOUBLES[count].pack(*values))


def scalar_of(value: float | Tensor, out: Tensor) -> tuple[int, torch.dtype | None]:
    """Return a scalar as kernels/gpu/tiles.py's `float_of` expects it: (bits, None) of a float.

    Of a tensor on the device of `out` it is (address, dtype).
    """
    if isinstance(value, Tensor) and value.device == out.device:
        return value.data_ptr(), value.dtype
    return bits_of(value)[0], None


def with_scalars(bind: Callable[..., Launch], count: int, out: Tensor) -> Callable[..., None]:
    """Return a function that launches with `count` scalars, bound once for each kind of scalars.

    bind: Binds a launch for each scalar's kind: its dtype if it is a tensor, None for a float.
    """
    floats = (None,) * count
    by_floats = bind(*floats)
    launches = {floats: by_floats}

    def run(*scalars: float | Tensor) -> None:
        if _FLOAT.issuperset(map(type, scalars)):
            by_floats(*bits_of(*scalars))
            return
        bits, kinds = zip(*[scalar_of(one, out) for one in scalars], strict=True)
        if kinds not in launches:
            with on_device_of(out):
                launches[kinds] = bind(*kinds)
        launches[kinds](*bits)

    return run


def power_of_two_above(value: int) -> int:
    """Return the smallest power of two that is at least `value`."""
    return 1 << max(0, value - 1).bit_length()


@functools.lru_cache
def block_of(numel: int, itemsize: int, most: int = 16384) -> tuple[int, int]:
    """Return (elements per tile, warps) of an elementwise kernel, from only size and dtype.

    128 threads share up to `most` bytes in 16-byte accesses, by default eight each. Tiles of small
    inputs are smaller, to use more multiprocessors.
    """
    nbytes = numel * itemsize
    tile_bytes = min(most, max(2048, power_of_two_above(nbytes // 256)))
    return tile_bytes // itemsize, 4


class Chip(NamedTuple):
    """Properties of a GPU that launchers use.

    Attributes:
        multiprocessors: Number of multiprocessors.
        cache: Bytes of L2.
        dependent_launch: Whether a kernel may be launched while the one before it on the stream
            ends, and wait for that one itself, also in a CUDA graph.
        capability: The compute capability times ten of NVIDIA's GPUs, otherwise 0.
    """

    multiprocessors: int
    cache: int
    dependent_launch: bool = False
    capability: int = 0


@functools.cache
def chip_of(device: torch.device) -> Chip:
    """Return the properties of this GPU that launchers use."""
    properties = torch.cuda.get_device_properties(device)
    nvidia = torch.version.hip is None
    able = nvidia and properties.major >= 9
    return Chip(
        properties.multi_processor_count,
        properties.L2_cache_size,
        # CUDA graphs have the edges for such launches from 12.3 on.
        able and _driver_version() >= 12030,
        10 * properties.major + properties.minor if nvidia else 0,
    )


def _driver_version() -> int:
    """Return the CUDA version of NVIDIA's driver, such as 12030 for 12.3; 0 without a driver."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return 0
    return version.value
