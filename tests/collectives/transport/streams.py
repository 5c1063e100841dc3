"""CUDA streams on paper: every access to the pretended GPU's memory, and what it is ordered behind.

What it is good for: the group, its communication thread, the executor and the NCCL transport run
as they are, on CPU memory, and each read and write is noted with the stream that it was put on. Two
accesses of one place, one of them a write, must be ordered by events (or by the host's waiting for
one), and memory that is given back must be done with, as far as the allocator can know: on the
stream it was allocated on, and on those it was recorded for. What breaks this is a race even where
no run of a GPU ever shows it. So the answers are right here at all events; `races` is what counts.

What it cannot show: accesses that the kernels make beside what their arguments say, CUDA graphs.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch

DEVICE = torch.device("cuda", 0)
_Clock = dict["Stream", int]


class _Access:
    def __init__(self, place: tuple[int, int], writes: bool, stream: Stream, what: str) -> None:
        self.low, self.high = place
        self.writes = writes
        self.stream = stream
        self.time = stream.time
        self.what = what

    def before(self, clock: _Clock) -> bool:
        return self.time <= clock.get(self.stream, 0)


class _Block:
    """Memory of one allocation. Its storage is kept, so that no address is used twice."""

    def __init__(self, storage: torch.UntypedStorage, stream: Stream) -> None:
        self.storage = storage
        self.stream = stream
        self.recorded: set[Stream] = set()
        self.accesses: list[_Access] = []
        self.live = True

    def used(self) -> bool:
        return torch._C._storage_Use_Count(self.storage._cdata) > 1


class Machine:
    """Streams, memory and the host, whose threads know all that any of them waited for."""

    def __init__(self) -> None:
        self.races: list[str] = []
        self._blocks: dict[int, _Block] = {}
        self._host: _Clock = {}
        self._lock = threading.RLock()
        self.thread = threading.local()
        self.capturing = False

    def current(self) -> Stream:
        """The calling thread's; one of its own unless it has set another, as if no caller used the
        default stream, which orders much by itself."""
        if not hasattr(self.thread, "stream"):
            self.thread.stream = Stream()
        return self.thread.stream

    def allocated(self, tensor: torch.Tensor) -> None:
        with self._lock:
            self.collect()
            storage = torch.Tensor.untyped_storage(tensor)
            self._blocks[storage._cdata] = _Block(storage, self.current())

    def access(
        self,
        what: str,
        stream: Stream,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:
        with self._lock:
            stream.join(self._host)
            stream.time += 1
            stream.clock[stream] = stream.time
            for tensors, written in ((reads, False), (writes, True)):
                for tensor in tensors:
                    self._touch(tensor, _Access(_place(tensor), written, stream, what))

    def _touch(self, tensor: torch.Tensor, new: _Access) -> None:
        block = self._blocks[tensor.untyped_storage()._cdata]
        for old in block.accesses:
            together = old.low < new.high and new.low < old.high and (old.writes or new.writes)
            if together and not old.before(new.stream.clock):
                self.races.append(f"{new.what} beside {old.what}")
        block.accesses.append(new)

    def record(self, tensor: torch.Tensor, stream: Stream) -> None:
        with self._lock:
            self._blocks[tensor.untyped_storage()._cdata].recorded.add(stream)

    def learn(self, clock: _Clock) -> None:
        with self._lock:
            _join(self._host, clock)

    def synchronize(self) -> None:
        """The host waits for all streams: here those of all ranks."""
        with self._lock:
            for stream in [*Stream.by_handle.values()]:
                _join(self._host, stream.clock)

    def collect(self) -> None:
        """What is no longer used goes back to the stream that it was allocated on."""
        with self._lock:
            for block in self._blocks.values():
                if block.live and not block.used():
                    block.live = False
                    known = {**block.stream.clock}
                    _join(known, self._host)
                    for old in block.accesses:
                        if not old.before(known) and old.stream not in block.recorded:
                            self.races.append(f"memory given back beside {old.what}")


def _join(mine: _Clock, other: _Clock) -> None:
    # A copy: a thread of another rank may add to it meanwhile.
    for stream, time in other.copy().items():
        mine[stream] = max(time, mine.get(stream, 0))


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    return start, start + tensor.numel() * tensor.element_size()


machine = Machine()


class Stream:
    _handles = itertools.count(1)
    by_handle: ClassVar[dict[int, Stream]] = {}

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.cuda_stream = next(self._handles)
        self.by_handle[self.cuda_stream] = self
        self.device = DEVICE
        self.time = 0
        self.clock: _Clock = {}

    def join(self, clock: _Clock) -> None:
        _join(self.clock, clock)

    def wait_event(self, event: Event) -> None:
        self.join(event.clock)

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event


class Event:
    def __init__(self) -> None:
        self.clock: _Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict((stream or machine.current()).clock)

    def query(self) -> bool:
        machine.learn(self.clock)
        return True


@contextmanager
def _stream(stream: Stream | None) -> Iterator[None]:
    before = getattr(machine.thread, "stream", None)
    if stream is not None:
        machine.thread.stream = stream
    try:
        yield
    finally:
        machine.thread.stream = before or machine.current()


class GpuTensor(torch.Tensor):
    """A CPU tensor that says it is on a GPU; every torch function on it is noted."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE

    is_cuda = True  # type: ignore[assignment]
    is_cpu = False  # type: ignore[assignment]

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        machine.record(plain(self), stream)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {k: v for k, v in (kwargs or {}).items() if k != "device"}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            return _noted(func.__name__, args, kwargs, result)


def _noted(name: str, args: Any, kwargs: dict[str, Any], result: Any) -> Any:
    ours = [plain(t) for t in _tensors((args, kwargs)) if isinstance(t, GpuTensor)]
    memory = {t.untyped_storage()._cdata for t in ours}
    made = _tensors(result)
    new = [t for t in made if t.untyped_storage()._cdata not in memory]
    in_place = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    in_place = in_place or name.startswith("__i") or "out" in kwargs
    for tensor in new:
        machine.allocated(tensor)
    if new or in_place:
        out = _tensors(kwargs.get("out", ())) or (_tensors(args[0]) if in_place else [])
        gpus = [plain(tensor) for tensor in out if isinstance(tensor, GpuTensor)]
        machine.access(name, machine.current(), ours, [*gpus, *new])
        if len(gpus) < len(out):
            # A copy to the host, which waits for it.
            machine.learn(machine.current().clock)
    if isinstance(result, tuple | list):
        return type(result)(_gpu(each) for each in result)
    return _gpu(result)


def _gpu(value: Any) -> Any:
    return value.as_subclass(GpuTensor) if isinstance(value, torch.Tensor) else value


def plain(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, tuple | list):
        return []
    return [tensor for value in values for tensor in _tensors(value)]


def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the pretended GPU, written on the current stream."""
    copy = tensor.clone()
    machine.allocated(copy)
    machine.access("a copy to the GPU", machine.current(), [], [copy])
    return _gpu(copy)


def _factory(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("pin_memory", None)
        if device is None or torch.device(device).type != "cuda":
            return real(*args, device=device, **kwargs)
        made = real(*args, **kwargs)
        machine.allocated(made)
        return _gpu(made)

    return make


def _kernel(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, out: Any = None, **kwargs: Any) -> Any:
        given = _tensors((args, kwargs, out))
        if not any(isinstance(tensor, GpuTensor) for tensor in given):
            return real(*args, **kwargs, **({} if out is None else {"out": out}))
        inner = {} if out is None else {"out": plain(out)}
        with torch._C.DisableTorchFunctionSubclass():
            result = real(*_plain(args), **_plain(kwargs), **inner)
        written = _tensors(args[1]) if name == "unpack" else [result]
        if name != "unpack" and out is None:
            machine.allocated(result)
        machine.access(name, machine.current(), _plain(given), _plain(written))
        return _gpu(result)

    return run


def _plain(values: Any) -> Any:
    if isinstance(values, torch.Tensor):
        return plain(values)
    if isinstance(values, dict):
        return {key: _plain(value) for key, value in values.items()}
    return type(values)(map(_plain, values)) if isinstance(values, tuple | list) else values


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put all this in the place of torch.cuda, NCCL and the kernels, with nothing noted yet."""
    import kernels
    from collectives.execution import vectors

    machine.__init__()  # type: ignore[misc]
    cuda = torch.cuda
    fakes: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "stream": _stream,
        "device": lambda device: _stream(None),
        "is_available": lambda: True,
        "synchronize": lambda device=None: machine.synchronize(),
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "current_stream": lambda device=None: machine.current(),
        "is_current_stream_capturing": lambda: machine.capturing,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(cuda, name, fake)
    for name in ("range_push", "range_pop"):
        monkeypatch.setattr(cuda.nvtx, name, lambda *_: None)
    for name in ("empty", "zeros", "ones", "full"):
        monkeypatch.setattr(torch, name, _factory(getattr(torch, name)))
    pairs, at_once = ("dot_and_norms", "combine", "adasum"), ("gram", "weighted_sum")
    for name in ("sum_n", *pairs, *at_once, "adasum_coefficients", "pack", "unpack"):
        monkeypatch.setattr(kernels, name, _kernel(name, getattr(kernels, name)))
    # It reads no memory, but takes no subclass either.
    layout_of = kernels.layout_of
    monkeypatch.setattr(
        kernels, "layout_of", lambda tensors, **options: layout_of(_plain(tensors), **options)
    )
    # A tensor on a GPU is a plain one.
    monkeypatch.setattr(vectors, "as_plain", lambda tensor: tensor)
