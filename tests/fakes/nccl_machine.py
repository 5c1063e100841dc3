"""Ranks of the NCCL transport as threads, over fake_nccl.py and fake_cuda.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import pytest
import torch

from collectives.errors import CollectiveError
from collectives.transport import Message, ThreadWorld
from collectives.transport.nccl import backend, cupy_backend, watcher
from collectives.transport.nccl import transport as nccl
from collectives.transport.nccl.cupy_backend import CupyBackend
from tests.fakes.fake_cuda import FakeCuda, FakeStream
from tests.fakes.fake_nccl import FakeNccl

CLOSE_SECONDS = 0.2
Work = Callable[[nccl.NcclTransport], Any]


class Machine:
    """Ranks as threads over the fakes; results by rank, errors as results."""

    def __init__(self, fake: FakeNccl, cuda: FakeCuda) -> None:
        self.nccl = fake
        self.cuda = cuda
        self.read = cuda.read

    def run(self, size: int, work: Work, *, timeout: float = 20.0, close: bool = True) -> list[Any]:
        world = ThreadWorld(size)

        def rank_main(rank: int) -> Any:
            transport = nccl.NcclTransport(world.transport(rank), CupyBackend(), timeout=timeout)
            try:
                return work(transport)
            finally:
                if close:
                    transport.close()

        def safely(rank: int) -> Any:
            try:
                return rank_main(rank)
            except Exception as error:  # noqa: BLE001 - the test looks at it
                return error

        with futures.ThreadPoolExecutor(size) as pool:
            return list(pool.map(safely, range(size)))

    def put(self, op: Callable[[], Any], delay: float = 0.0) -> None:
        """Put work on the caller's current stream, where it takes `delay` seconds."""

        def slow() -> None:
            time.sleep(delay)
            op()

        self.cuda.current_stream().put(slow)


def make_machine(monkeypatch: pytest.MonkeyPatch, fake: FakeNccl) -> Iterator[Machine]:
    """For a fixture: the fakes in place of CUDA and NCCL; at the end no rule was broken."""
    cuda = FakeCuda()
    for module in (nccl, backend, cupy_backend):
        monkeypatch.setattr(module, "cuda", cuda)
    monkeypatch.setattr(cupy_backend, "load_nccl", lambda: fake)
    monkeypatch.setattr(cupy_backend, "_ABORT_SECONDS", 0.1)
    monkeypatch.setattr(backend, "CLOSE_SECONDS", CLOSE_SECONDS)
    monkeypatch.setattr(watcher, "CHECK_SECONDS", 0.05)
    monkeypatch.setattr(watcher, "GRACE_SECONDS", 0.1)
    yield Machine(fake, cuda)
    fake.end()
    FakeStream.stop_all()


def all_good(results: list[Any]) -> list[Any]:
    """The results, where none is an error."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def swap(transport: nccl.NcclTransport, mine: torch.Tensor, got: torch.Tensor, step: str) -> None:
    """One of two ranks sends `mine` and receives `got`."""
    peer = 1 - transport.rank
    transport.exchange([Message(peer, mine)], [Message(peer, got)], step, 10.0)


def told(check: Callable[[], None]) -> CollectiveError:
    """What a transport's `check_streams` raises, as soon as it does."""
    end = time.monotonic() + 20.0
    while time.monotonic() < end:
        try:
            check()
        except CollectiveError as error:
            return error
        time.sleep(0.01)
    raise AssertionError("nothing has ended the steps")
