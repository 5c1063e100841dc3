"""Transports that are split from one have memory of their own: order, ends, descriptors."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from collectives import CollectiveTimeoutError
from collectives.transport import Transport
from collectives.transport.channels import SLOT_BYTES, SLOTS
from tests.collectives.transport.thread_ranks import (
    TIMEOUT,
    connect,
    exchange,
    noise,
    poisoned,
    together,
)

# More than the slots hold.
LONG = 2 * SLOTS * SLOT_BYTES + 5


def split(transports: list[Transport], ranks: list[int]) -> list[Transport]:
    """A part's transports, in its order."""
    return together(*(lambda r=r: transports[r].split(ranks, TIMEOUT) for r in ranks))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def send(transport: Transport, data: torch.Tensor, **options: Any) -> None:
    exchange(transport, [(1 - transport.rank, data)], [], **options)


def receive(transport: Transport, length: int, **options: Any) -> torch.Tensor:
    got = poisoned(length)
    exchange(transport, [], [(1 - transport.rank, got)], **options)
    return got


def test_parts_that_are_used_at_once_in_any_order_keep_their_messages_apart() -> None:
    """A thread for each of four transports on every rank, started in another order on each."""
    whole = connect(3)
    groups = [whole, *(split(whole, order) for order in ([0, 1, 2], [2, 0, 1]))]
    groups.append(split(groups[1], [1, 2, 0]))
    plan = random.Random(11)
    lengths = [[plan.choice([1, 70, 5000, 2**20]) for _ in range(12)] for _ in groups]

    def play(number: int, transport: Transport) -> None:
        me, peers = transport.rank, [p for p in range(3) if p != transport.rank]
        for step, length in enumerate(lengths[number]):
            seed = 1000 * number + 10 * step
            got = {peer: poisoned(length) for peer in peers}
            sent = noise(length, seed + me)
            exchange(transport, [(p, sent) for p in peers], [*got.items()])
            for peer, tensor in got.items():
                assert torch.equal(tensor, noise(length, seed + peer))

    calls: list[Callable[[], None]] = []
    for rank in range(3):
        mine = [
            (number, next(t for t in group if t.rank == at))
            for number, group in enumerate(groups)
            for at in [(rank, rank, [1, 2, 0][rank], [2, 0, 1][rank])[number]]
        ]
        plan.shuffle(mine)
        calls += [lambda n=n, t=t: play(n, t) for n, t in mine]
    together(*calls)


@pytest.mark.parametrize("length", [5, LONG])
def test_ranks_that_use_two_groups_in_different_orders_go_on(length: int) -> None:
    """A message of one group is on the way, whole or in part, while its peer is in the other."""
    whole = connect(2)
    part = split(whole, [0, 1])
    begun = threading.Event()

    def first() -> None:
        ahead = threading.Thread(target=send, args=(part[0], noise(length, 1)))
        ahead.start()
        time.sleep(0.1)
        begun.set()
        send(whole[0], noise(length, 2))
        ahead.join()

    def second() -> None:
        begun.wait(TIMEOUT)
        assert torch.equal(receive(whole[1], length), noise(length, 2))
        assert torch.equal(receive(part[1], length), noise(length, 1))

    together(first, second)


def test_a_part_that_fails_leaves_the_whole_and_other_parts() -> None:
    """And its peer gets the reason, while it waits as well as later."""
    whole = connect(3)
    parts = [split(whole, [0, 1, 2]) for _ in range(2)]
    reasons: list[str] = []

    def fail() -> None:
        with pytest.raises(CollectiveTimeoutError, match=r"from rank 2 in a step within 0\.2 s"):
            exchange(parts[0][0], [], [(2, poisoned(4))], timeout=0.2)

    def wait() -> None:
        start = time.monotonic()
        with pytest.raises(CollectiveTimeoutError) as caught:
            exchange(parts[0][1], [], [(0, poisoned(4))])
        assert time.monotonic() - start < TIMEOUT / 4
        reasons.append(str(caught.value))

    together(fail, wait)
    assert parts[0][2].gone() == 0 and "within 0.2 s" in parts[0][2].why_gone(0)
    assert "rank 0 got no answer from rank 2" in reasons[0]
    for group in (whole, parts[1]):
        together(
            lambda group=group: exchange(group[0], [(1, noise(LONG, 3))], []),
            lambda group=group: exchange(group[1], [], [(0, poisoned(LONG))]),
        )
        assert [each.gone() for each in group] == [None] * 3


def test_parts_of_ranks_on_two_hosts_share_memory_where_the_whole_does() -> None:
    whole = connect(4, hosts=(0, 1, 0, 1))
    assert [each.near for each in whole] == [(0, 2), (1, 3)] * 2
    assert [each.symmetric_memory for each in whole] == [None] * 4
    near, far = split(whole, [2, 0]), split(whole, [1, 2])
    assert all(each.symmetric_memory is not None for each in near)
    # These share none: their messages go as those between the hosts do.
    assert [type(each).__name__ for each in far] == ["ThreadTransport"] * 2
    mixed = split(whole, [3, 0, 1])
    assert [each.near for each in mixed] == [(0, 2), (1,), (0, 2)]
    assert mixed[1].named([0]) == "rank 3"
    got = {1: poisoned(LONG), 2: poisoned(LONG)}
    together(
        lambda: exchange(mixed[0], [(1, noise(LONG, 1)), (2, noise(LONG, 2))], []),
        lambda: exchange(mixed[1], [], [(0, got[1])]),
        lambda: exchange(mixed[2], [], [(0, got[2])]),
    )
    assert all(torch.equal(got[seed], noise(LONG, seed)) for seed in (1, 2))
