"""What ends messages through torch's own NCCL, over a stand-in for its calls on late streams.

Messages that come: test_torch_nccl_messages.py. No GPU needed. With one:
tests/processes/test_torch_nccl.py.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
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
    ThreadWorld,
    process_groups,
)
from collectives.transport.base import as_bytes
from collectives.transport.nccl import backend
from tests.fakes.fake_torch import FakeGroup, FakeTorch
from tests.fakes.nccl_machine import told
from tests.fakes.torch_machine import TIMEOUT, full, make_fake, of, read


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTorch]:
    yield from make_fake(monkeypatch)


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
        "rank 0 got no answer from rank 1 in step 2 (rd) of 'w' (stopped after 0.3 s); "
        "NCCL was aborted"
    )
    assert fake.aborted == {0}
    with pytest.raises(TransportError, match=r"step 4: .* unusable since rank 0 got no answer"):
        nccl.exchange([Message(1, full(1.0))], [], "step 4", TIMEOUT)


def test_several_peers_are_named(fake: FakeTorch) -> None:
    recvs = [Message(peer, full(0.0)) for peer in (2, 1)]
    nccl = of(fake, 0)
    nccl.exchange([], recvs, "step 7", TIMEOUT)
    assert "no answer from one of rank 1, rank 2 in step 7" in str(told(nccl.check_streams))


def test_a_watchdog_ends_with_what_it_watches(fake: FakeTorch) -> None:
    nccl = of(fake, 0)
    nccl.exchange([Message(1, full(1.0))], [], "step 1", TIMEOUT)
    thread = nccl._watcher._thread
    assert thread is not None and thread.is_alive()
    del nccl
    gc.collect()
    thread.join(20.0)
    assert not thread.is_alive()


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


@pytest.mark.parametrize("of_node", [False, True])
def test_librarys_sum_that_is_late(
    fake: FakeTorch, monkeypatch: pytest.MonkeyPatch, of_node: bool
) -> None:
    """torch's own all-reduce is left on the stream and watched as messages are.

    What is aborted is its process group, too, which is another inside a node.
    """
    gloo, group = _gloo(fake, monkeypatch, owned=False)
    nccl = NcclTransport(gloo, backend.TorchBackend(group), timeout=TIMEOUT)  # type: ignore[arg-type]
    libraries, call = Libraries(nccl), CallContext(nccl, "step 2", TIMEOUT, Workspace())
    if of_node:
        libraries._of_node = FakeGroup(fake, 7)  # type: ignore[assignment]
    libraries.all_reduce("collective", 1, full(1.0), (0, 1) if of_node else None, call)
    error = told(nccl.check_streams)
    assert isinstance(error, CollectiveTimeoutError)
    assert "no answer from the other ranks in step 2 (stopped after 0.3 s); NCCL" in str(error)
    assert fake.aborted == ({0, 7} if of_node else {0})


@pytest.mark.parametrize("how", ["abort", "interrupt"])
@pytest.mark.parametrize("comes", [False, True])
def test_what_is_under_way_is_ended_and_nothing_else(
    fake: FakeTorch, comes: bool, how: str
) -> None:
    """The process group may be the user's, who goes on with it. The host is told, too."""
    reasons: list[str] = []
    host: Any = ThreadWorld(9).transport(0)
    host.abort = host.interrupt = reasons.append
    nccl, got = of(fake, 0, host), full(0.0)
    nccl.exchange([], [Message(1, got)], "step 5", 20.0)
    if comes:
        fake.lines[1, 0].put(as_bytes(torch.ones(3)))
        read(fake, got)
    getattr(nccl, how)("no more")
    assert reasons == ["no more"]
    assert fake.aborted == (set() if comes else {0})
    if not comes:
        with pytest.raises(TransportError, match=r"^no more; NCCL was aborted$"):
            nccl.check_streams()


def test_ranks_sum_by_the_library_that_the_sum_is_for(fake: FakeTorch) -> None:
    """Over cupy a process group's is left to torch; over torch's NCCL ranks alone have none."""

    class Cupy(backend.TorchBackend):
        device = torch.device("cuda", 0)

    group = FakeGroup(fake, 5)
    nccl = NcclTransport(of(fake, 0), Cupy(FakeGroup(fake, 3)), timeout=TIMEOUT)  # type: ignore[arg-type]
    nccl.all_reduce(full(1.0), group, "step 2", TIMEOUT)  # type: ignore[arg-type]
    assert "no answer from the other ranks in step 2" in str(told(nccl.check_streams))
    assert fake.aborted == {0, 5}
    with pytest.raises(TransportError, match="there is no library that sums"):
        of(fake, 0).all_reduce(full(1.0), (0, 1), "step 3", TIMEOUT)
