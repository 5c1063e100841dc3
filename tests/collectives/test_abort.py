"""`Group.abort`: from any thread, at any time, and all ranks learn of it at once."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from collectives import CollectiveError, Group, TransportError, run_threads
from collectives.call import Call
from tests.collectives.consistency.ranks import everywhere, run

# Far more than the 0.1 s after which a wait looks whether it was interrupted, on a busy machine.
SOON = 10.0
TIMEOUT = 60.0


@everywhere
def test_abort_while_a_call_waits_ends_it_and_the_peers_calls_with_the_reason(way: str) -> None:
    """Rank 2 comes to the call after the abort, rank 1 waits in it."""
    aborted = threading.Event()

    def job(group: Group) -> tuple[str, float]:
        start = time.monotonic()
        if group.rank == 0:
            works: Any = [group.all_reduce(torch.ones(5), async_op=True) for _ in range(3)]
            time.sleep(0.2)
            threads = [threading.Thread(target=group.abort, args=("disk full",)) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            group.abort("a second time")
            aborted.set()
            for work in works:
                with pytest.raises(TransportError, match=r"rank 0 called abort\(\): disk full"):
                    work.wait()
        if group.rank == 2:
            aborted.wait()
        with pytest.raises(CollectiveError) as caught:
            group.all_reduce(torch.ones(5))
        # Nothing can be called afterwards, on any rank.
        with pytest.raises(TransportError, match="unusable"):
            group.barrier()
        return str(caught.value), time.monotonic() - start

    answers = run(way, 3, job, timeout=TIMEOUT)
    assert all(seconds < SOON for _, seconds in answers)
    # Where threads exchange messages alone the tests' transport does not pass reasons on.
    told = answers[:1] if way == "messages" else answers
    assert all("rank 0 called abort(): disk full" in text for text, _ in told)


@everywhere
def test_abort_by_the_thread_that_runs_the_call_ends_the_group(way: str) -> None:
    """As a signal's handler does: nothing may wait for the call that it has interrupted."""

    def job(group: Group) -> None:
        if group.rank == 0:
            group._calls.queue.run(Call("mine"), lambda: group.abort("by a handler"))
        for _ in range(2):
            with pytest.raises(CollectiveError):
                group.all_reduce(torch.ones(3), name="behind")
        if group.rank == 0:
            with pytest.raises(TransportError, match=r"unusable .* by a handler"):
                group.barrier()

    start = time.monotonic()
    run(way, 2, job, timeout=TIMEOUT)
    assert time.monotonic() - start < SOON


def test_abort_of_a_group_is_one_of_its_parts_and_not_the_reverse() -> None:
    ended = threading.Barrier(2)

    def main(group: Group) -> None:
        first, second = group.split([0, 1]), group.split([1, 0])
        assert first is not None and second is not None
        group.barrier()
        ended.wait(SOON)
        if group.rank == 0:
            first.abort("of a part")
        with pytest.raises(CollectiveError, match="of a part"):
            first.barrier()
        group.barrier()
        ended.wait(SOON)
        if group.rank == 0:
            group.abort("of all")
        for each in (second, group):
            with pytest.raises(CollectiveError, match="of all"):
                each.barrier()

    run_threads(2, main, timeout=TIMEOUT)


def test_abort_of_a_closed_group_does_nothing_and_a_bad_reason_is_refused() -> None:
    kept: list[Group] = []

    def main(group: Group) -> None:
        with pytest.raises(TypeError, match="reason must be a str, got int"):
            group.abort(1)  # type: ignore[arg-type]
        group.barrier()
        kept.append(group)

    run_threads(2, main)
    for group in kept:
        group.abort("too late")
        with pytest.raises(TransportError, match="was shut down"):
            group.barrier()
