"""Messages through torch's own NCCL, over a stand-in for its calls on streams that run late.

No GPU needed. With one: tests/processes/test_torch_nccl.py.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from collectives import CollectiveTimeoutError, TransportError
from collectives.execution import pipelining
from collectives.execution.context import CallContext, Workspace
from collectives.execution.executor import execute
from collectives.execution.vendor import Libraries
from collectives.reducers import Operands, SumReducer
from collectives.schedules.topology import Topology
from collectives.transport import (
    ConnectionTransport,
    GlooTransport,
    Message,
    NcclTransport,
    ThreadWorld,
    Transport,
    process_groups,
)
from collectives.transport.connections import transport as connections
from collectives.transport.connections.connection import Connection
from collectives.transport.nccl import torch_backend, transport, watcher
from tests.collectives.schedules.simulation import one_level
from tests.fakes.fake_cuda import FakeCuda, FakeGraph, FakeStream, device_tensor
from tests.fakes.fake_torch import FakeGroup, FakeTorch
from tests.fakes.nccl_machine import DeviceWorkspace, told

TIMEOUT = 0.3


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTorch]:
    cuda = FakeCuda()
    found = FakeTorch(cuda)
    monkeypatch.setattr(transport, "cuda", cuda)
    monkeypatch.setattr(torch_backend, "cuda", cuda)
    monkeypatch.setattr(watcher, "CHECK_SECONDS", 0.05)
    monkeypatch.setattr(watcher, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(torch_backend, "dist", found)
    zeros = SimpleNamespace(zeros=lambda numel, device: full(0.0))
    monkeypatch.setattr(torch_backend, "torch", zeros, raising=False)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", FakeGroup, raising=False)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    yield found
    found.aborted.update(range(9))
    FakeStream.stop_all()


def of(fake: FakeTorch, rank: int, host: Transport | None = None) -> NcclTransport:
    """Over a process group, beside what carries CPU tensors: nobody is gone unless it says so."""
    host = host or ThreadWorld(9).transport(rank)
    backend = torch_backend.TorchBackend(FakeGroup(fake, rank))  # type: ignore[arg-type]
    return NcclTransport(host, backend, timeout=TIMEOUT)


def ranks(fake: FakeTorch, size: int, work: Callable[[NcclTransport, int], Any]) -> list[Any]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(of(fake, rank), rank), range(size)))


def full(value: float) -> torch.Tensor:
    return device_tensor(torch.full((3,), value))


def read(fake: FakeTorch, tensor: torch.Tensor) -> torch.Tensor:
    """A copy made on the current stream, after all that was put there."""
    copy = torch.zeros(tensor.shape)
    stream = fake.cuda.current_stream()
    stream.put(lambda: copy.copy_(tensor.as_subclass(torch.Tensor)))
    stream.synchronize()
    return copy


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
    assert nccl._backend.stream(got.device).kept.keys() == {got.data_ptr()}
    assert [posted.step for posted in nccl._watcher.items] == ["step 0, part 0 of 2"]
    wait()
    fake.lines[1, 0].put(torch.ones(3))
    assert read(fake, got).tolist() == [1.0] * 3
    nccl.post([], [], "nothing", TIMEOUT)()
    nccl.close()


def test_messages_posted_ahead_that_never_come_are_told_without_a_wait(fake: FakeTorch) -> None:
    nccl = of(fake, 0)
    nccl.post([], [Message(1, full(0.0))], "step 2, part 1 of 3", TIMEOUT)
    assert "no answer from rank 1 in step 2, part 1 of 3" in str(told(nccl.check_streams))
    assert fake.aborted == {0}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["xring", "rechd"])
def test_schedule_runs_in_parts_over_torchs_nccl(
    fake: FakeTorch, monkeypatch: pytest.MonkeyPatch, name: str, size: int
) -> None:
    """Every step is on the streams at once: what is not ordered shows as a wrong sum."""
    monkeypatch.setattr(pipelining, "_MIN_PART_BYTES", 400)
    monkeypatch.setattr(pipelining, "_NEAR_PART_BYTES", 400)
    monkeypatch.setattr(pipelining, "_FAR_PART_BYTES", 400)
    monkeypatch.setattr(pipelining, "_ALIGNED", 4)
    generator = torch.Generator().manual_seed(size)
    inputs = [torch.randint(-9, 9, (1021,), generator=generator).float() for _ in range(size)]
    world = ThreadWorld(size)

    class OnStream(SumReducer):
        def reduce(self, operands: Operands) -> None:
            for parts, out, _ in operands.pieces:
                plain = [part.as_subclass(torch.Tensor) for part in (*parts, out)]
                fake.cuda.current_stream().put(
                    lambda p=plain: (time.sleep(0.002), torch.add(p[0], p[1], out=p[2]))
                )

    def work(rank: int) -> torch.Tensor:
        mixed = of(fake, rank, world.transport(rank))
        buffer = device_tensor(inputs[rank].clone())
        assert mixed.posts_ahead(buffer.device)
        assert not mixed.posts_ahead(torch.device("cpu"))
        step = CallContext(mixed, "a test", 20.0, DeviceWorkspace())
        execute(one_level(name, 1, Topology(size, size)), buffer, OnStream(), step)
        assert any("part 1 of" in posted.step for posted in mixed._watcher.items)
        return read(fake, buffer)

    with ThreadPoolExecutor(size) as pool:
        for answer in pool.map(work, range(size)):
            assert torch.equal(answer, sum(inputs)), "integers: exact in any order"


def test_a_silent_peer(fake: FakeTorch) -> None:
    """The error names the first step that is late; torch has aborted the communicator by then."""
    nccl = of(fake, 0)
    start = time.monotonic()
    nccl.exchange([Message(1, full(1.0))], [], "step 1", TIMEOUT)
    nccl.exchange([], [Message(1, full(0.0))], "step 2 (rd) of 'w'", TIMEOUT)
    nccl.exchange([], [Message(2, full(0.0))], "step 3", TIMEOUT)
    assert time.monotonic() - start < TIMEOUT, "nothing should have waited"
    error = told(nccl.check_streams)
    assert isinstance(error, CollectiveTimeoutError)
    assert str(error) == (
        "rank 0 got no answer from rank 1 in step 2 (rd) of 'w' (stopped after 0.3 s): "
        "NCCL was aborted"
    )
    assert fake.aborted == {0}
    with pytest.raises(TransportError, match=r"step 4: .* unusable since rank 0 got no answer"):
        nccl.exchange([Message(1, full(1.0))], [], "step 4", TIMEOUT)


def test_several_peers_are_named(fake: FakeTorch) -> None:
    recvs = [Message(peer, full(0.0)) for peer in (2, 1)]
    nccl = of(fake, 0)
    nccl.exchange([], recvs, "step 7", TIMEOUT)
    assert "no answer from one of the ranks (1, 2) in step 7" in str(told(nccl.check_streams))


def test_so_many_steps_are_under_way_at_once(
    fake: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond them the host waits for the first, and says which was late."""
    monkeypatch.setattr(watcher, "MAX_PENDING", 2)
    nccl, posted = of(fake, 0), []

    def steps() -> None:
        for step in range(9):
            posted.append(step)
            nccl.exchange([], [Message(1, full(0.0))], f"step {step}", TIMEOUT)

    with pytest.raises(CollectiveTimeoutError, match="in step 0 "):
        steps()
    assert posted == [0, 1, 2]


def test_a_watchdog_ends_with_what_it_watches(fake: FakeTorch) -> None:
    nccl = of(fake, 0)
    nccl.exchange([Message(1, full(1.0))], [], "step 1", TIMEOUT)
    thread = nccl._watcher._thread
    assert thread is not None and thread.is_alive()
    del nccl
    gc.collect()
    thread.join(20.0)
    assert not thread.is_alive()


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
    assert fake.lines[0, 1].get(timeout=20.0).tolist() == [4.0] * 3


def test_what_torch_refuses_is_said_in_its_words(fake: FakeTorch) -> None:
    fake.refuse = "NCCL error: unhandled system error\nLast error: no route"
    with pytest.raises(TransportError, match=r"^NCCL failed in step 4: NCCL error: unhandled sys"):
        of(fake, 0).exchange([Message(1, full(1.0))], [], "step 4", TIMEOUT)


def _gloo(
    fake: FakeTorch, monkeypatch: pytest.MonkeyPatch, owned: bool
) -> tuple[GlooTransport, FakeGroup]:
    """Over a pretended process group of gloo and NCCL."""
    found = FakeGroup(fake, 0)
    dist = torch.distributed
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    return GlooTransport(found, owned=owned), found  # type: ignore[arg-type]


def test_torch_ends_the_process_later_than_a_step_is_late(
    fake: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's watchdog, of a group that is ours; another's keeps what its owner gave it."""
    assert _gloo(fake, monkeypatch, owned=True)[1].options._timeout == timedelta(seconds=90)
    assert _gloo(fake, monkeypatch, owned=False)[1].options._timeout == timedelta(seconds=30)


def test_a_group_of_gloo_alone_has_no_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(_device_types=[torch.device("cpu")])
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    process_groups.extend_timeout(group)  # type: ignore[arg-type]
    assert not hasattr(group, "_get_backend")


class Kept(Connection):
    """One that keeps the reason that its peer would get."""

    def __init__(self, reasons: list[str]) -> None:
        self._reasons = reasons

    def send_reason(self, text: str) -> bool:
        self._reasons.append(text)
        return True

    def close(self) -> None:
        return

    _transmit = _pull = _drop = close  # type: ignore[assignment]


def _connected(
    fake: FakeTorch,
    monkeypatch: pytest.MonkeyPatch,
    reasons: list[str],
    ended: Sequence[int] = (),
) -> NcclTransport:
    """The transport that ranks of one host have, with one connection."""
    opened = {1: Kept(reasons)}, None, None, True
    monkeypatch.setattr(connections, "open_connections", lambda *_, **__: opened)
    host = ConnectionTransport(_gloo(fake, monkeypatch, owned=False)[0], TIMEOUT)
    host.gone = lambda peers=None: 1 if ended and 1 in peers else None  # type: ignore[method-assign]
    return of(fake, 0, host)


@pytest.mark.parametrize("ended", [(), (1,)])
def test_a_mixed_transport_tells_what_became_of_cuda_messages(
    fake: FakeTorch, monkeypatch: pytest.MonkeyPatch, ended: Sequence[int]
) -> None:
    """The transport that ranks of one host have, whose connections show who is gone."""
    mixed = _connected(fake, monkeypatch, [], ended)
    message = Message(1, device_tensor(torch.zeros(3)))
    start = time.monotonic()
    mixed.exchange([], [message], "step 5", 60.0 if ended else TIMEOUT)
    mixed.check_streams()
    text = str(told(mixed.check_streams))
    assert "no answer from rank 1 in step 5" in text
    assert ("rank 1 has ended; NCCL was aborted" in text) == bool(ended)
    assert time.monotonic() - start < 20.0
    mixed.close()


def test_a_rank_without_messages_connects_too(fake: FakeTorch) -> None:
    """torch makes one communicator of all ranks for batched messages: else they would wait."""
    nccl = of(fake, 0)
    nccl.exchange([], [], "no tensors, no device", TIMEOUT)
    assert fake.connected == []
    nothing = Message(1, device_tensor(torch.empty(0)))
    for step in ("step 0", "step 1"):
        nccl.exchange([nothing], [nothing], step, TIMEOUT)
    assert fake.connected == [0]


def test_nccl_is_found_where_torch_wraps_it(fake: FakeTorch) -> None:
    """As with TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    inner = FakeGroup(fake, 3)
    wrapper = SimpleNamespace(wrapped_pg=inner)
    group: Any = SimpleNamespace(
        _device_types=inner._device_types, _get_backend=lambda device: wrapper
    )
    process_groups.extend_timeout(group)
    assert inner.options._timeout == timedelta(seconds=90)
    assert process_groups.abort_nccl(group) == "NCCL was aborted"
    assert fake.aborted == {3}


def test_an_abort_that_hangs_does_not_keep_the_error_back(
    fake: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_groups, "_ABORT_SECONDS", 0.1)
    ended = threading.Event()
    group = FakeGroup(fake, 0)
    monkeypatch.setattr(group, "abort", lambda: ended.wait(30.0))
    start = time.monotonic()
    assert process_groups.abort_nccl(group) == "NCCL is being aborted"
    assert time.monotonic() - start < 20.0
    ended.set()


def test_an_abort_that_fails_is_said(fake: FakeTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    group = FakeGroup(fake, 0)

    def fails() -> None:
        raise RuntimeError("CUDA error: unspecified launch failure\nmore")

    monkeypatch.setattr(group, "abort", fails)
    said = "NCCL could not be aborted: CUDA error: unspecified launch failure"
    assert process_groups.abort_nccl(group) == said


@pytest.mark.parametrize("comes", [False, True])
def test_what_another_error_leaves_under_way_is_ended(
    fake: FakeTorch, monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    """Through the transport that ranks of one host have; not where it has come meanwhile."""
    reasons: list[str] = []
    mixed = _connected(fake, monkeypatch, reasons)
    got = full(0.0)
    mixed.exchange([], [Message(1, got)], "step 5", 20.0)
    if comes:
        fake.lines[1, 0].put(torch.ones(3))
        read(fake, got)
    mixed.abort("interrupted")
    assert reasons == ["interrupted"]
    assert fake.aborted == (set() if comes else {0})
    if not comes:
        with pytest.raises(TransportError, match=r"interrupted \(NCCL was aborted\)"):
            mixed.check_streams()


@pytest.mark.parametrize("of_node", [False, True])
def test_librarys_sum_that_is_late(
    fake: FakeTorch, monkeypatch: pytest.MonkeyPatch, of_node: bool
) -> None:
    """torch's own all-reduce is left on the stream and watched as messages are.

    What is aborted is its process group, too, which is another inside a node.
    """
    gloo, group = _gloo(fake, monkeypatch, owned=False)
    nccl = NcclTransport(gloo, torch_backend.TorchBackend(group), timeout=TIMEOUT)  # type: ignore[arg-type]
    libraries, call = Libraries(nccl), CallContext(nccl, "step 2", TIMEOUT, Workspace())
    if of_node:
        libraries._of_node = FakeGroup(fake, 7)  # type: ignore[assignment]
    libraries.all_reduce("collective", 1, full(1.0), (0, 1) if of_node else None, call)
    error = told(nccl.check_streams)
    assert isinstance(error, CollectiveTimeoutError)
    assert "no answer from the other ranks in step 2 (stopped after 0.3 s): NCCL" in str(error)
    assert fake.aborted == ({0, 7} if of_node else {0})
