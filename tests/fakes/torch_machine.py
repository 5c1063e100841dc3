"""Ranks of the NCCL transport over torch's own NCCL, on fake_torch.py and fake_cuda.py."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from collectives.transport import (
    NcclTransport,
    ThreadWorld,
    Transport,
)
from collectives.transport.nccl import backend, transport, watcher
from tests.fakes.fake_cuda import FakeCuda, FakeStream, device_tensor
from tests.fakes.fake_torch import FakeGroup, FakeTorch

TIMEOUT = 0.3


def make_fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTorch]:
    """For a fixture: the stand-ins in the place of CUDA and torch's NCCL."""
    cuda = FakeCuda()
    found = FakeTorch(cuda)
    for module in (transport, backend):
        monkeypatch.setattr(module, "cuda", cuda)
    monkeypatch.setattr(watcher, "CHECK_SECONDS", 0.05)
    monkeypatch.setattr(watcher, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(backend, "own_nccl", lambda group, timeout: group)
    zeros = SimpleNamespace(zeros=lambda numel, device: full(0.0))
    monkeypatch.setattr(backend, "torch", zeros, raising=False)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", FakeGroup, raising=False)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    yield found
    found.aborted.update(range(9))
    FakeStream.stop_all()


def of(fake: FakeTorch, rank: int, host: Transport | None = None) -> NcclTransport:
    """Over a process group, beside what carries CPU tensors: nobody is gone unless it says so."""
    host = host or ThreadWorld(9).transport(rank)
    made = backend.TorchBackend(FakeGroup(fake, rank))  # type: ignore[arg-type]
    return NcclTransport(host, made, timeout=TIMEOUT)


def full(value: float) -> torch.Tensor:
    return device_tensor(torch.full((3,), value))


def read(fake: FakeTorch, tensor: torch.Tensor) -> torch.Tensor:
    """A copy made on the current stream, after all that was put there."""
    copy = torch.zeros(tensor.shape)
    stream = fake.cuda.current_stream()
    stream.put(lambda: copy.copy_(tensor.as_subclass(torch.Tensor)))
    stream.synchronize()
    return copy
