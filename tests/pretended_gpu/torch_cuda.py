"""torch's CPU build with a GPU: CUDA tensors in the pretended device's memory.

`torch.cuda` is torch's own Python on top of what its C part would be. A CUDA tensor is one of
torch's, on `cuda:0`, whose memory happens to be the host's: every operation on it falls back to the
CPU's on the same memory. Names that torch 2.11 lacks are taken away.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_map

from tests.pretended_gpu import build
from tests.pretended_gpu.device import ATTRIBUTES, CYCLES, MEMORY, NAME, STEP, Device

_CPU, _CUDA = 1, 2  # DLPack's numbers
_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_state = threading.local()
_libraries: list[torch.library.Library] = []


def _moved(tensor: torch.Tensor, kind: int) -> torch.Tensor:
    """Return a tensor of the same memory that says it is on the CPU, or on the GPU."""
    capsule = torch._C._to_dlpack(tensor.detach())
    # DLTensor: the address, then the device's kind and number.
    at = _pointer(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p)
    (ctypes.c_int32 * 2).from_address(at)[:] = [kind, 0]
    return torch._C._from_dlpack(capsule)


def host(value: Any) -> Any:
    """Return what a CUDA tensor, or device, is for the CPU; anything else as it is."""
    if isinstance(value, torch.Tensor) and value.is_cuda:
        return _moved(value, _CPU)
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return value


class Tensors:
    """Operations on CUDA tensors."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def install(self) -> None:
        every, own = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
        every.fallback(self._run, "CUDA")
        # torch has one for all devices, which asks each for what it is made of.
        own.impl("copy_", self._copy, "CUDA")
        _libraries.extend((every, own))

    def upload(self, tensor: torch.Tensor, copy: bool = True) -> torch.Tensor:
        """Return a copy in the device's memory; without `copy`, what floats read as NaN."""
        extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        size = extent * tensor.element_size() if tensor.numel() else 0
        memory = self._device.allocate(max(size, 1))
        flat = torch.frombuffer(memory, dtype=torch.uint8)[:size].view(tensor.dtype)
        found = flat.as_strided(tensor.shape, tensor.stride())
        return _moved(found.copy_(tensor) if copy else found, _CUDA)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy in memory that the host and the device reach."""
        found: torch.Tensor = host(self.upload(tensor))
        return found

    def _copy(self, target: Any, source: Any, non_blocking: bool = False) -> Any:
        to, what = host(target), host(source)
        self._device.put(lambda: to.copy_(what))
        return target

    def _run(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        results = op._schema.returns
        writes = any(one.alias_info is not None and one.alias_info.is_write for one in results)
        views = any(one.alias_info is not None for one in results) and not writes
        if views or op.name().startswith("aten::set_"):
            # torch's own code for CPUs keeps the storage, and so the device.
            return op.redispatch(_VIEWS, *args, **kwargs)
        on_host = tree_map(host, (args, kwargs))

        def run() -> Any:
            return op(*on_host[0], **on_host[1])

        if writes or not results:
            return self._write(op, run, args, kwargs)
        if op.name().startswith(("aten::empty", "aten::new_empty")):
            return self.upload(run(), copy=False)
        made = tree_map(self._given, run())
        self._device.put(lambda: None)
        if self._device.graph is not None:
            self._device.put(lambda: tree_map(self._again, made, run()), 0.0)
        return made

    def _write(self, op: Any, run: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """Run what writes into arguments, and return those of them that the schema returns."""
        named = dict(zip((one.name for one in op._schema.arguments), args, strict=False)) | kwargs
        names = [
            one.name
            for one in op._schema.arguments
            if one.alias_info is not None and one.alias_info.is_write and one.name in named
        ]
        written = [named[name] for name in names]
        if any(name in kwargs and kwargs[name].numel() == 0 for name in names):
            # Made to be resized to the result.
            mine = {name: torch.empty(0, dtype=kwargs[name].dtype) for name in names}
            op(*tree_map(host, args), **(tree_map(host, kwargs) | mine))
            for name, value in mine.items():
                kwargs[name].set_(self.upload(value))
        else:
            self._device.put(run)
        count = len(op._schema.returns)
        return None if not count else written[0] if count == 1 else tuple(written[:count])

    def _given(self, value: Any) -> Any:
        return self.upload(value) if isinstance(value, torch.Tensor) else value

    @staticmethod
    def _again(made: Any, value: Any) -> None:
        if isinstance(made, torch.Tensor):
            host(made).copy_(value)


class StreamBase:
    """What torch's `Stream` is made of."""

    owner: ClassVar[Device]
    device = torch.device("cuda", 0)

    def __new__(cls, priority: int = 0, **known: int) -> Any:
        self = super().__new__(cls)
        self.stream_id = self.cuda_stream = known.get("stream_id", next(cls.owner.handles))
        self.device_index, self.device_type, self.priority = 0, 1, priority
        return self

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StreamBase) and other.cuda_stream == self.cuda_stream

    def __hash__(self) -> int:
        return self.cuda_stream

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _refuse_in_capture(StreamBase.owner)


class EventBase:
    """What torch's `Event` is made of."""

    def __new__(cls, **options: bool) -> Any:
        self = super().__new__(cls)
        self._timing, self._at, self.cuda_event = options["enable_timing"], None, 1
        return self

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, stream: Any) -> None:
        def note() -> None:
            self._at = StreamBase.owner.clock

        StreamBase.owner.put(note, 0.0)

    def wait(self, stream: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _refuse_in_capture(StreamBase.owner)

    def elapsed_time(self, other: EventBase) -> float:
        if not (self._timing and other._timing) or self._at is None or other._at is None:
            raise RuntimeError("CUDA error: invalid resource handle")
        return (other._at - self._at) * 1e3


class GraphBase:
    """What torch's `CUDAGraph` is made of."""

    def __new__(cls, keep_graph: bool = False) -> Any:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        StreamBase.owner.begin_capture()

    def capture_end(self) -> None:
        self._graph = StreamBase.owner.end_capture()

    def replay(self) -> None:
        StreamBase.owner.replay(self._graph)

    def reset(self) -> None:
        del self._graph


def _refuse_in_capture(device: Device) -> None:
    if device.graph is not None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


def _current(device_index: int = 0) -> tuple[int, int, int]:
    return getattr(_state, "stream", 0), 0, 1


def install() -> Device:
    """Give this process its GPU, for good; return the device."""
    device = Device()
    ctypes.CDLL(str(build.guard()))
    StreamBase.owner = device
    _install_primitives(device)
    tensors = Tensors(device)
    tensors.install()
    torch.Tensor.pin_memory = lambda tensor, device=None: tensors.pin(tensor)
    torch.Generator = _Generator
    os.environ["TRITON_LIBCUDA_PATH"] = str(build.libcuda().parent)
    from triton import knobs

    knobs.runtime.kernel_load_end_hook.add(device.loaded)
    return device


def _install_primitives(device: Device) -> None:
    def synchronize() -> None:
        _refuse_in_capture(device)

    def sleep(cycles: int) -> None:
        device.put(lambda: None, STEP + cycles / CYCLES)

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        _state.stream = stream_id

    properties = SimpleNamespace(
        name=NAME,
        major=ATTRIBUTES[75],
        minor=ATTRIBUTES[76],
        total_memory=MEMORY,
        multi_processor_count=ATTRIBUTES[16],
        L2_cache_size=ATTRIBUTES[38],
        warp_size=32,
        max_threads_per_multi_processor=2048,
        is_integrated=0,
        regs_per_multiprocessor=65536,
        shared_memory_per_multiprocessor=ATTRIBUTES[81],
        shared_memory_per_block_optin=ATTRIBUTES[97],
        shared_memory_per_block=49152,
    )
    primitives: dict[str, Any] = {
        "_has_cuda": True,
        "_CudaStreamBase": StreamBase,
        "_CudaEventBase": EventBase,
        "_CUDAGraph": GraphBase,
        "_cuda_CUDAAllocator_AllocatorState": object,
        "_cuda_init": lambda: None,
        "_cuda_getDeviceCount": lambda: 1,
        "_cuda_getDevice": lambda: 0,
        "_cuda_setDevice": lambda index: None,
        "_cuda_exchangeDevice": lambda index: 0,
        "_cuda_maybeExchangeDevice": lambda index: 0,
        "_cuda_synchronize": synchronize,
        "_cuda_sleep": sleep,
        "_cuda_getCurrentStream": _current,
        "_cuda_getDefaultStream": lambda index: (0, 0, 1),
        "_cuda_getCurrentRawStream": lambda index: _current()[0],
        "_cuda_setStream": set_stream,
        "_cuda_isCurrentStreamCapturing": lambda: device.graph is not None,
        "_cuda_emptyCache": lambda: None,
        "_cuda_isInBadFork": lambda: False,
        "_host_emptyCache": lambda: None,
        "_nccl_version": lambda: 2 << 32 | 30 << 16 | 7,
    }
    for name, value in primitives.items():
        setattr(torch._C, name, value)
    for name in ("streams", "graphs"):
        again = importlib.reload(importlib.import_module(f"torch.cuda.{name}"))
        for public in ("Stream", "Event", "ExternalStream", *getattr(again, "__all__", ())):
            if hasattr(again, public):
                setattr(torch.cuda, public, getattr(again, public))
    torch.cuda._cudart = object()
    torch.cuda._exchange_device = primitives["_cuda_exchangeDevice"]
    torch.cuda._maybe_exchange_device = primitives["_cuda_maybeExchangeDevice"]
    torch.cuda._get_device_properties = lambda index: properties
    torch.cuda._queued_calls.clear()
    ranges = SimpleNamespace(rangePushA=lambda name: 0, rangePop=lambda: 0, markA=lambda name: None)
    torch.cuda.nvtx._nvtx = ranges
    torch.cuda.mem_get_info = lambda device=None: (MEMORY, MEMORY)
    torch.version.cuda = "13.0"
    torch.Tensor.record_stream = lambda tensor, stream: None
    torch.cuda.init()


class _Generator(torch.Generator):
    """The CPU's, on whichever device it is asked for."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, "cpu")
