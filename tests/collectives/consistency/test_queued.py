"""Calls that wait behind each other are negotiated together, where that takes messages."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from adasum import Adasum
from collectives import CollectiveMismatchError, Group
from collectives.consistency.messages import AHEAD
from collectives.transport import ThreadTransport, ThreadWorld
from tests.collectives.transport.thread_ranks import TIMEOUT, together


class Silent(ThreadTransport):
    """A transport without symmetric memory, which notes the steps of agreements."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        super().__init__(world, rank)
        self.symmetric_memory = None
        self.agreements: list[str] = []

    def exchange(self, sends: Any, recvs: Any, step: str, timeout: float, code: int = 0) -> None:
        if "negotiation" in step:
            self.agreements.append(step.partition("negotiation of ")[2])
        super().exchange(sends, recvs, step, timeout, code)


def run(size: int, job: Callable[[Group, Silent], Any]) -> list[Any]:
    world = ThreadWorld(size)

    def start(rank: int) -> Any:
        transport = Silent(world, rank)
        group = Group(transport, timeout=TIMEOUT)
        try:
            return job(group, transport)
        finally:
            group.close()

    return together(*(lambda rank=rank: start(rank) for rank in range(size)))


def queued(group: Group, calls: list[Callable[[], Any]]) -> list[Any]:
    """The calls' answers or errors; all are queued before the first one runs."""
    gate = threading.Event()
    group._call.queue._worker.submit(lambda: gate.wait(TIMEOUT))
    works = [call() for call in calls]
    gate.set()
    answers = []
    for work in works:
        try:
            answers.append(work.wait())
        except CollectiveMismatchError as error:
            answers.append(error)
    return answers


def calls_of(group: Group, count: int, odd: int | None = None) -> list[Callable[[], Any]]:
    """Sums of ones, call by call one element longer; call `odd` has another length."""
    lengths = [count + 100 if i == odd else i for i in range(count)]
    return [lambda n=n: group.all_reduce(torch.ones(n), async_op=True) for n in lengths]


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("count", [2, AHEAD + 1, 3 * AHEAD])
def test_queued_calls_are_agreed_on_by_one_message(size: int, count: int) -> None:
    def job(group: Group, transport: Silent) -> list[str]:
        for i, answer in enumerate(queued(group, calls_of(group, count))):
            assert torch.equal(answer, torch.full((i,), float(size)))
        seen = list(dict.fromkeys(transport.agreements))
        # And one by one afterwards: each has a message of its own.
        transport.agreements.clear()
        for _ in range(2):
            group.all_reduce(torch.ones(3), Adasum)
        assert len({*transport.agreements}) == 2
        return [step.partition(" (call ")[2] for step in seen]

    for calls in run(size, job):
        numbers = sorted({int(call.partition(")")[0]) for call in calls})
        assert numbers == [*range(0, count, AHEAD + 1)]


@pytest.mark.parametrize("odd", [0, 1, 4])
def test_queued_call_that_differs_is_an_error_alone(odd: int) -> None:
    """That call is an error on every rank, those before and after it are right."""

    def job(group: Group, transport: Silent) -> list[str]:
        answers = queued(group, calls_of(group, 7, odd if group.rank == 1 else None))
        for i, answer in enumerate(answers):
            if i != odd:
                assert torch.equal(answer, torch.full((i,), 3.0)), i
        return [str(answers[odd])]

    texts = run(3, job)
    assert texts[0] == texts[1] == texts[2]
    assert "ranks disagree: rank 0 calls" in texts[0][0] and "rank 1" in texts[0][0]


def test_queues_of_other_lengths_give_each_sum() -> None:
    """What a rank has not called yet is negotiated when it does."""

    def job(group: Group, transport: Silent) -> None:
        calls = calls_of(group, 20)
        first = (3, 11, 20)[group.rank]
        answers = queued(group, calls[:first])
        answers += queued(group, calls[first:])
        assert [float(answer.sum()) for answer in answers] == [3.0 * i for i in range(20)]

    run(3, job)


def test_rank_that_joins_behind_its_queued_calls_adds_zeros() -> None:
    def job(group: Group, transport: Silent) -> None:
        calls = calls_of(group, 6)
        if group.rank == 1:
            answers = queued(group, calls[:2])
            assert group.join() == 2
            assert [float(answer.sum()) for answer in answers] == [0.0, 3.0]
        else:
            answers = queued(group, calls)
            assert [float(a.sum()) for a in answers] == [0.0, 3.0, 4.0, 6.0, 8.0, 10.0]
            group.join()

    run(3, job)
