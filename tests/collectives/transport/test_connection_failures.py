"""Connections between threads, through memory and TCP: ends, interrupts, forks, causes."""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from collectives import CollectiveTimeoutError, TransportError
from collectives.transport.connections import transport
from collectives.transport.connections.shm import RING_BYTES, SLOT_BYTES, ShmConnection
from collectives.transport.connections.tcp import LINE_BYTES, TcpConnection
from tests.collectives.transport.thread_ranks import (
    both,
    connect,
    exchange,
    noise,
    poisoned,
    together,
)

CONNECTIONS = {"shm": ShmConnection, "tcp": TcpConnection}


@both
def test_a_late_rank_is_named(kind: str) -> None:
    first, _, third = connect(3, kinds=(kind,))
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
    first, _ = connect(2, kinds=(kind,))
    # More than the ring, or the kernel, holds.
    length = {"shm": RING_BYTES + 1, "tcp": 64 * 2**20}[kind]
    with pytest.raises(CollectiveTimeoutError, match="rank 0 got no answer from rank 1"):
        exchange(first, [(1, noise(length, 0))], [], timeout=0.2)


@both
@pytest.mark.parametrize("long", [False, True])
def test_what_was_sent_before_the_end_arrives(kind: str, long: bool) -> None:
    """The sender closes with messages of its peer unread, which resets the connection."""
    length = 5 if not long else {"shm": 3 * SLOT_BYTES, "tcp": 100_000}[kind]
    first, second = connect(2, kinds=(kind,))
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
    first, second = connect(2, kinds=(kind,))
    first.close()
    if kind == "tcp":
        # The kernel takes it; its answer is the end.
        exchange(second, [(0, noise(5, 0))], [])
        time.sleep(0.2)
    with pytest.raises(CollectiveTimeoutError, match="from rank 0 in a step: rank 0 has ended"):
        exchange(second, [(0, noise(5, 0))], [])


def test_a_reason_comes_after_the_rest_of_a_message() -> None:
    """A rank that gives up within a long message still says why, behind it."""
    first, second = connect(2, kinds=("tcp",))
    sent, got = noise(2**25, 3), poisoned(2**25)

    def give_up() -> None:
        with pytest.raises(CollectiveTimeoutError, match="rank 0 got no answer from rank 1"):
            exchange(first, [(1, sent)], [(1, poisoned(4))], timeout=0.3)

    def late() -> None:
        time.sleep(0.5)
        exchange(second, [], [(0, got)])
        with pytest.raises(CollectiveTimeoutError, match=r"from rank 0 in a step: rank 0 got no"):
            exchange(second, [], [(0, poisoned(3))])

    together(give_up, late)
    assert torch.equal(got, sent)


class Tampered:
    """A socket with one method replaced by `instead`, which is given the real one first."""

    def __init__(self, sock: socket.socket, method: str, instead: Callable[..., Any]) -> None:
        self._socket, self._method, self._instead = sock, method, instead

    def __getattr__(self, asked: str) -> Any:
        real = getattr(self._socket, asked)
        return partial(self._instead, real) if asked == self._method else real


def test_an_interrupt_within_a_message_never_becomes_data() -> None:
    """It can come before the kernel's answer is noted; then where a reason would go is unknown.

    The peer must see the end, not take what follows for the rest of the message.
    """
    first, second = connect(2, kinds=("tcp",))
    calls = iter(range(9))

    def interrupted(real: Callable[..., int], parts: list[memoryview]) -> int:
        count = real([part[:1000] for part in parts])
        if next(calls):
            raise KeyboardInterrupt
        return count

    (connection,) = first._connections.values()
    connection._socket = Tampered(connection._socket, "sendmsg", interrupted)
    with pytest.raises(KeyboardInterrupt):
        exchange(first, [(1, noise(5000, 0))], [])
    with pytest.raises(CollectiveTimeoutError, match="rank 0 has ended"):
        exchange(second, [], [(0, poisoned(5000))])


def test_all_peers_get_the_reason_within_one_limit() -> None:
    """Each of them is in the middle of a message and takes no more of it."""
    first, *others = connect(6, kinds=("tcp",))
    sent = noise(64 * 2**20, 0)
    start = time.monotonic()
    with pytest.raises(CollectiveTimeoutError, match="rank 1, rank 2, rank 3, rank 4, rank 5"):
        exchange(first, [(peer, sent) for peer in range(1, 6)], [], timeout=0.1)
    assert time.monotonic() - start < 0.1 + 3 * transport._REASON_SECONDS
    assert len(others) == 5


def test_to_close_does_not_wait_for_a_peer_that_sends_on() -> None:
    first, second = connect(2, kinds=("tcp",))
    (connection,) = first._connections.values()
    connection._socket = Tampered(connection._socket, "recv", lambda real, count: b"x" * count)
    first.close()
    with pytest.raises(CollectiveTimeoutError, match="rank 0 has ended"):
        exchange(second, [], [(0, poisoned(1))])


@pytest.mark.parametrize("cut", [1, LINE_BYTES - 1, LINE_BYTES, LINE_BYTES + 7])
@pytest.mark.parametrize("length", [1, 5000])
def test_a_reason_that_comes_in_two_pieces(cut: int, length: int) -> None:
    first, second = connect(2, kinds=("tcp",))
    (connection,) = first._connections.values()
    text = "rank 0 got no answer"

    def in_two(real: Callable[..., int], parts: list[memoryview]) -> int:
        whole = b"".join(parts)
        real([whole[:cut]])
        time.sleep(0.05)
        return cut + real([whole[cut:]])

    connection._socket = Tampered(connection._socket, "sendmsg", in_two)

    def receive() -> None:
        with pytest.raises(CollectiveTimeoutError, match=f"rank 0 in a step: {text}$"):
            exchange(second, [], [(0, poisoned(length))])

    together(lambda: first.abort(text), receive)


def test_a_connection_that_breaks_is_named() -> None:
    """As the kernel says it of a network that has gone, in the middle of either direction."""
    for name in ("sendmsg", "recvmsg_into"):
        first, _ = connect(2, kinds=("tcp",))
        (connection,) = first._connections.values()

        def broken(*_: Any) -> int:
            raise OSError(errno.EHOSTUNREACH, "No route to host")

        connection._socket = Tampered(connection._socket, name, broken)
        with pytest.raises(CollectiveTimeoutError, match=r"to rank 1 broke: No route to host"):
            exchange(first, [(1, noise(5, 0))], [(1, poisoned(5))])


@both
def test_an_interrupt_is_given_to_peers_as_the_reason(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = connect(2, kinds=(kind,))

    def interrupt(connection: ShmConnection | TcpConnection) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(CONNECTIONS[kind], "advance", interrupt)
    with pytest.raises(KeyboardInterrupt):
        exchange(first, [(1, noise(5, 0))], [])
    monkeypatch.undo()
    with pytest.raises(CollectiveTimeoutError, match="KeyboardInterrupt"):
        exchange(second, [(0, noise(5, 0))], [(0, poisoned(5))])


@both
def test_a_forked_child_leaves_the_parents_connections_alone(kind: str) -> None:
    """And does not keep them open: the peer sees the end of the parent while the child lives."""
    first, second = connect(2, kinds=(kind,))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            exchange(first, [(1, noise(5, 0))], [])
        except TransportError as error:
            os.write(writing, f"{error}, memory {first.symmetric_memory}".encode())
        time.sleep(5.0)
        os._exit(0)
    try:
        said = os.read(reading, 1000)
        assert b"forked from a rank" in said and b"memory None" in said
        got = poisoned(5)
        exchange(first, [(1, noise(5, 1))], [])
        exchange(second, [], [(0, got)])
        assert torch.equal(got, noise(5, 1))
        first.close()
        with pytest.raises(CollectiveTimeoutError, match="rank 0 has ended"):
            exchange(second, [], [(0, got)])
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)


def test_connection_that_the_network_resets_is_not_called_the_end_of_its_rank() -> None:
    """Both ranks live."""
    first, second = connect(2, kinds=("tcp",))
    (connection,) = first._connections.values()
    # Closed in this way the kernel sends a reset, as a firewall does.
    connection._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection._socket.close()
    with pytest.raises(CollectiveTimeoutError, match="rank 0 has ended, or the connection to it"):
        exchange(second, [], [(0, poisoned(1))])
