"""Ranks that share memory: late ones, ends, interrupts, forks, causes."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from collectives import CollectiveTimeoutError, TransportError
from collectives.transport.channels import SLOT_BYTES, SLOTS, Channel
from tests.collectives.transport.thread_ranks import (
    TIMEOUT,
    both,
    connect,
    exchange,
    noise,
    poisoned,
)


@both
def test_a_late_rank_is_named(kind: str) -> None:
    first, _, third = connect(3, kind)
    start = time.monotonic()
    with pytest.raises(CollectiveTimeoutError, match=r"rank 2 got .* rank 1 in a step .* 0\.3 s"):
        exchange(third, [], [(1, poisoned(4))], timeout=0.3)
    assert 0.3 <= time.monotonic() - start < 2.0
    # The cause reaches those who wait for that rank, at once.
    with pytest.raises(CollectiveTimeoutError, match=r"from rank 2 in a step: rank 2 .* rank 1"):
        exchange(first, [], [(2, poisoned(4))])
    assert time.monotonic() - start < 2.0


@both
def test_a_receiver_that_takes_nothing_is_named(kind: str) -> None:
    first, _ = connect(2, kind)
    length = SLOTS * SLOT_BYTES + 1
    with pytest.raises(CollectiveTimeoutError, match="rank 0 got no answer from rank 1"):
        exchange(first, [(1, noise(length, 0))], [], timeout=0.2)


@both
@pytest.mark.parametrize("long", [False, True])
def test_what_was_sent_before_the_end_arrives(kind: str, long: bool) -> None:
    """The sender closes with messages of its peer unread."""
    length = (SLOTS - 1) * SLOT_BYTES if long else 5
    first, second = connect(2, kind)
    exchange(second, [(0, noise(7, 1))], [])
    exchange(first, [(1, noise(length, 2)), (1, noise(9, 3))], [])
    first.close()
    got = [poisoned(length), poisoned(9)]
    for tensor in got:
        exchange(second, [], [(0, tensor)])
    assert torch.equal(got[0], noise(length, 2)) and torch.equal(got[1], noise(9, 3))
    start = time.monotonic()
    with pytest.raises(CollectiveTimeoutError, match="rank 0 has ended"):
        exchange(second, [], [(0, poisoned(1))])
    assert time.monotonic() - start < 1.0
    with pytest.raises(TransportError, match="cannot be used"):
        exchange(first, [(1, noise(1, 0))], [])


@both
def test_sending_to_a_rank_that_has_ended(kind: str) -> None:
    first, second = connect(2, kind)
    first.close()
    with pytest.raises(CollectiveTimeoutError, match="from rank 0 in a step: rank 0 has ended"):
        exchange(second, [(0, noise(5, 0))], [])


@both
def test_an_interrupt_is_given_to_peers_as_the_reason(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = connect(2, kind)

    def interrupt(channel: Channel) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(Channel, "advance", interrupt)
    with pytest.raises(KeyboardInterrupt):
        exchange(first, [(1, noise(5, 0))], [])
    monkeypatch.undo()
    with pytest.raises(CollectiveTimeoutError, match="KeyboardInterrupt"):
        exchange(second, [(0, noise(5, 0))], [(0, poisoned(5))])


@both
def test_rank_that_aborts_ends_waits_for_others(kind: str) -> None:
    """Rank 2 waits for rank 1, which lives and says nothing."""
    first, second, third = connect(3, kind)
    start = time.monotonic()
    threading.Timer(0.1, lambda: first.abort("a fault of its own")).start()
    with pytest.raises(CollectiveTimeoutError, match="from rank 0 in a step: a fault of its own"):
        exchange(third, [], [(1, poisoned(5))])
    assert time.monotonic() - start < 2.0
    assert second.gone() in (0, 2) and second.why_gone(0) == "a fault of its own"


def test_process_that_is_killed_is_noticed_while_its_peer_waits() -> None:
    """As its end is seen on a pidfd; the others' transports are those of this process."""
    first, second = connect(2)
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        (own,) = first._pidfds
        other = os.pidfd_open(child)
        os.dup2(other, own)
        os.close(other)
        assert first.gone() is None
        threading.Timer(0.1, lambda: os.kill(child, signal.SIGKILL)).start()
        start = time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match="rank 1 in a step: rank 1 has ended"):
            exchange(first, [], [(1, poisoned(5))])
        assert time.monotonic() - start < TIMEOUT / 4
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    # Which passes the cause on.
    with pytest.raises(CollectiveTimeoutError, match=r"rank 0 in a step: .*rank 1 has ended"):
        exchange(second, [], [(0, poisoned(5))])
