"""Ranks that start different requests: the same error on all, on every transport."""

from __future__ import annotations

import random
from contextlib import nullcontext

import pytest
import torch

from collectives import (
    Average,
    CollectiveMismatchError,
    Group,
    Sum,
)
from tests.collectives.consistency.ranks import run, start_and_wait
from tests.frozen.calls import line


@pytest.mark.parametrize("way", ["threads", "shm", "messages"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_calls_in_any_order_are_the_same_call_or_an_error_on_all(way: str, size: int) -> None:
    """Requests and direct calls, drawn by each rank; most often all draw alike."""
    rounds = 60
    draws = [random.Random(seed) for seed in range(size)]
    common = random.Random(99)
    plan = []
    for _ in range(rounds):
        alike, choice = common.random() < 0.6, common.randrange(5)
        plan.append([choice if alike else draw.randrange(5) for draw in draws])

    def job(group: Group) -> None:
        tensors = [torch.empty(count) for count in (1, 300, 20_000)]
        requests = [group.all_reduce_init(tensor, algorithm="rechd") for tensor in tensors]
        for picks in plan:
            mine = picks[group.rank]
            tensor = tensors[mine] if mine < 3 else torch.empty(7)
            tensor.fill_(1.0)
            alike = len({*picks}) == 1
            with nullcontext() if alike else pytest.raises(CollectiveMismatchError):
                if mine < 3:
                    start_and_wait(requests[mine])
                else:
                    group.all_reduce(tensor, Average if mine == 4 else Sum)
            assert bool((tensor == (size if alike and mine != 4 else 1.0)).all())

    run(way, size, job)


@pytest.mark.parametrize("kind", ["all_reduce_init", "run"])
def test_call_of_all_ranks_is_a_mismatch_while_a_rank_has_joined(kind: str) -> None:
    def job(group: Group) -> None:
        given = [line(2)] if kind == "run" else []
        with pytest.raises(CollectiveMismatchError, match=rf"{kind}.*while rank 1 has joined"):
            group.join() if group.rank else getattr(group, kind)(*given, torch.ones(4))

    run("threads", 2, job)
