"""Closing a group with calls under way, and how many calls may be."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import deque
from typing import Any

import pytest
import torch

import collectives
from collectives import Group, TransportError, run_threads
from collectives.transport import ThreadTransport, ThreadWorld
from collectives.worker import Worker
from tests.collectives.consistency.ranks import everywhere, run
from tests.collectives.transport.thread_ranks import together


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

    def main(rank: int) -> Any:
        group = Group(Slow(world, rank), timeout=Slow.TIMEOUT, local_rank=rank, local_size=2)
        return job(group)

    return together(*(lambda rank=rank: main(rank) for rank in range(2)))


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


def test_close_after_a_call_whose_error_was_raised_counts_none_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever runs a call takes it from the queue after its wait() may have returned."""
    raised = threading.Event()

    class Jobs(deque[Any]):
        def popleft(self) -> Any:
            raised.wait(5.0)
            return super().popleft()

    def fail() -> None:
        raise ValueError("no")

    worker = Worker("slow")
    monkeypatch.setattr(worker, "_jobs", Jobs())
    with pytest.raises(ValueError, match="no"):
        worker.submit(fail).wait()
    assert worker._jobs
    threading.Timer(0.2, raised.set).start()
    assert worker.close(5.0) == []


def test_close_waits_for_one_call_as_long_as_its_steps_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collectives.worker, "_CLOSE_SECONDS", 0.1)

    def job(group: Group) -> float:
        # As many steps as chunks, nearly, of which each takes a part of the timeout.
        schedule = collectives.schedules.ring.linear_all_reduce(2, 20)
        work = group.run(schedule, torch.ones(40), async_op=True)
        group.close()
        return work.wait()[0].item()

    start = time.monotonic()
    assert run_slowly(job) == [2.0] * 2
    assert time.monotonic() - start > 2 * Slow.TIMEOUT


def test_close_raises_how_many_calls_were_lost() -> None:
    """Another rank does not make them."""
    done = threading.Event()

    def job(group: Group) -> Any:
        if group.rank == 1:
            assert done.wait(30.0)
            return None
        works = [group.all_reduce(torch.ones(3), async_op=True) for _ in range(4)]
        with pytest.raises(TransportError, match=r"4 asynchronous calls were .* lost.*rank 1"):
            group.close()
        done.set()
        assert group.closed
        for work in works:
            with pytest.raises(collectives.CollectiveError):
                work.wait()
        group.close()
        return None

    run_threads(2, job, timeout=1.0)


def test_close_raises_of_a_call_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives.worker, "_CLOSE_SECONDS", 0.1)
    monkeypatch.setattr(collectives.worker, "CHECK_SECONDS", 0.1)
    gate = threading.Event()
    group = Group(ThreadWorld(1).transport(0), timeout=0.2, local_rank=0, local_size=1)
    group.all_reduce(torch.ones(3), async_op=True).add_done_callback(lambda: None)
    group._calls.queue._worker.submit(lambda: gate.wait(30.0))
    behind = group.all_reduce(torch.ones(3), async_op=True)
    with pytest.raises(TransportError, match=r"2 asynchronous calls were .* they did not end"):
        group.close()
    gate.set()
    behind.wait()


def test_close_in_a_callback_says_what_it_does_not_wait_for() -> None:
    group = Group(ThreadWorld(1).transport(0), timeout=5.0, local_rank=0, local_size=1)
    gate, said = threading.Event(), []
    first = group._calls.queue._worker.submit(lambda: gate.wait(30.0))

    def close() -> None:
        with pytest.raises(TransportError, match="1 asynchronous call was") as caught:
            group.close()
        said.append(str(caught.value))

    first.add_done_callback(close)
    group.all_reduce(torch.ones(3), async_op=True)
    gate.set()
    group._calls.queue._worker._thread.join(10.0)  # type: ignore[union-attr]
    assert len(said) == 1


def test_close_after_abort_says_nothing_of_the_calls_that_it_ended() -> None:
    def job(group: Group) -> None:
        if group.rank == 0:
            group.all_reduce(torch.ones(3), async_op=True)
            group.abort("enough")
            group.close()

    run_threads(2, job, timeout=5.0)


def test_error_of_a_thread_rank_that_closes_with_calls_lost_is_its_own() -> None:
    def job(group: Group) -> None:
        if group.rank == 0:
            group.all_reduce(torch.ones(3), async_op=True)
            raise ZeroDivisionError("the user's")
        group.barrier()

    with pytest.raises(ZeroDivisionError, match="the user's"):
        run_threads(2, job, timeout=5.0)


def test_call_beyond_the_bound_waits_for_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives.worker, "MAX_QUEUED", 3)
    worker, gate, queued = Worker("test"), threading.Event(), threading.Event()
    worker.submit(lambda: gate.wait(30.0))
    works = [worker.submit(lambda: 7) for _ in range(2)]

    def submit() -> None:
        works.append(worker.submit(lambda: 8))
        queued.set()

    thread = threading.Thread(target=submit, daemon=True)
    thread.start()
    assert not queued.wait(0.3)
    gate.set()
    assert queued.wait(10.0)
    thread.join(10.0)
    assert [work.wait() for work in works] == [7, 7, 8]
    worker.close(10.0)


def test_call_beyond_the_bound_in_a_callback_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collectives.worker, "MAX_QUEUED", 2)
    worker, gate, works = Worker("test"), threading.Event(), []
    first = worker.submit(lambda: gate.wait(30.0))
    first.add_done_callback(lambda: works.extend(worker.submit(lambda: 7) for _ in range(5)))
    last = worker.submit(lambda: 8)
    gate.set()
    assert last.wait() == 8
    assert [work.wait() for work in works] == [7] * 5
    worker.close(10.0)


def test_callback_that_wants_the_callers_lock_does_not_block_a_call_beyond_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collectives.worker, "MAX_QUEUED", 1)
    worker, lock = Worker("test"), threading.Lock()
    with lock:
        for _ in range(3):
            work = worker.submit(lambda: 7)
            work.add_done_callback(lambda: lock.acquire(timeout=30.0) and lock.release())
    assert work.wait() == 7
    worker.close(10.0)


@everywhere
def test_many_more_calls_than_the_bound_are_all_carried_out(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives.worker, "MAX_QUEUED", 4)

    def job(group: Group) -> list[float]:
        works = [group.all_reduce(torch.ones(3), async_op=True) for _ in range(50)]
        return [work.wait()[0].item() for work in works]

    assert run(way, 2, job) == [[2.0] * 50] * 2


def test_closed_group_is_freed_at_once_without_a_garbage_collection() -> None:
    """Else its sockets would stay open until one: its queue of calls holds the transport."""

    def job(group: Group) -> weakref.ref[object]:
        group.all_reduce(torch.ones(3))
        group.all_reduce(torch.ones(3), async_op=True).wait()
        return weakref.ref(group._calls.queue)

    gc.collect()
    gc.disable()
    try:
        assert [each() for each in collectives.run_threads(2, job)] == [None, None]
    finally:
        gc.enable()
