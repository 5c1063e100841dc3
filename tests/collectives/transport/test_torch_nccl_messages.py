"""Messages through torch's own NCCL, over a stand-in for its calls on streams that run late.

What ends them: test_torch_nccl.py. No GPU needed. With one: tests/processes/test_torch_nccl.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from collectives.transport import (
    Message,
    NcclTransport,
)
from collectives.transport.base import as_bytes
from tests.fakes.fake_cuda import FakeGraph, device_tensor
from tests.fakes.fake_torch import FakeTorch
from tests.fakes.torch_machine import TIMEOUT, full, make_fake, of, read


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTorch]:
    yield from make_fake(monkeypatch)


def ranks(fake: FakeTorch, size: int, work: Callable[[NcclTransport, int], Any]) -> list[Any]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(of(fake, rank), rank), range(size)))


def test_messages_are_behind_and_before_the_callers_work(fake: FakeTorch) -> None:
    """What is sent is written late on the caller's stream; what came is there for it at once."""

    def work(nccl: NcclTransport, rank: int) -> torch.Tensor:
        mine, got = full(-1.0), full(-1.0)

        def write() -> None:
            time.sleep(0.05)
            mine.as_subclass(torch.Tensor).fill_(float(rank))

        empty = Message(1 - rank, device_tensor(torch.empty(0)))
        sends, recvs = [Message(1 - rank, mine), empty], [Message(1 - rank, got), empty]
        fake.cuda.current_stream().put(write)
        nccl.exchange(sends, recvs, "step 0", 20.0)
        nccl.exchange([empty], [], "step 1", 20.0)
        return read(fake, got)

    assert [came.tolist() for came in ranks(fake, 2, work)] == [[1.0] * 3, [0.0] * 3]


def test_messages_posted_ahead_hold_up_only_who_waits_for_them(fake: FakeTorch) -> None:
    """What the caller does meanwhile runs beside them; the memory is kept as long as they need."""
    nccl = of(fake, 0)
    got, meanwhile = full(-1.0), threading.Event()
    wait = nccl.post([], [Message(1, got)], "step 0, part 0 of 2", 20.0)
    fake.cuda.current_stream().put(meanwhile.set)
    assert meanwhile.wait(10.0)
    assert nccl._backend.stream(got.device).stream.kept.keys() == {got.data_ptr()}
    assert [posted.step for posted in nccl._watcher.items] == ["step 0, part 0 of 2"]
    wait()
    fake.lines[1, 0].put(as_bytes(torch.ones(3)))
    assert read(fake, got).tolist() == [1.0] * 3
    nccl.post([], [], "nothing", TIMEOUT)()
    nccl.close()


def test_nothing_waits_in_a_capture(fake: FakeTorch) -> None:
    """The stand-in raises where an event is asked while a stream is captured."""
    nccl = of(fake, 0)
    nccl.exchange([Message(1, full(4.0))], [], "step 0", TIMEOUT)
    fake.lines[0, 1].get(timeout=20.0)
    graph = FakeGraph(fake.cuda.current_stream())
    nccl.exchange([Message(1, full(4.0))], [], "step 1", TIMEOUT)
    graph.end()
    assert fake.lines[0, 1].empty()
    graph.replay()
    assert fake.lines[0, 1].get(timeout=20.0).view(torch.float32).tolist() == [4.0] * 3
