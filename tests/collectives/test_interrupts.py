"""A rank that is interrupted anywhere: the group works, or is unusable for all; nobody hangs."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from collectives import CollectiveError, Group, Sum
from collectives.transport.process_groups import run_beside
from tests.collectives.consistency.ranks import run
from tests.collectives.interrupts import Interrupt, run_interrupted

NUMEL = 1000
TIMEOUT = 5.0
# What a rank says where it was told that the group is unusable, or that its peer is elsewhere.
REFUSED = "refused"


def calls(group: Group, request: Any) -> None:
    """One of each way to call: in this thread, by the queue, by a request, behind another."""
    for name in ("first", "second"):
        group.all_reduce(torch.ones(NUMEL), name=name)
    group.all_reduce(torch.ones(NUMEL), name="queued", async_op=True).wait()
    request.start()
    request.wait()
    before = group.all_reduce(torch.ones(NUMEL), name="before", async_op=True)
    group.all_reduce(torch.ones(NUMEL), name="behind")
    before.wait()


def attack(group: Group, at: int) -> tuple[int, str]:
    """On rank 0 an Interrupt; then on all ranks a last call. Returns the places and its answer."""
    places = 0
    try:
        request = group.all_reduce_init(torch.ones(NUMEL), Sum, name="request")
        if group.rank == 0:
            places = run_interrupted(lambda: calls(group, request), at)
        else:
            calls(group, request)
    except (Interrupt, CollectiveError):
        pass
    except RuntimeError as error:
        # threading's own, from the start of a thread.
        if str(error) != "release unlocked lock":
            raise
    assert torch.is_grad_enabled()
    tensor = torch.full((NUMEL,), group.rank + 1.0)
    try:
        group.all_reduce(tensor, name="last")
    except CollectiveError:
        return places, REFUSED
    assert tensor.tolist() == [sum(range(1, group.size + 1))] * NUMEL
    return places, "answered"


def bounded(way: str, size: int, at: int) -> list[tuple[int, str]]:
    """`attack` on all ranks, which have ended in time."""
    start = time.monotonic()
    answers: list[tuple[int, str]] = []

    def attack_all() -> None:
        answers.extend(run(way, size, lambda group: attack(group, at), TIMEOUT))

    thread, errors = run_beside(attack_all, f"interrupt at {at}", 3 * TIMEOUT)
    assert not thread.is_alive(), f"place {at} hangs"
    for error in errors:
        raise AssertionError(f"a rank raised, interrupted at place {at}") from error
    # Nobody has waited for a peer's timeout: who is interrupted tells the others, or goes on.
    assert time.monotonic() - start < TIMEOUT, at
    return answers


EVERY = pytest.param(1, marks=pytest.mark.slow, id="everywhere")
WAYS = [("threads", 1), ("threads", 2), ("shm", 2), ("messages", 2)]


@pytest.mark.parametrize("step", [EVERY, pytest.param(13, id="here and there")])
@pytest.mark.parametrize(("way", "size"), WAYS)
def test_interrupt_anywhere_leaves_a_usable_group_or_one_that_refuses(
    way: str, size: int, step: int
) -> None:
    places, answer = bounded(way, size, -1)[0]
    assert answer == "answered" and places > 200
    outcomes = []
    # Another place each time, where not all are tried.
    for at in range(step // 2, places, step):
        answers = [answer for _, answer in bounded(way, size, at)]
        assert answers[0] == "answered" or size > 1, at
        outcomes.append(answers[0])
    assert size == 1 or {*outcomes} <= {"answered", REFUSED}
