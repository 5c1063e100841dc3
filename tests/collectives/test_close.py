"""Closing a group with calls under way, and how many calls may be."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

import collectives
from collectives import Group, TransportError, run_threads
from collectives.transport import ThreadTransport, ThreadWorld
from tests.collectives.consistency.ranks import everywhere, run, run_over
from tests.collectives.queues import Queue, hold


class Slow(ThreadTransport):
    """Every step takes a part of the timeout, all together several times that."""

    SECONDS = 0.1
    TIMEOUT = 0.6

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        super().__init__(world, rank)
        self.symmetric_memory = None

    def exchange(self, *args: Any, **options: Any) -> None:
        time.sleep(self.SECONDS)
        super().exchange(*args, **options)


def run_slowly(job: Any) -> list[Any]:
    world = ThreadWorld(2)
    return run_over([Slow(world, rank) for rank in range(2)], job, Slow.TIMEOUT)


@everywhere
def test_close_with_calls_queued_carries_all_of_them_out(way: str) -> None:
    tensors: dict[int, list[torch.Tensor]] = {}

    def job(group: Group) -> None:
        tensors[group.rank] = [torch.full((20_000,), group.rank + 1.0) for _ in range(50)]
        for tensor in tensors[group.rank]:
            group.all_reduce(tensor, async_op=True)

    run(way, 2, job)
    assert all((tensor == 3.0).all() for mine in tensors.values() for tensor in mine)


def test_close_waits_as_long_as_calls_end() -> None:
    """Each within the timeout of a step, and all of them together not."""

    def job(group: Group) -> list[float]:
        works = [group.all_reduce(torch.ones(3), async_op=True) for _ in range(8)]
        group.close()
        return [work.wait()[0].item() for work in works]

    start = time.monotonic()
    assert run_slowly(job) == [[2.0] * 8] * 2
    assert time.monotonic() - start > Slow.TIMEOUT


@pytest.mark.parametrize("count", [1, 4])
@everywhere
def test_close_raises_how_many_calls_were_lost(way: str, count: int) -> None:
    """Another rank does not make them."""
    done = threading.Event()

    def job(group: Group) -> Any:
        if group.rank == 1:
            assert done.wait(10.0)
            return None
        works = [group.all_reduce(torch.ones(3), async_op=True) for _ in range(count)]
        time.sleep(0.05)
        with pytest.raises(TransportError, match=rf"{count} calls? (was|were) .* lost.*rank 1"):
            group.close()
        done.set()
        assert group.closed
        for work in works:
            with pytest.raises(collectives.CollectiveError):
                work.wait()
        group.close()
        return None

    run(way, 2, job, timeout=1.0)


def test_close_raises_of_a_call_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collectives.work._CLOSE_SECONDS", 0.1)
    monkeypatch.setattr("collectives.work.CHECK_SECONDS", 0.1)
    group = Group(ThreadWorld(1).transport(0), timeout=0.2, local_rank=0, local_size=1)
    gate = hold(group)
    behind = group.all_reduce(torch.ones(3), async_op=True)
    with pytest.raises(TransportError, match=r"2 calls were .* they did not end"):
        group.close()
    gate.set()
    behind.wait()


def test_close_after_abort_says_nothing_of_the_calls_that_it_ended() -> None:
    def job(group: Group) -> None:
        if group.rank == 0:
            group.all_reduce(torch.ones(3), async_op=True)
            group.abort("enough")
            group.close()

    run_threads(2, job, timeout=5.0)


def test_call_beyond_the_bound_waits_for_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collectives.work.MAX_QUEUED", 3)
    queue, queued = Queue(), threading.Event()
    gate = hold(queue)
    works = [queue.later(lambda: 7) for _ in range(3)]

    def submit() -> None:
        works.append(queue.later(lambda: 8))
        queued.set()

    thread = threading.Thread(target=submit, daemon=True)
    thread.start()
    assert not queued.wait(0.3)
    gate.set()
    assert queued.wait(10.0)
    thread.join(10.0)
    assert [work.wait() for work in works] == [7, 7, 7, 8]
    queue.close()
