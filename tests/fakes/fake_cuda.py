"""A stand-in for the part of `torch.cuda` that a transport uses: GPU memory is the CPU's.

Streams are threads that run late, so a missing event shows as wrong data. In a capture nothing may
wait on the host, and all streams must join again. It cannot show that CUDA does as modelled here.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

_Op = Callable[[], None]


class Broken(AssertionError):
    """A rule of NCCL's or CUDA's was broken."""


class Lines(dict[Any, "queue.SimpleQueue[Any]"]):
    """A queue for each key.

    A defaultdict may make two for one key where two threads ask at once, and what one of them puts
    into the first never arrives.
    """

    def __missing__(self, key: Any) -> queue.SimpleQueue[Any]:
        return self.setdefault(key, queue.SimpleQueue())


class DeviceTensor(torch.Tensor):
    """A CPU tensor that says it is on a GPU and notes the streams it is kept for."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)

    def record_stream(self, stream: FakeStream) -> None:  # type: ignore[override]
        stream.kept[self.data_ptr()] = self


def device_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, on the pretended GPU."""
    return tensor.as_subclass(DeviceTensor)


def full(numel: int, value: float) -> torch.Tensor:
    """`numel` times `value`, on the pretended GPU."""
    return device_tensor(torch.full((numel,), value))


class FakeStream:
    """Runs what is put on it in order, in a thread of its own; while captured, into a graph."""

    device = torch.device("cuda", 0)
    _handles = itertools.count(1)
    by_handle: ClassVar[dict[int, FakeStream]] = {}

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.priority, self.cuda_stream = priority, next(self._handles)
        self.by_handle[self.cuda_stream] = self
        self.capture: FakeGraph | None = None
        # By address. Held, as torch's allocator holds memory until the stream is done with it.
        self.kept: dict[int, torch.Tensor] = {}
        self._work: queue.SimpleQueue[_Op | None] = queue.SimpleQueue()
        threading.Thread(target=self._loop, daemon=True).start()

    def _loop(self) -> None:
        while (op := self._work.get()) is not None:
            op()

    @classmethod
    def stop_all(cls) -> None:
        """End the threads of all streams so far."""
        while cls.by_handle:
            cls.by_handle.popitem()[1]._work.put(None)

    def put(self, op: _Op) -> None:
        if self.capture is not None:
            self.capture.add(self, op)
        else:
            self._work.put(op)

    def wait_event(self, event: FakeEvent) -> None:
        if event.capture is not None:
            event.capture.join(self, event)
        elif self.capture is not None:
            raise Broken("a captured stream waits for an event from outside the capture")
        else:
            self._work.put(event.wait)

    def wait_stream(self, other: FakeStream) -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> FakeEvent:
        event = FakeEvent()
        event.record(self)
        return event

    def query(self) -> bool:
        return self.record_event()._done.wait(0.05)

    def synchronize(self) -> None:
        self.record_event().synchronize()


class FakeEvent:
    def __init__(self) -> None:
        self._done = threading.Event()
        self.capture: FakeGraph | None = None
        # How far each captured stream is behind which the event comes.
        self.behind: dict[FakeStream, int] = {}

    def record(self, stream: FakeStream) -> None:
        self.capture = stream.capture
        if self.capture is not None:
            self.behind = self.capture.behind(stream)
        else:
            stream.put(self._done.set)

    def query(self) -> bool:
        if threading.get_ident() in FakeGraph.under_way:
            raise Broken("an event was queried while a stream is captured")
        return self._done.is_set()

    def wait(self) -> None:
        self._done.wait()

    def synchronize(self) -> None:
        if threading.get_ident() in FakeGraph.under_way:
            raise Broken("an event was waited for while a stream is captured")
        if not self._done.wait(30.0):
            raise Broken("an event never came")


class FakeGraph:
    """What a rank's captured streams were given; one order that satisfies all its events."""

    under_way: ClassVar[set[int]] = set()  # threads that capture

    def __init__(self, origin: FakeStream) -> None:
        self.origin = origin
        self.counts: dict[FakeStream, int] = defaultdict(int)
        # Called when the graph is gone.
        self.freed: list[_Op] = []
        self._joined: dict[FakeStream, dict[FakeStream, int]] = defaultdict(dict)
        self._ops: list[_Op] = []
        origin.capture = self
        FakeGraph.under_way.add(threading.get_ident())

    def add(self, stream: FakeStream, op: _Op) -> None:
        self.counts[stream] += 1
        self._ops.append(op)

    def join(self, stream: FakeStream, event: FakeEvent) -> None:
        stream.capture = self
        joined = self._joined[stream]
        joined.update({each: max(n, joined.get(each, 0)) for each, n in event.behind.items()})

    def behind(self, stream: FakeStream) -> dict[FakeStream, int]:
        """What is put on the stream now comes behind so many operations of each."""
        return {**self._joined[stream], stream: self.counts[stream]}

    def end(self) -> None:
        FakeGraph.under_way.remove(threading.get_ident())
        self.origin.capture = None
        for stream in self._joined:
            stream.capture = None
        for stream, count in self.counts.items():
            if stream is not self.origin and self._joined[self.origin].get(stream) != count:
                raise Broken("a captured stream never joined the one the capture began on")

    def free(self) -> None:
        while self.freed:
            self.freed.pop()()

    def replay(self, stream: FakeStream | None = None) -> None:
        for op in self._ops:
            (stream or self.origin).put(op)


class FakeCudaGraph:
    """torch's CUDAGraph."""

    _names = itertools.count(1)

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._graph: FakeGraph | None = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        if capture_error_mode != "thread_local":
            raise Broken("other threads may not go on while this one captures")
        self._pool = pool or (0, next(self._names))
        self._graph = FakeGraph(self._cuda.current_stream())

    def capture_end(self) -> None:
        assert self._graph is not None
        try:
            self._graph.end()
        except Broken as error:
            raise RuntimeError("CUDA error: capturing stream has unjoined work") from error

    def pool(self) -> Any:
        return self._pool

    def replay(self) -> None:
        assert self._graph is not None
        self._graph.replay(self._cuda.current_stream())

    def reset(self) -> None:
        if self._graph is not None:
            self._graph.free()
            self._graph = None

    def __del__(self) -> None:
        self.reset()


class FakeCuda:
    """The part of `torch.cuda` that the transport uses; every thread has a current stream."""

    Stream = FakeStream
    Event = FakeEvent

    def __init__(self, *, available: bool = True) -> None:
        self._thread = threading.local()
        self._available = available

    def CUDAGraph(self) -> FakeCudaGraph:
        return FakeCudaGraph(self)

    def is_available(self) -> bool:
        return self._available

    def current_device(self) -> int:
        return 0

    def synchronize(self, device: torch.device) -> None:
        self.current_stream().synchronize()

    def set_device(self, device: torch.device) -> None:
        self._thread.device = device

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        yield

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._thread.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._thread.stream = before

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy made on the current stream, after all that was put there."""
        copy = torch.zeros(tensor.shape, dtype=tensor.dtype)
        self.current_stream().put(lambda: copy.copy_(tensor.as_subclass(torch.Tensor)))
        self.current_stream().synchronize()
        return copy

    def current_stream(self, device: Any = None) -> FakeStream:
        if not hasattr(self._thread, "stream"):
            self._thread.stream = FakeStream()
        return self._thread.stream

    def is_current_stream_capturing(self) -> bool:
        return self.current_stream().capture is not None
