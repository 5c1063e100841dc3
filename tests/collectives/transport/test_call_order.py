"""Beside other communicators on a GPU ours are called in the caller's order; shown over stand-ins.

NCCL wants the communicators of one GPU called in one order on all ranks: torch's, which the caller
calls, and those of groups split from one another.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import pytest
import torch
import torch.distributed as dist

import collectives
from adasum import HookState
from collectives import Group, Operands, Sum, Work
from collectives.bootstrap import transport_selection
from collectives.call import Call
from collectives.reducers import SumReducer
from collectives.transport import HostTransport, ThreadWorld
from collectives.transport.nccl.cupy_backend import shared_stream
from tests.collectives.queues import Queue
from tests.collectives.transport import streams
from tests.collectives.transport.streams import machine, on_gpu
from tests.collectives.transport.streams_nccl import on_ranks


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    streams.install(monkeypatch)


class Slow(SumReducer):
    """Takes a while on the host, and notes that it is there."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def reduce(self, operands: Operands) -> None:
        time.sleep(0.1)
        super().reduce(operands)
        self._calls.append(threading.current_thread().name)


def on_two_ranks(work: Callable[[Group], Any]) -> list[Any]:
    return on_ranks(2, work)


def reduced(group: Group, calls: list[str], how: str) -> tuple[Work, torch.Tensor]:
    tensor = on_gpu(torch.full((50,), 1.0 + group.rank))
    if how == "request":
        return group.all_reduce_init(tensor, Slow(calls), algorithm="rd").start(), tensor
    return group.all_reduce(tensor, Slow(calls), algorithm="rd", async_op=True), tensor


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("how", ["async_op", "request"])
@pytest.mark.parametrize("shares", [True, False])
def test_call_beside_torchs_communicators_is_enqueued_when_it_returns(
    how: str, shares: bool
) -> None:
    """What the caller then calls of torch's comes behind it on every rank."""

    def work(group: Group) -> list[str]:
        calls: list[str] = []
        group.transport.shares_gpu = shares
        mine = threading.current_thread().name
        started, tensor = reduced(group, calls, how)
        calls.append("torch's")
        assert torch.equal(streams.plain(started.wait()), torch.full((50,), 3.0))
        assert streams.plain(tensor)[0] == 3.0
        return ["caller" if name == mine else name for name in calls]

    for calls in on_two_ranks(work):
        assert calls.index("torch's") == (1 if shares else 0)
    assert machine.races == []


@pytest.mark.usefixtures("gpu")
def test_calls_of_groups_that_were_split_are_enqueued_in_their_order() -> None:
    def work(group: Group) -> list[int]:
        part = group.split([1, 0])
        assert part is not None
        lines: list[list[str]] = [[], []]
        ended = []
        for _ in range(2):
            for each, calls in ((group, lines[0]), (part, lines[1])):
                before = sum(map(len, lines))
                started, _ = reduced(each, calls, "async_op")
                ended.append(sum(map(len, lines)) - before)
                started.wait()
        return ended

    assert on_two_ranks(work) == [[1, 1, 1, 1]] * 2
    assert machine.races == []


@pytest.mark.usefixtures("gpu")
def test_failure_of_a_call_enqueued_at_once_is_its_waits() -> None:
    class Fails(SumReducer):
        def reduce(self, operands: Operands) -> None:
            raise ArithmeticError("no sum")

    def work(group: Group) -> None:
        group.transport.shares_gpu = True
        tensor = on_gpu(torch.ones(3))
        started = group.all_reduce(tensor, Fails(), algorithm="rd", async_op=True)
        with pytest.raises(ArithmeticError, match="no sum"):
            started.wait()

    on_two_ranks(work)


@pytest.mark.usefixtures("gpu")
def test_call_that_is_enqueued_at_once_runs_in_its_turn() -> None:
    """Not so in a callback, which would wait for itself; that has the work's stream as current."""
    queue, seen, gate = Queue(), [], threading.Event()
    queue._transport.shares_gpu = True
    tensors, ended = [on_gpu(torch.ones(3))], threading.Event()
    first = queue.later(lambda: gate.wait(10.0) and seen.append("first"))

    def call_again() -> None:
        seen.append(machine.current())
        queue.later(ended.set, tensors)

    first.add_done_callback(lambda: queue.later(lambda: seen.append("third"), tensors))
    threading.Timer(0.1, gate.set).start()
    second = queue.later(lambda: seen.append("second"), tensors)
    assert seen[:2] == ["first", "second"] and first.has_ended() and second.has_ended()
    second.add_done_callback(call_again)
    assert ended.wait(10.0)
    # A callback of what has ended runs in this thread, with the work's stream.
    assert seen[2] == "third" and seen[3] in queue._streams.values()
    assert machine.current() not in queue._streams.values()
    queue.close()


def test_groups_beside_torchs_communicators_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a process group, one made by init beside them, and those of DDP's and FSDP's hooks.

    Not a group that init makes with nothing beside it.
    """
    for name in ("RANK", "WORLD_SIZE", "ADASUM_TRANSPORT"):
        monkeypatch.delenv(name, raising=False)
    alone = collectives.init()
    assert not alone.transport.shares_gpu
    assert HookState(process_group=alone).group.transport.shares_gpu
    collectives.shutdown()
    first = collectives.init()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        assert collectives.from_process_group(dist.group.WORLD).transport.shares_gpu
        assert first.transport.shares_gpu
        collectives.shutdown()
        assert collectives.init().transport.shares_gpu
        collectives.shutdown()
        assert collectives.init(process_group=dist.group.WORLD).transport.shares_gpu
        assert HookState(Sum).group.transport.shares_gpu
    finally:
        collectives.shutdown()
        collectives.from_process_group(dist.group.WORLD).close()
        dist.destroy_process_group()


def test_groups_of_one_process_share_the_stream_of_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever they were made from; another device has another one."""
    streams.install(monkeypatch)
    made: list[Any] = []

    def backend(device: torch.device, *, stream: Any) -> None:
        made.append((device, stream))

    monkeypatch.setattr(transport_selection, "CupyBackend", backend)
    monkeypatch.setattr(transport_selection, "NcclTransport", lambda host, *_, **__: host)
    monkeypatch.setattr(transport_selection, "_gpu_report", lambda: ["", "", True])
    start = Call("init", options={"transport": "nccl"})
    worlds = [ThreadWorld(2) for _ in range(2)]

    def main(rank: int) -> None:
        for world in worlds:
            gloo: Any = world.transport(rank)
            opened = transport_selection.connect(gloo, 20.0, start)
            assert type(opened) is HostTransport
            opened.close()

    with futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(main, range(2)))
    assert len(made) == 4 and len({id(stream) for _, stream in made}) == 1
    device, stream = made[0]
    assert device == torch.device("cuda", 0) and shared_stream(device) is stream
    assert shared_stream(torch.device("cuda", 1)) is not stream
    shared_stream.cache_clear()
