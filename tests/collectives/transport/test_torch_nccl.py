"""Messages through torch's own NCCL and what ends them, over a stand-in for its calls on streams.

No GPU needed. With one: tests/processes/test_torch_nccl.py."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from collectives import CollectiveTimeoutError, TransportError
from collectives.execution.executor import CallContext, Workspace
from collectives.execution.phases import Libraries
from collectives.transport import (
    GlooTransport,
    Message,
    NcclTransport,
    process_groups,
)
from collectives.transport.base import as_bytes
from collectives.transport.nccl import backend
from tests.fakes.fake_cuda import device_tensor, full
from tests.fakes.fake_torch import TIMEOUT, FakeGroup, FakeTorch, of
from tests.fakes.nccl_machine import told


def test_a_silent_peer(fake: FakeTorch) -> None:
    """The error names the first step that is late; torch has aborted the communicator by then."""
    nccl = of(fake, 0)
    start = time.monotonic()
    nccl.exchange([Message(1, full(3, 1.0))], [], "step 1", TIMEOUT)
    nccl.exchange([], [Message(1, full(3, 0.0))], "step 2 (rd) of 'w'", TIMEOUT)
    nccl.exchange([], [Message(2, full(3, 0.0))], "step 3", TIMEOUT)
    assert time.monotonic() - start < TIMEOUT, "nothing should have waited"
    error = told(nccl.check_streams)
    assert isinstance(error, CollectiveTimeoutError)
    assert str(error) == (
        "rank 0 got no answer from rank 1 in step 2 (rd) of 'w' (stopped after 0.3 s); "
        "NCCL was aborted"
    )
    assert fake.aborted == {0}
    with pytest.raises(TransportError, match=r"step 4: .* unusable since rank 0 got no answer"):
        nccl.exchange([Message(1, full(3, 1.0))], [], "step 4", TIMEOUT)


def test_what_torch_refuses_is_said_in_its_words(fake: FakeTorch) -> None:
    fake.refuse = "NCCL error: unhandled system error\nLast error: no route"
    with pytest.raises(TransportError, match=r"^NCCL failed in step 4: NCCL error: unhandled sys"):
        of(fake, 0).exchange([Message(1, full(3, 1.0))], [], "step 4", TIMEOUT)


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
    group: Any = SimpleNamespace(_device_types=[torch.device("cpu")])
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    process_groups.extend_timeout(group)
    assert process_groups.abort_nccl(process_groups.nccl_of(group)) == "it is still under way"


def test_nccl_is_found_where_torch_wraps_it(fake: FakeTorch) -> None:
    """As with TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    inner = FakeGroup(fake, 3)
    wrapper = SimpleNamespace(wrapped_pg=inner)
    group: Any = SimpleNamespace(
        _device_types=inner._device_types, _get_backend=lambda device: wrapper
    )
    process_groups.extend_timeout(group)
    assert inner.options._timeout == timedelta(seconds=90)
    assert process_groups.abort_nccl(process_groups.nccl_of(group)) == "NCCL was aborted"
    assert fake.aborted == {3}


@pytest.mark.parametrize("of_node", [False, True])
def test_librarys_sum_that_is_late(
    fake: FakeTorch, monkeypatch: pytest.MonkeyPatch, of_node: bool
) -> None:
    """torch's own all-reduce is left on the stream and watched as messages are.

    Inside a node it is another process group's NCCL, which is aborted, too.
    """
    gloo, group = _gloo(fake, monkeypatch, owned=False)
    nccl = NcclTransport(gloo, backend.TorchBackend(group), timeout=TIMEOUT)  # type: ignore[arg-type]
    libraries, call = Libraries(nccl), CallContext(nccl, "step 2", TIMEOUT, Workspace())
    if of_node:
        libraries._of_node = FakeGroup(fake, 7)  # type: ignore[assignment]
    libraries.all_reduce("collective", 1, full(3, 1.0), (0,) if of_node else None, call)
    error = told(nccl.check_streams)
    assert isinstance(error, CollectiveTimeoutError)
    assert "no answer from the other ranks in step 2 (stopped after 0.3 s); NCCL" in str(error)
    assert fake.aborted == ({0, 7} if of_node else {0})


def test_nccl_of_our_own_is_none_of_torch_distributeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who destroys all process groups would wait for our graphs. Groups of one are told apart."""
    made: list[Any] = []

    class Nccl:
        Options = SimpleNamespace

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            store.set("a key", f"NCCL {len(made)}")
            made.append((rank, size, options))

    store, group = torch.distributed.HashStore(), SimpleNamespace(group_name="3")
    dist = torch.distributed
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(process_groups, "store_of", lambda group: store)
    monkeypatch.setattr(dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [4, 6])
    before = {*dist.distributed_c10d._world.pg_map}
    for _ in range(2):
        process_groups.own_nccl(group, 30.0)  # type: ignore[arg-type]
    assert {*dist.distributed_c10d._world.pg_map} == before
    assert [(rank, size) for rank, size, _ in made] == [(1, 2)] * 2
    assert {options._timeout for *_, options in made} == {timedelta(seconds=90)}
    assert made[0][2].global_ranks_in_group == [4, 6]
    assert store.get("adasum nccl 3 1/a key") == b"NCCL 0"
    assert store.get("adasum nccl 3 2/a key") == b"NCCL 1"


def test_ranks_sum_by_the_library_that_the_sum_is_for(fake: FakeTorch) -> None:
    """Over cupy a process group's is left to torch; over torch's NCCL ranks alone have none."""

    class Cupy(backend.TorchBackend):
        device = torch.device("cuda", 0)

    group = FakeGroup(fake, 5)
    nccl = NcclTransport(of(fake, 0), Cupy(FakeGroup(fake, 3)), timeout=TIMEOUT)  # type: ignore[arg-type]
    nccl.all_reduce(full(3, 1.0), group, "step 2", TIMEOUT)  # type: ignore[arg-type]
    assert "no answer from the other ranks in step 2" in str(told(nccl.check_streams))
    assert fake.aborted == {0, 5}
    with pytest.raises(TransportError, match="there is no library that sums"):
        of(fake, 0).all_reduce(full(3, 1.0), (0, 1), "step 3", TIMEOUT)


def ranks(fake: FakeTorch, size: int, work: Callable[[NcclTransport, int], Any]) -> list[Any]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(of(fake, rank), rank), range(size)))


def test_messages_are_behind_and_before_the_callers_work(fake: FakeTorch) -> None:
    """What is sent is written late on the caller's stream; what came is there for it at once."""

    def work(nccl: NcclTransport, rank: int) -> torch.Tensor:
        mine, got = full(3, -1.0), full(3, -1.0)

        def write() -> None:
            time.sleep(0.05)
            mine.as_subclass(torch.Tensor).fill_(float(rank))

        empty = Message(1 - rank, device_tensor(torch.empty(0)))
        sends, recvs = [Message(1 - rank, mine), empty], [Message(1 - rank, got), empty]
        fake.cuda.current_stream().put(write)
        nccl.exchange(sends, recvs, "step 0", 20.0)
        nccl.exchange([empty], [], "step 1", 20.0)
        return fake.cuda.read(got)

    assert [came.tolist() for came in ranks(fake, 2, work)] == [[1.0] * 3, [0.0] * 3]


def test_messages_posted_ahead_hold_up_only_who_waits_for_them(fake: FakeTorch) -> None:
    """What the caller does meanwhile runs beside them; the memory is kept as long as they need."""
    nccl = of(fake, 0)
    got, meanwhile = full(3, -1.0), threading.Event()
    wait = nccl.post([], [Message(1, got)], "step 0, part 0 of 2", 20.0)
    fake.cuda.current_stream().put(meanwhile.set)
    assert meanwhile.wait(10.0)
    assert nccl._backend.stream(got.device).stream.kept.keys() == {got.data_ptr()}
    assert [posted.step for posted in nccl._watcher.items] == ["step 0, part 0 of 2"]
    wait()
    fake.lines[1, 0].put(as_bytes(torch.ones(3)))
    assert fake.cuda.read(got).tolist() == [1.0] * 3
    nccl.post([], [], "nothing", TIMEOUT)()
    nccl.close()


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16, torch.uint64, torch.bfloat16])
def test_messages_of_every_dtype_are_sent(fake: FakeTorch, dtype: torch.dtype) -> None:
    def work(nccl: NcclTransport, rank: int) -> torch.Tensor:
        mine = device_tensor(torch.full((3,), 7 + rank).to(dtype))
        got = device_tensor(torch.zeros(3, dtype=dtype))
        nccl.exchange([Message(1 - rank, mine)], [Message(1 - rank, got)], "step 0", 20.0)
        return fake.cuda.read(got)

    assert [came.tolist() for came in ranks(fake, 2, work)] == [[8] * 3, [7] * 3]


def test_a_rank_without_messages_connects_too(fake: FakeTorch) -> None:
    """torch makes one communicator of all ranks for batched messages: else they would wait."""
    nccl = of(fake, 0)
    nccl.exchange([], [], "no tensors, no device", TIMEOUT)
    assert fake.connected == []
    nothing = Message(1, device_tensor(torch.empty(0)))
    for step in ("step 0", "step 1"):
        nccl.exchange([nothing], [nothing], step, TIMEOUT)
    assert fake.connected == [0]
