"""What all launchers share: Triton if there is one, the choice of path, tables in device memory."""

from __future__ import annotations

import functools
import importlib
import inspect
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

try:
    triton: Any = importlib.import_module("triton")
    tl: Any = importlib.import_module("triton.language")
except ImportError:
    # CPU tensors need no Triton, and some platforms have none.
    triton = tl = None

# True while tests run the compiled kernels on CPU tensors: tests/ptx_emulator.
_emulated = False
_NOTHING = nullcontext()
# Held by the thread that compiles a kernel, in which Triton's hooks, a signal's handler or what is
# collected meanwhile may launch another one.
_compiling = threading.RLock()
_DOUBLE, _INT64 = struct.Struct("<d"), struct.Struct("<q")

# Of every kernel. Sums of products need more registers without it, and Triton's default is about to
# change; the others' code is the same.
OPTIONS = {"enable_fp_fusion": True}


# Code that kernels call.
jit: Any = triton.jit if triton else lambda fn: fn


class Kernel:
    """A kernel to launch: `@Kernel` in the place of `@triton.jit`.

    Its compiled code follows from constants and device alone, which must tell the dtypes of its
    pointers too: alignment is nothing to Triton (kernels test it, or a constant tells it), and an
    integer is as wide as its annotation says. So no number of elements and no scale compiles anew,
    and `launch` finds the code by the constants, where Triton would look at every argument again
    each time. Triton's knobs for compiling count at the first launch of each variant, its launch
    hooks always.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.function: Any = fn
        self._compiled: dict[tuple[Hashable, ...], tuple[Any, tuple[Any, ...]]] = {}
        if triton is not None:
            kinds = inspect.signature(fn).parameters.values()
            passed = [kind.name for kind in kinds if "constexpr" not in str(kind.annotation)]
            self.function = triton.jit(fn, do_not_specialize=passed)

    def launch(self, programs: int, *arguments: Tensor | int, **constants: Hashable) -> None:
        """Run so many programs on the current device and stream.

        arguments: those that are no constants, in order. constants: the others, and options of
        Triton's, always in one order; a dtype is torch's.
        """
        driver = triton.runtime.driver.active
        device = driver.get_current_device()
        key = (device, *constants.values())
        found = self._compiled.get(key)
        if found is None:
            given = {name: _in_triton(value) for name, value in constants.items()} | OPTIONS
            compiled = self._compile(programs, arguments, given)
            if compiled is None:
                self.function[(programs,)](*arguments, **given)
                return
            names = self.function.arg_names[len(arguments) :]
            found = self._compiled[key] = compiled, tuple([given[name] for name in names])
        compiled, values = found
        stream = driver.get_current_stream(device)
        compiled[programs, 1, 1](*arguments, *values, stream=stream)

    def _compile(
        self, programs: int, arguments: tuple[Tensor | int, ...], given: dict[str, Any]
    ) -> Any:
        """What Triton compiles, once and ready for launches; None from its interpreter.

        Threads that come together wait for the first of them. Nothing is launched meanwhile, since
        a launch may have to wait for other threads' work on the GPU.
        """
        with _compiling:
            compiled = self.function.warmup(*arguments, grid=(programs,), **given)
        # While triton.AsyncCompileMode is on: what compiles it, maybe behind others in a thread
        # that waits for this lock.
        if hasattr(compiled, "result"):
            compiled = compiled.result()
        if compiled is not None:
            with _compiling:
                # Loads it on the GPU.
                compiled[programs, 1, 1]
        return compiled


def _in_triton(value: Hashable) -> Any:
    """A constant as Triton takes it: a dtype of torch's is one of Triton's by the same name."""
    if isinstance(value, torch.dtype):
        return getattr(tl, str(value).removeprefix("torch."))
    return value


# What kernels call to compute with their constants while they are compiled.
constexpr_function: Any = triton.constexpr_function if triton else lambda fn: fn


def on_triton(tensor: Tensor) -> bool:
    """Whether work on `tensor` goes to Triton; ImportError for a CUDA tensor without Triton."""
    if not tensor.is_cuda:
        return _emulated
    if triton is None:
        raise ImportError("kernels on CUDA tensors need Triton: pip install 'triton>=3.6'")
    return True


def device_guard(tensor: Tensor) -> AbstractContextManager[Any]:
    """Make the tensor's device current: Triton launches on the current one."""
    if not tensor.is_cuda or (device := tensor.get_device()) == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)


def mark_written(tensors: list[Tensor], found_inf: Tensor | None) -> None:
    """Tell autograd that a kernel has written the tensors in place, as torch's own ops do.

    Without it a backward pass that had saved one of them would use the new values in silence.
    """
    # torch leaves those made in inference mode alone, which have no version.
    torch.autograd.graph.increment_version(tensors)
    if found_inf is not None:
        torch.autograd.graph.increment_version([found_inf])


def float_bits(value: float) -> int:
    """The bits of a float64 as a signed integer: Triton would pass a float as float32."""
    return int(_INT64.unpack(_DOUBLE.pack(value))[0])


def power_of_two_above(value: int) -> int:
    """Smallest power of two that is not below `value`."""
    return 1 << max(0, value - 1).bit_length()


@functools.lru_cache
def block_of(numel: int, itemsize: int) -> tuple[int, int]:
    """(elements a tile, warps) of an elementwise kernel, from size and dtype alone.

    128 threads with up to eight 16-byte accesses each; less for small inputs, to use more cores.
    """
    nbytes = numel * itemsize
    tile_bytes = min(16384, max(2048, power_of_two_above(nbytes // 256)))
    return tile_bytes // itemsize, 4


class Chip(NamedTuple):
    """What launchers ask of a GPU. cache: bytes of L2."""

    multiprocessors: int
    cache: int


@functools.cache
def chip_of(device: torch.device) -> Chip:
    """The GPU's."""
    properties = torch.cuda.get_device_properties(device)
    return Chip(properties.multi_processor_count, properties.L2_cache_size)


class DeviceCache:
    """Values in device memory that outlive a call, so that a CUDA graph can replay over them.

    A value made outside graph capture is found again by its key. When a device's part of the cache
    is full, that device is brought to rest and all its values but those a graph has seen are
    dropped.
    """

    def __init__(self, limit: int = 512) -> None:
        self._limit = limit
        self._values: defaultdict[torch.device, dict[Hashable, Any]] = defaultdict(dict)
        self._seen_by_graphs: defaultdict[torch.device, dict[Hashable, Any]] = defaultdict(dict)
        self._made_in_graphs: list[Any] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(map(len, self._values.values()))

    def fetch(
        self, key: Hashable, device: torch.device, make: Callable[[], Any], shared: bool = True
    ) -> Any:
        """The value of `key`, made by `make()` where there is none.

        shared: whether work in a graph may use the value that work outside it uses; scratch
        memory must not be, since the two may run at once.
        """
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        with self._lock:
            values = self._values[device]
            value = values.get(key) if shared or not capturing else None
            if value is None:
                if capturing:
                    value = make()
                    self._made_in_graphs.append(value)
                    return value
                if len(values) >= self._limit:
                    if device.type == "cuda":
                        torch.cuda.synchronize(device)
                    values = self._values[device] = dict(self._seen_by_graphs[device])
                value = values[key] = make()
            if capturing:
                self._seen_by_graphs[device][key] = value
            return value


CACHE = DeviceCache()
_upload_streams: dict[torch.device, torch.cuda.Stream] = {}


def upload(values: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Copy int64 `values` to `device`; returns (device tensor, host tensor), both to be kept.

    Outside graph capture the copy goes through a stream of its own and is complete on return, so
    that every stream may read it and no earlier work is waited for. Inside, it becomes part of the
    graph, which reads the pinned host tensor again at each replay.
    """
    host = torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))
    if device.type != "cuda":
        return host, host
    host = host.pin_memory()
    if torch.cuda.is_current_stream_capturing():
        return host.to(device, non_blocking=True), host
    stream = _upload_streams.get(device)
    if stream is None:
        stream = _upload_streams[device] = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        table = host.to(device, non_blocking=True)
    stream.synchronize()
    return table, host


def address_table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """int64 [n] device tensor of the addresses, uploaded once for each tuple of them."""

    def make() -> tuple[Tensor, Tensor]:
        return upload(np.array(addresses, dtype=np.int64), device)

    return CACHE.fetch(("addresses", device, addresses), device, make)[0]
