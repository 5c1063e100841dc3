"""A stand-in for torch.distributed's NCCL, on streams that run late: no GPU needed."""

from __future__ import annotations

import queue
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from collectives.transport import NcclTransport, ThreadWorld
from collectives.transport.nccl import backend, transport, watcher
from tests.fakes.fake_cuda import FakeCuda, FakeEvent, FakeStream, Lines, full

TIMEOUT = 0.3


class FakeTorch:
    """What all ranks' NCCL of torch's has in common: messages on a stream of torch's own, in order.

    A stream that waits for a rank waits until it comes or the communicator is aborted.
    """

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.refuse = ""
        self.aborted: set[int] = set()
        self.connected: list[int] = []
        self.closed: list[int] = []
        self.lines = Lines()
        self.streams: dict[int, FakeStream] = defaultdict(FakeStream)

    def put(self, rank: int, ops: list[Callable[[], None]]) -> FakeWork:
        """Behind what is on the current stream."""
        stream, before = self.streams[rank], FakeEvent()
        before.record(self.cuda.current_stream())
        stream.wait_event(before)
        for op in ops:
            stream.put(op)
        after = FakeEvent()
        after.record(stream)
        return FakeWork(self, after)


class FakeWork:
    def __init__(self, torch_: FakeTorch, after: FakeEvent) -> None:
        self._torch, self._after = torch_, after

    def wait(self, timeout: timedelta | None = None) -> bool:
        assert timeout is None, "torch's watchdog ends the process after such a wait has failed"
        self._torch.cuda.current_stream().wait_event(self._after)
        return True


class FakeGroup:
    """A process group, and the NCCL in it: `dist.ProcessGroupNCCL`."""

    _device_types = (torch.device("cpu"), torch.device("cuda"))

    def __init__(self, torch_: FakeTorch, rank: int) -> None:
        self.torch, self.rank = torch_, rank
        self.options = SimpleNamespace(_timeout=timedelta(seconds=30))
        self._sends: list[Callable[[], None]] | None = None
        self._recvs: list[Callable[[], None]] = []

    def allreduce(self, tensors: list[torch.Tensor]) -> FakeWork:
        """Of zeros what connects all ranks; of others a sum that a rank never joins."""
        if tensors[0].any():
            return self.torch.put(self.rank, [self._until_aborted])
        assert not self.torch.cuda.is_current_stream_capturing()
        self.torch.connected.append(self.rank)
        return self.torch.put(self.rank, [])

    def _until_aborted(self) -> None:
        while self.rank not in self.torch.aborted:
            time.sleep(0.01)

    def _start_coalescing(self) -> None:
        assert self._sends is None
        self._sends, self._recvs = [], []

    def _end_coalescing(self) -> FakeWork:
        assert self._sends is not None
        # As in a group of NCCL's, none waits for another.
        ops, self._sends = [*self._sends, *self._recvs], None
        assert self.rank in self.torch.connected, "torch would wait here for ranks without messages"
        return self.torch.put(self.rank, ops)

    def _plain(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.torch.refuse:
            raise RuntimeError(self.torch.refuse)
        # As torch 2.11 does where a message is put on a stream.
        if tensor.dtype in (torch.int16, torch.uint16, torch.uint32, torch.uint64):
            raise TypeError(f"data type is not supported for NCCL process group: {tensor.dtype}")
        return tensor.as_subclass(torch.Tensor)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        plain, lines = self._plain(tensors[0]), self.torch.lines
        assert self._sends is not None
        self._sends.append(lambda: lines[self.rank, peer].put(plain.clone()))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        plain = self._plain(tensors[0])

        def receive() -> None:
            while self.rank not in self.torch.aborted:
                try:
                    plain.copy_(self.torch.lines[peer, self.rank].get(timeout=0.01))
                    return
                except queue.Empty:
                    continue

        self._recvs.append(receive)

    def _get_backend(self, device: torch.device) -> FakeGroup:
        return self

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.options._timeout = timeout

    def abort(self) -> None:
        self.torch.aborted.add(self.rank)

    def shutdown(self) -> None:
        self.torch.closed.append(self.rank)


def make_fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTorch]:
    """For a fixture: the stand-ins in the place of CUDA and torch's NCCL."""
    cuda = FakeCuda()
    found = FakeTorch(cuda)
    for module in (transport, backend):
        monkeypatch.setattr(module, "cuda", cuda)
    monkeypatch.setattr(watcher, "CHECK_SECONDS", 0.05)
    monkeypatch.setattr(watcher, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(backend, "own_nccl", lambda group, timeout: group)
    zeros = SimpleNamespace(zeros=lambda numel, device: full(3, 0.0))
    monkeypatch.setattr(backend, "torch", zeros, raising=False)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", FakeGroup, raising=False)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    yield found
    found.aborted.update(range(9))
    FakeStream.stop_all()


def of(fake: FakeTorch, rank: int) -> NcclTransport:
    """Over a process group, beside what carries CPU tensors: nobody is gone."""
    host = ThreadWorld(9).transport(rank)
    made = backend.TorchBackend(FakeGroup(fake, rank))  # type: ignore[arg-type]
    return NcclTransport(host, made, timeout=TIMEOUT)
