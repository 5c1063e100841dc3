"""What ranks are told where they call different things."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from collectives import CollectiveMismatchError, Group, run_threads
from tests.collectives.consistency.ranks import run
from tests.collectives.queues import hold


@pytest.mark.parametrize(
    "options",
    [({}, {"names": ["tensor 0"]}), ({"name": ""}, {"name": "''"})],
    ids=["tensor", "call"],
)
def test_calls_that_only_look_alike_are_a_mismatch_and_the_group_stays_usable(
    options: tuple[Any, Any],
) -> None:
    def job(group: Group) -> None:
        with pytest.raises(CollectiveMismatchError, match=r"rank 0 and rank 1 call .* look alike"):
            group.grouped_all_reduce([torch.ones(2)], **options[group.rank])
        group.barrier()

    run_threads(2, job)


def queued(group: Group, calls: list[Callable[[], Any]]) -> list[Any]:
    """The calls' answers or errors; all are queued before the first one runs."""
    gate = hold(group)
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


@pytest.mark.parametrize("odd", [0, 1, 4])
def test_queued_call_that_differs_is_an_error_alone(odd: int) -> None:
    """That call is an error on every rank, those before and after it are right."""

    def job(group: Group) -> list[str]:
        answers = queued(group, calls_of(group, 7, odd if group.rank == 1 else None))
        for i, answer in enumerate(answers):
            if i != odd:
                assert torch.equal(answer, torch.full((i,), 3.0)), i
        return [str(answers[odd])]

    texts = run("messages", 3, job)
    assert texts[0] == texts[1] == texts[2]
    assert "ranks disagree: rank 0 calls" in texts[0][0] and "rank 1" in texts[0][0]


def test_queues_of_other_lengths_give_each_sum() -> None:
    """What a rank has not called yet is negotiated when it does."""

    def job(group: Group) -> None:
        calls = calls_of(group, 20)
        first = (3, 11, 20)[group.rank]
        answers = queued(group, calls[:first])
        answers += queued(group, calls[first:])
        assert [float(answer.sum()) for answer in answers] == [3.0 * i for i in range(20)]

    run("messages", 3, job)


def test_rank_that_joins_behind_its_queued_calls_adds_zeros() -> None:
    def job(group: Group) -> None:
        calls = calls_of(group, 6)
        if group.rank == 1:
            answers = queued(group, calls[:2])
            assert group.join() == 2
            assert [float(answer.sum()) for answer in answers] == [0.0, 3.0]
        else:
            answers = queued(group, calls)
            assert [float(a.sum()) for a in answers] == [0.0, 3.0, 4.0, 6.0, 8.0, 10.0]
            group.join()

    run("messages", 3, job)
