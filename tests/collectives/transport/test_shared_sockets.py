"""Groups that are split from one share its sockets: order, ends, interrupts, descriptors."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from collectives import CollectiveTimeoutError, TransportError
from collectives.transport import ConnectionTransport
from collectives.transport.connections import transport as transport_module
from tests.collectives.transport.test_connection_failures import Tampered
from tests.collectives.transport.thread_ranks import (
    TIMEOUT,
    connect,
    exchange,
    noise,
    poisoned,
    together,
)

# More than the kernel holds.
LONG = 32 * 2**20


def split(transports: list[ConnectionTransport], ranks: list[int]) -> list[ConnectionTransport]:
    """A part's transports, in its order."""
    return together(*(lambda r=r: transports[r].split(ranks, TIMEOUT) for r in ranks))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def send(transport: ConnectionTransport, data: torch.Tensor, **options: Any) -> None:
    exchange(transport, [(1 - transport.rank, data)], [], **options)


def receive(transport: ConnectionTransport, length: int, **options: Any) -> torch.Tensor:
    got = poisoned(length)
    exchange(transport, [], [(1 - transport.rank, got)], **options)
    return got


def test_parts_open_no_socket_to_a_peer() -> None:
    """Two descriptors wake each rank's thread, in the whole and in each part; nothing is left."""
    gc.collect()
    before = descriptors()
    whole = connect(4, kinds=("tcp",))
    assert descriptors() - before == 4 * 3
    parts = [split(whole, [*range(4)]) for _ in range(5)]
    assert descriptors() - before == 4 * 3 + 4 * 2 * (1 + len(parts))
    inner = split(parts[0], [3, 1])
    assert descriptors() - before == 4 * 3 + 4 * 2 * (1 + len(parts)) + 2 * 2
    assert [sorted(each.connected_peers) for each in inner] == [[1], [0]]
    together(lambda: send(inner[0], noise(9, 1)), lambda: receive(inner[1], 9))
    for each in [*inner, *(each for part in parts for each in part)]:
        each.close()
    assert descriptors() - before == 4 * 3 + 4 * 2
    for each in whole:
        each.close()
    assert descriptors() == before


def test_parts_that_are_used_at_once_in_any_order_keep_their_messages_apart() -> None:
    """A thread for each of four transports on every rank, started in another order on each."""
    whole = connect(3, kinds=("tcp",))
    groups = [whole, *(split(whole, order) for order in ([0, 1, 2], [2, 0, 1]))]
    groups.append(split(groups[1], [1, 2, 0]))
    plan = random.Random(11)
    lengths = [[plan.choice([1, 70, 5000, 2**20]) for _ in range(12)] for _ in groups]

    def play(number: int, transport: ConnectionTransport) -> None:
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
    whole = connect(2, kinds=("tcp",))
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


@pytest.mark.parametrize("waits", ["to receive", "to send"])
def test_what_another_thread_does_for_a_thread_that_falls_asleep_wakes_it(
    waits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its last look at the socket and its sleep, after which nothing more comes."""
    whole = connect(2, kinds=("tcp",))
    part = split(whole, [0, 1])
    asleep, done, real = threading.Event(), threading.Event(), transport_module.wait_for_any

    def late(connections: Any, *given: Any) -> bool:
        if connections[0] in (sleeper._connections.values()) and not done.is_set():
            asleep.set()
            done.wait(TIMEOUT)
        return real(connections, *given)

    monkeypatch.setattr(transport_module, "wait_for_any", late)
    if waits == "to receive":
        sleeper = part[1]

        def other() -> None:
            asleep.wait(TIMEOUT)
            send(part[0], noise(9, 1))
            send(whole[0], noise(3, 2))
            receive(whole[1], 3)
            done.set()

        together(other, lambda: receive(sleeper, 9, timeout=TIMEOUT / 4))
        return
    sleeper = part[0]

    def sender() -> None:
        asleep.wait(TIMEOUT)
        # Sends the rest of the part's message first.
        send(whole[0], noise(3, 2))
        done.set()

    def receiver() -> None:
        asleep.wait(TIMEOUT)
        receive(whole[1], 3)
        receive(part[1], LONG)

    together(sender, receiver, lambda: send(sleeper, noise(LONG, 1), timeout=TIMEOUT / 4))


def test_a_message_for_a_part_that_a_rank_has_not_made_yet_waits_for_it() -> None:
    """The ranks return from a split at different times."""
    whole = connect(2, kinds=("tcp",))
    real, late = transport_module.ConnectionTransport._share, threading.Event()

    def slowly(self: ConnectionTransport, *arguments: Any) -> Any:
        (connection,) = self._connections.values()
        channel = type(connection).channel

        def wait(*given: Any) -> Any:
            if self.rank == 1:
                late.wait(TIMEOUT)
                # Reads what is for the part on behalf of the whole.
                receive(whole[1], 3)
            return channel(connection, *given)

        connection.channel = wait
        return real(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConnectionTransport, "_share", slowly)
        patch.setattr(transport_module, "open_connections", _shared_alone)

        def first() -> None:
            part = whole[0].split([0, 1], TIMEOUT)
            send(part, noise(7, 4))
            send(whole[0], noise(3, 5))
            late.set()

        def second() -> torch.Tensor:
            return receive(whole[1].split([0, 1], TIMEOUT), 7)

        assert torch.equal(together(first, second)[1], noise(7, 4))


def _shared_alone(*_: Any, shared: Any, **__: Any) -> Any:
    return dict(shared), None, True


def test_a_part_that_fails_leaves_the_whole_and_other_parts() -> None:
    """And its peer is told the cause, while it waits as well as later."""
    whole = connect(3, kinds=("tcp",))
    parts = [split(whole, [0, 1, 2]) for _ in range(2)]
    told: list[str] = []

    def fail() -> None:
        with pytest.raises(CollectiveTimeoutError, match=r"from rank 2 in a step within 0\.2 s"):
            exchange(parts[0][0], [], [(2, poisoned(4))], timeout=0.2)

    def wait() -> None:
        start = time.monotonic()
        with pytest.raises(CollectiveTimeoutError) as caught:
            exchange(parts[0][1], [], [(0, poisoned(4))])
        assert time.monotonic() - start < TIMEOUT / 4
        told.append(str(caught.value))

    together(fail, wait)
    assert parts[0][2].gone() == 0 and "within 0.2 s" in parts[0][2].why_gone(0)
    assert "rank 0 got no answer from rank 2" in told[0]
    for group in (whole, parts[1]):
        together(
            lambda group=group: exchange(group[0], [(1, noise(LONG, 3))], []),
            lambda group=group: exchange(group[1], [], [(0, poisoned(LONG))]),
        )
        assert [each.gone() for each in group] == [None] * 3


def test_a_part_that_fails_within_a_message_leaves_the_whole() -> None:
    """The rest of the message goes out, and the cause behind it, before the whole's next."""
    whole = connect(2, kinds=("tcp",))
    part = split(whole, [0, 1])
    with pytest.raises(CollectiveTimeoutError, match="rank 1 in a step within"):
        send(part[0], noise(LONG, 1), timeout=0.2)
    together(lambda: send(whole[0], noise(100, 2)), lambda: receive(whole[1], 100))
    receive(part[1], LONG)
    with pytest.raises(CollectiveTimeoutError, match="rank 0 in a step: rank 0 got no answer"):
        receive(part[1], 5)


def test_a_whole_that_is_closed_first_leaves_its_parts() -> None:
    """As parts that have sockets of their own: `Group.close` ends them first."""
    whole = connect(2, kinds=("tcp",))
    part = split(whole, [1, 0])
    for each in whole:
        each.close()
    with pytest.raises(TransportError, match="rank 0 has closed it"):
        send(whole[0], noise(3, 0))
    together(lambda: send(part[0], noise(3, 1)), lambda: receive(part[1], 3))
    part[0].close()
    with pytest.raises(CollectiveTimeoutError, match="from rank 1 in a step: rank 1 has ended"):
        receive(part[1], 3)


def test_what_was_sent_before_a_part_was_closed_arrives() -> None:
    whole = connect(2, kinds=("tcp",))
    part = split(whole, [0, 1])
    send(part[0], noise(50, 1))
    part[0].close()
    send(whole[0], noise(5, 2))
    # Read by the whole on behalf of the part.
    receive(whole[1], 5)
    assert torch.equal(receive(part[1], 50), noise(50, 1))
    with pytest.raises(CollectiveTimeoutError, match="rank 0 has ended"):
        receive(part[1], 5)


def test_the_end_of_a_rank_ends_all_parts() -> None:
    whole = connect(2, kinds=("tcp",))
    part = split(whole, [0, 1])
    (connection,) = whole[0]._connections.values()
    # What the kernel does at the end of a process.
    connection._socket.shutdown(2)
    for group in (part, whole):
        with pytest.raises(CollectiveTimeoutError, match="from rank 0 in a step"):
            receive(group[1], 5)


@pytest.mark.parametrize("method", ["sendmsg", "recvmsg_into"])
def test_an_interrupt_within_a_message_ends_all_parts_and_becomes_no_data(method: str) -> None:
    whole = connect(2, kinds=("tcp",))
    part = split(whole, [0, 1])
    (connection,) = whole[0]._connections.values()

    def interrupted(real: Callable[..., Any], *given: Any) -> Any:
        real(*given)
        raise KeyboardInterrupt

    connection._socket = Tampered(connection._socket, method, interrupted)
    send(whole[1], noise(5, 0))
    with pytest.raises(KeyboardInterrupt):
        exchange(whole[0], [(1, noise(5, 0))], [(1, poisoned(5))])
    for each, end in ((part[0], "torn"), (part[1], "rank 0 has ended")):
        with pytest.raises(CollectiveTimeoutError, match=end):
            receive(each, 5)


def test_a_forked_child_leaves_shared_sockets_alone() -> None:
    whole = connect(2, kinds=("tcp",))
    part = split(whole, [0, 1])
    child = os.fork()
    if child == 0:
        # Neither reads, nor tells the peer.
        part[0].close()
        os._exit(0)
    os.waitpid(child, 0)
    together(lambda: send(part[0], noise(5, 1)), lambda: receive(part[1], 5))
    together(lambda: send(whole[0], noise(5, 1)), lambda: receive(whole[1], 5))


def test_ranks_without_all_connections_make_parts_of_their_own() -> None:
    """A part of them may not reach its ranks over the whole's connections."""
    whole = connect(3, unwilling=(1,), kinds=("tcp",))
    part = split(whole, [0, 2])
    assert part[0].connected_peers == {1}
    before = part[0]._connections[1].fileno()
    assert before != whole[0]._connections[2].fileno()
