"""What all launchers share: Triton if there is one, the choice of path, compiling and binding."""

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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.findings import Findings

try:
    triton: Any = importlib.import_module("triton")
    tl: Any = importlib.import_module("triton.language")
except ImportError:
    # CPU tensors need no Triton, and some platforms have none.
    triton = tl = None

# True while tests run the compiled kernels on CPU tensors: tests/ptx_emulator.
emulated = False
# Held while a kernel is compiled. Reentrant, because Triton's hooks, a signal handler or a
# finalizer may launch another kernel in the same thread meanwhile.
_compiling = threading.RLock()
_DOUBLE, _INT64 = struct.Struct("<d"), struct.Struct("<q")
_DOUBLES, _INT64S = struct.Struct("<2d"), struct.Struct("<2q")

# Of every kernel: without it sums of products need more registers. Written out, because Triton's
# default is about to change; the code of kernels without such sums does not depend on it.
OPTIONS = {"enable_fp_fusion": True}


# Code that kernels call.
jit: Any = triton.jit if triton else lambda fn: fn


class Launch:
    """A launch whose kernel is compiled and whose arguments are bound.

    name: The kernel's. device: torch's number of the GPU; negative while a test emulates one.
    stream_of: Returns the handle of a device's current stream.
    """

    __slots__ = ("_arguments", "_device", "_run", "_stream_of", "name")

    def __init__(
        self,
        name: str,
        device: int,
        stream_of: Callable[[int], Any],
        run: Callable[..., Any],
        arguments: tuple[Any, ...],
    ) -> None:
        self.name, self._device, self._stream_of = name, device, stream_of
        self._run, self._arguments = run, arguments

    def __call__(
        self,
        *leading: Tensor | int,
        scratch: Callable[[int], tuple[Tensor, ...]] | None = None,
        then: Callable[..., None] | None = None,
    ) -> None:
        """Launch on the current stream, with what the kernel takes first.

        scratch: Returns what it takes behind that, for a stream. then: `start` of another launch on
        the same device, called with the same stream.
        """
        device = self._device
        if device >= 0 and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(*leading, scratch=scratch, then=then)
            return
        stream = self._stream_of(device)
        more = () if scratch is None else scratch(stream)
        self._run(*leading, *more, *self._arguments, stream=stream)
        if then is not None:
            then(stream=stream)

    def start(self, *leading: Tensor | int, stream: int) -> None:
        """Launch on a stream of the current device, which is this launch's."""
        self._run(*leading, *self._arguments, stream=stream)


class Kernel:
    """A kernel to launch: `@Kernel` in the place of `@triton.jit`.

    Its compiled code depends on the constants and the device alone, so the constants must also tell
    the dtypes of its pointers. Triton is kept from specialising on alignment, which kernels test or
    a constant tells, and on integers, which are as wide as their annotation says. So another number
    of elements or another scale compiles nothing, and the code is looked up by the constants, where
    Triton would inspect every argument at each launch. Triton's settings for compiling take effect
    when a variant is first bound, its launch hooks always.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.function: Any = fn
        self._compiled: dict[tuple[Hashable, ...], tuple[Any, tuple[Any, ...]]] = {}
        if triton is not None:
            kinds = inspect.signature(fn).parameters.values()
            passed = [kind.name for kind in kinds if "constexpr" not in str(kind.annotation)]
            self.function = triton.jit(fn, do_not_specialize=passed)

    def bind(
        self,
        programs: int,
        leading: tuple[Tensor | int, ...],
        *arguments: Tensor | int | Findings,
        **constants: Hashable,
    ) -> Launch:
        """Compile for the current device, unless that has been done, and bind arguments.

        Args:
            programs: How many to run.
            leading: What the kernel takes first, given anew at each launch: these or others like
                them.
            arguments: Those that follow and are no constants.
            constants: The others, and options of Triton's, always in one order; a dtype is torch's.
        """
        driver = triton.runtime.driver.active
        device = driver.get_current_device()
        findings = tuple([_kind(one) for one in arguments if isinstance(one, Findings)])
        key = (device, *findings, *constants.values())
        found = self._compiled.get(key)
        name = self.function.__name__
        known = name, device, driver.get_current_stream
        if found is None:
            given = {name: _in_triton(value) for name, value in constants.items()} | OPTIONS
            given["num_warps"] = _warps(given["num_warps"])
            compiled = self._compile(programs, (*leading, *arguments), given)
            if compiled is None:
                # Triton's interpreter knows no streams.
                interpreted = self.function[(programs,)]
                return Launch(*known, lambda *a, stream: interpreted(*a, **given), arguments)
            names = self.function.arg_names[len(leading) + len(arguments) :]
            found = self._compiled[key] = compiled, tuple([given[name] for name in names])
        compiled, values = found
        return Launch(*known, _runner(compiled, programs), (*arguments, *values))

    def _compile(
        self, programs: int, arguments: tuple[Tensor | int | Findings, ...], given: dict[str, Any]
    ) -> Any:
        """Return what Triton compiles, loaded on the GPU; None under its interpreter.

        Threads that come at once wait for the first of them. Nothing is launched while the lock is
        held, since a launch may have to wait for other threads' work on the GPU.
        """
        alike = [_unaligned(one) if isinstance(one, Findings) else one for one in arguments]
        with _compiling:
            compiled = self.function.warmup(*alike, grid=(programs,), **given)
        # Under triton.AsyncCompileMode it is a future. Awaited without the lock, for which the
        # thread that compiles may be waiting.
        if hasattr(compiled, "result"):
            compiled = compiled.result()
        if compiled is not None:
            with _compiling:
                # Loads it on the GPU.
                compiled[programs, 1, 1]
        return compiled


def _runner(compiled: Any, programs: int) -> Callable[..., None]:
    """Return what starts so many programs, as `compiled[programs, 1, 1]` does.

    That describes each launch to Triton's launch hooks, of which there mostly are none: this takes
    some 1.1 us less then (bench/NOTES.md).
    """
    knobs, told = triton.knobs, compiled[programs, 1, 1]
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata

    def start(*arguments: Any, stream: int) -> None:
        enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        # Each is a chain, which may be empty, or what somebody has assigned: None or a function.
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            told(*arguments, stream=stream)
        else:
            run(programs, 1, 1, stream, function, metadata, None, None, None, *arguments)

    return start


def _warps(count: int) -> int:
    """Return how many warps of this GPU have the threads of so many of 32: AMD's may have 64."""
    width: int = triton.runtime.driver.active.get_current_target().warp_size
    return max(1, count * 32 // width)


def _kind(findings: Findings) -> tuple[torch.dtype | None, ...]:
    return tuple([None if one is None else one.dtype for one in findings])


def _unaligned(findings: Findings) -> Findings:
    """Return unaligned tensors of the same dtypes: Triton always specialises on what is in a tuple.

    Code that is compiled for an unaligned address is right for every address.
    """
    dtypes = _kind(findings)
    made = [None if one is None else torch.empty(2, dtype=one, device="cpu")[1:] for one in dtypes]
    return Findings(*made)


def _in_triton(value: Hashable) -> Any:
    """Return a constant as Triton takes it: a dtype of torch's becomes Triton's of that name."""
    if isinstance(value, torch.dtype):
        return getattr(tl, str(value).removeprefix("torch."))
    return value


# What kernels call to compute with their constants while they are compiled.
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


def elsewhere(tensor: Tensor) -> AbstractContextManager[Any] | None:
    """Return what makes the tensor's device current, where it is not: Triton launches there."""
    if not tensor.is_cuda or (device := tensor.get_device()) == torch.cuda.current_device():
        return None
    return torch.cuda.device(device)


def nothing(*_: float) -> None:
    """Stand for a launch where there is no element."""


def float_bits(value: float) -> int:
    """Return the bits of a float64 as a signed integer: Triton would pass a float as float32."""
    bits: int = _INT64.unpack(_DOUBLE.pack(value))[0]
    return bits


def scalar_of(value: float | Tensor, out: Tensor) -> tuple[int, torch.dtype | None]:
    """Return a scalar as `float_of` of kernels/gpu/tiles.py takes it: bits, or address and dtype.

    A tensor on another device than `out` is read here, for which the host waits.
    """
    if isinstance(value, Tensor) and value.device == out.device:
        return value.data_ptr(), value.dtype
    return float_bits(float(value)), None


def with_scalars(bind: Callable[..., Launch], count: int, out: Tensor) -> Callable[..., None]:
    """Return what launches with `count` scalars, bound once for each kind of them.

    bind: Binds the launch for the dtype of each scalar that is a tensor; None for a float.
    """
    launches = {(None,) * count: bind(*(None,) * count)}

    def run(*scalars: float | Tensor) -> None:
        bits, kinds = zip(*[scalar_of(one, out) for one in scalars], strict=True)
        if kinds not in launches:
            with elsewhere(out) or contextlib.nullcontext():
                launches[kinds] = bind(*kinds)
        launches[kinds](*bits)

    return run


def bits_of_two(first: float, second: float) -> tuple[int, int]:
    """Return `float_bits` of both, in half the time."""
    both: tuple[int, int] = _INT64S.unpack(_DOUBLES.pack(first, second))
    return both


def power_of_two_above(value: int) -> int:
    """Return the smallest power of two that is not below `value`."""
    return 1 << max(0, value - 1).bit_length()


@functools.lru_cache
def block_of(numel: int, itemsize: int, most: int = 16384) -> tuple[int, int]:
    """Return (elements a tile, warps) of an elementwise kernel, from size and dtype alone.

    128 threads with up to `most` bytes in 16-byte accesses, by default eight each; less for small
    inputs, to use more cores.
    """
    nbytes = numel * itemsize
    tile_bytes = min(most, max(2048, power_of_two_above(nbytes // 256)))
    return tile_bytes // itemsize, 4


class Chip(NamedTuple):
    """What launchers ask of a GPU.

    Attributes:
        multiprocessors: How many it has.
        cache: Bytes of L2.
        dependent_launch: Whether a kernel may be launched while the one ahead of it on the stream
            ends, and wait for that itself, also in a CUDA graph.
        capability: Its compute capability times ten, of NVIDIA's; else 0.
    """

    multiprocessors: int
    cache: int
    dependent_launch: bool = False
    capability: int = 0


@functools.cache
def chip_of(device: torch.device) -> Chip:
    """Return what launchers ask of this GPU."""
    properties = torch.cuda.get_device_properties(device)
    nvidia = torch.version.hip is None
    able = nvidia and properties.major >= 9 and not triton.knobs.runtime.interpret
    return Chip(
        properties.multi_processor_count,
        properties.L2_cache_size,
        # CUDA 12.3 gave graphs the edges that such launches need.
        able and _driver_version() >= 12030,
        10 * properties.major + properties.minor if nvidia else 0,
    )


def _driver_version() -> int:
    """Return the CUDA version of NVIDIA's driver, 12030 for 12.3; 0 where there is none."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return 0
    return version.value
