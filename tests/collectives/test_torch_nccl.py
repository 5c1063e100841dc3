"""Messages through torch's own NCCL, over a stand-in for its calls on streams that run late.

No GPU needed. With one: tests/multi_rank/test_torch_nccl.py.
"""

from __future__ import annotations

import queue
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from collectives import CollectiveTimeoutError, TransportError
from collectives.transport import (
    GlooTransport,
    HybridTransport,
    Message,
    process_groups,
    torch_nccl,
)
from collectives.transport.torch_nccl import TorchNccl

from .fake_cuda import FakeCuda, FakeEvent, FakeGraph, FakeStream, device_tensor

TIMEOUT = 0.3


class FakeTorch:
    """`torch.distributed`'s batched messages: on a stream of torch's own, in order.

    A stream that waits for a rank waits until it comes or the communicator is aborted.
    """

    irecv, isend = "irecv", "isend"

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.refuse = ""
        self.aborted: set[int] = set()
        self.lines: dict[Any, queue.SimpleQueue[torch.Tensor]] = defaultdict(queue.SimpleQueue)
        self._streams: dict[int, FakeStream] = defaultdict(FakeStream)

    def P2POp(self, op: str, tensor: torch.Tensor, *, group: int, group_peer: int) -> Any:
        return SimpleNamespace(op=op, tensor=tensor, rank=group, peer=group_peer)

    def batch_isend_irecv(self, ops: list[Any]) -> list[Any]:
        if self.refuse:
            raise RuntimeError(self.refuse)
        rank = ops[0].rank
        stream, before = self._streams[rank], FakeEvent()
        before.record(self.cuda.current_stream())
        stream.wait_event(before)
        # As in a group of NCCL's, none waits for another.
        for op in sorted(ops, key=lambda op: op.op == self.irecv):
            stream.put(self._move(op))
        after = FakeEvent()
        after.record(stream)
        return [_Work(self, rank, after)]

    def _move(self, op: Any) -> Callable[[], None]:
        plain = op.tensor.as_subclass(torch.Tensor)

        def send() -> None:
            self.lines[op.rank, op.peer].put(plain.clone())

        def receive() -> None:
            while op.rank not in self.aborted:
                try:
                    plain.copy_(self.lines[op.peer, op.rank].get(timeout=0.01))
                    return
                except queue.Empty:
                    continue

        return send if op.op == self.isend else receive


class _Work:
    def __init__(self, torch_: FakeTorch, rank: int, after: FakeEvent) -> None:
        self._torch, self._rank, self._after = torch_, rank, after

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout is None:
            self._torch.cuda.current_stream().wait_event(self._after)
            return True
        assert not self._after._done.wait(timeout.total_seconds())
        self._torch.aborted.add(self._rank)
        raise RuntimeError("[Rank 0] Watchdog caught a timeout\nand more")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTorch]:
    cuda = FakeCuda()
    found = FakeTorch(cuda)
    monkeypatch.setattr(torch_nccl, "cuda", cuda)
    monkeypatch.setattr(torch_nccl, "dist", found)
    yield found
    found.aborted.update(range(9))
    FakeStream.stop_all()


def ranks(size: int, work: Callable[[TorchNccl, int], Any]) -> list[Any]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(TorchNccl(rank, rank), rank), range(size)))  # type: ignore[arg-type]


def _deferred(nccl: TorchNccl, deferred: bool) -> AbstractContextManager[None]:
    return nccl.deferred() if deferred else nullcontext()


def full(value: float) -> torch.Tensor:
    return device_tensor(torch.full((3,), value))


def read(fake: FakeTorch, tensor: torch.Tensor) -> torch.Tensor:
    """A copy made on the current stream, after all that was put there."""
    copy = torch.zeros(tensor.shape)
    stream = fake.cuda.current_stream()
    stream.put(lambda: copy.copy_(tensor.as_subclass(torch.Tensor)))
    stream.synchronize()
    return copy


@pytest.mark.parametrize("deferred", [False, True])
def test_messages_are_behind_and_before_the_callers_work(fake: FakeTorch, deferred: bool) -> None:
    """What is sent is written late on the caller's stream; what came is there for it at once."""

    def work(nccl: TorchNccl, rank: int) -> torch.Tensor:
        mine, got = full(-1.0), full(-1.0)

        def write() -> None:
            time.sleep(0.05)
            mine.as_subclass(torch.Tensor).fill_(float(rank))

        def exchange() -> torch.Tensor:
            empty = Message(1 - rank, device_tensor(torch.empty(0)))
            sends, recvs = [Message(1 - rank, mine), empty], [Message(1 - rank, got), empty]
            fake.cuda.current_stream().put(write)
            nccl.exchange(sends, recvs, "step 0", 20.0)
            nccl.exchange([empty], [], "step 1", 20.0)
            return read(fake, got)

        # Within one another, as a reduction's phases are.
        with _deferred(nccl, deferred), _deferred(nccl, deferred):
            return exchange()

    assert [came.tolist() for came in ranks(2, work)] == [[1.0] * 3, [0.0] * 3]


@pytest.mark.parametrize("deferred", [False, True])
def test_a_silent_peer(fake: FakeTorch, deferred: bool) -> None:
    """The error names the first step that is late; torch has aborted the communicator by then."""
    nccl = TorchNccl(0, 0)  # type: ignore[arg-type]

    def steps() -> None:
        nccl.exchange([Message(1, full(1.0))], [], "step 1", TIMEOUT)
        nccl.exchange([], [Message(1, full(0.0))], "step 2 (rd) of 'w'", TIMEOUT)
        assert deferred and time.monotonic() - start < TIMEOUT, "this one should have waited"
        nccl.exchange([], [Message(2, full(0.0))], "step 3", TIMEOUT)

    start = time.monotonic()
    with pytest.raises(CollectiveTimeoutError) as caught, _deferred(nccl, deferred):
        steps()
    assert str(caught.value) == (
        "rank 0 got no answer from rank 1 in step 2 (rd) of 'w' (gave up after 0.3 s): "
        "[Rank 0] Watchdog caught a timeout"
    )
    # Two steps, the first of which ends at once, and slow threads.
    assert TIMEOUT <= time.monotonic() - start < TIMEOUT + 5.0
    assert fake.aborted == {0}


def test_several_peers_are_named(fake: FakeTorch) -> None:
    recvs = [Message(peer, full(0.0)) for peer in (2, 1)]
    with pytest.raises(CollectiveTimeoutError, match=r"no answer from ranks \(1, 2\) in step 7"):
        TorchNccl(0, 0).exchange([], recvs, "step 7", TIMEOUT)  # type: ignore[arg-type]


def test_so_many_steps_are_under_way_at_once(
    fake: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond them the host waits for the first, and says which was late."""
    monkeypatch.setattr(torch_nccl, "MOST_PENDING", 2)
    nccl, posted = TorchNccl(0, 0), []  # type: ignore[arg-type]

    def steps() -> None:
        for step in range(9):
            posted.append(step)
            nccl.exchange([], [Message(1, full(0.0))], f"step {step}", TIMEOUT)

    with pytest.raises(CollectiveTimeoutError, match="in step 0 "), nccl.deferred():
        steps()
    assert posted == [0, 1, 2]


def test_after_an_error_within_deferred_steps_are_waited_for_again(fake: FakeTorch) -> None:
    nccl = TorchNccl(0, 0)  # type: ignore[arg-type]

    def steps() -> None:
        nccl.exchange([], [Message(1, full(0.0))], "step 0", TIMEOUT)
        raise KeyError("ours")

    with pytest.raises(KeyError, match="ours"), nccl.deferred():
        steps()
    with nccl.deferred():
        """Nothing is left to wait for."""
    with pytest.raises(CollectiveTimeoutError, match="in step 1 "):
        nccl.exchange([], [Message(1, full(0.0))], "step 1", TIMEOUT)


def test_nothing_waits_in_a_capture(fake: FakeTorch) -> None:
    """The stand-in raises where an event is asked while a stream is captured."""
    graph = FakeGraph(fake.cuda.current_stream())
    nccl = TorchNccl(0, 0)  # type: ignore[arg-type]
    with nccl.deferred():
        nccl.exchange([Message(1, full(4.0))], [], "step 0", TIMEOUT)
    graph.end()
    assert fake.lines[0, 1].empty()
    graph.replay()
    assert fake.lines[0, 1].get(timeout=20.0).tolist() == [4.0] * 3


def test_what_torch_refuses_is_said_in_its_words(fake: FakeTorch) -> None:
    fake.refuse = "NCCL error: unhandled system error\nLast error: no route"
    with pytest.raises(TransportError, match=r"^NCCL failed in step 4: NCCL error: unhandled sys"):
        TorchNccl(0, 0).exchange([Message(1, full(1.0))], [], "step 4", TIMEOUT)  # type: ignore[arg-type]


class _Backend:
    def __init__(self) -> None:
        self.options = SimpleNamespace(_timeout=timedelta(seconds=30))

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.options._timeout = timeout


def _transport(monkeypatch: pytest.MonkeyPatch, owned: bool) -> tuple[GlooTransport, _Backend]:
    """Over a pretended process group of gloo and NCCL."""
    backend = _Backend()
    found = SimpleNamespace(
        _device_types=[torch.device("cpu"), torch.device("cuda")],
        _get_backend=lambda device: backend,
    )
    dist = torch.distributed
    monkeypatch.setattr(dist, "ProcessGroupNCCL", _Backend, raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    return GlooTransport(found, owned=owned), backend  # type: ignore[arg-type]


def test_torch_ends_the_process_later_than_a_step_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's watchdog, of a group that is ours; another's keeps what its owner gave it."""
    assert _transport(monkeypatch, owned=True)[1].options._timeout == timedelta(seconds=90)
    assert _transport(monkeypatch, owned=False)[1].options._timeout == timedelta(seconds=30)


def test_a_group_of_gloo_alone_has_no_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(_device_types=[torch.device("cpu")])
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    process_groups.outlast(group)  # type: ignore[arg-type]
    assert not hasattr(group, "_get_backend")


def test_cuda_messages_of_a_mixed_transport_are_deferred(
    fake: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the transport that ranks of one host have, with links for the CPU's messages."""
    gloo, _ = _transport(monkeypatch, owned=False)
    links = SimpleNamespace(peers={1}, abandon=lambda reason: None)
    mixed = HybridTransport(links, gloo)  # type: ignore[arg-type]
    message = Message(1, device_tensor(torch.zeros(3)))
    # DeviceTensor says its device alone: what it is, too, the transport asks a link for.
    monkeypatch.setattr(type(message.tensor), "is_cpu", False, raising=False)
    monkeypatch.setattr(
        fake, "P2POp", lambda op, t, **k: SimpleNamespace(op=op, tensor=t, rank=0, peer=1)
    )
    left = []

    def steps() -> None:
        mixed.exchange([], [message], "step 5", TIMEOUT)
        left.append(time.monotonic())

    with pytest.raises(CollectiveTimeoutError, match="in step 5 "), mixed.deferred():
        steps()
    assert len(left) == 1 and time.monotonic() - left[0] >= TIMEOUT
