"""Connections between threads, through memory and TCP: lengths, order, layouts."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from collectives import CollectiveTimeoutError, TransportError
from collectives.transport import ConnectionTransport, Message
from collectives.transport.base import as_bytes
from collectives.transport.connections.shm import INLINE_BYTES, RING_BYTES, SLOT_BYTES, SLOTS
from tests.collectives.transport.thread_ranks import (
    TIMEOUT,
    both,
    connect,
    exchange,
    noise,
    poisoned,
    together,
)

# Around every boundary of the protocol; the last is more than the ring holds.
LENGTHS = (0, 1, INLINE_BYTES, INLINE_BYTES + 1, SLOT_BYTES, SLOT_BYTES + 1, RING_BYTES)
LONG = 2 * RING_BYTES + 12345


@both
def test_every_length_both_ways_in_one_exchange(kind: str) -> None:
    """Both sides send far more than the ring holds before either could have received."""
    lengths = [*LENGTHS, LONG, *LENGTHS]
    first, second = connect(2, kinds=(kind,))

    def swap(transport: ConnectionTransport) -> None:
        peer = 1 - transport.rank
        sends = [(peer, noise(n, 100 * transport.rank + i)) for i, n in enumerate(lengths)]
        recvs = [(peer, poisoned(n)) for n in lengths]
        exchange(transport, sends, recvs)
        for i, (_, got) in enumerate(recvs):
            assert torch.equal(got, noise(lengths[i], 100 * peer + i)), lengths[i]

    together(lambda: swap(first), lambda: swap(second))


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
        *(torch.complex64, torch.float8_e4m3fn),
    ],
)
def test_bytes_are_those_in_memory(dtype: torch.dtype) -> None:
    """Of one element, too, which is contiguous with any stride, and of what needs a gradient."""
    many = torch.arange(1, 11).to(dtype)
    for tensor in (many, many[3:7], many.view(2, 5), many[::5][:1], many[:0], many[4]):
        data = as_bytes(tensor)
        dense = torch.empty(tensor.numel(), dtype=dtype).copy_(tensor.reshape(-1))
        assert torch.equal(data, dense.view(torch.uint8))
        before = tensor.clone()
        data.zero_()
        assert not tensor.to(torch.complex128).any()
        tensor.copy_(before)
    if dtype.is_floating_point and dtype.itemsize > 1:
        assert torch.equal(as_bytes(many.clone().requires_grad_()), as_bytes(many))


class FullQueue:
    """A socket whose queue is full at every other record, as the kernel may say at any time."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._socket, name)
        return real if not name.startswith("send") else lambda *given: self._send(real, *given)

    def _send(self, real: Callable[..., int], *given: Any) -> int:
        self._calls += 1
        if self._calls % 2:
            raise BlockingIOError
        return real(*given)


@both
def test_a_full_queue_delays_but_loses_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = connect(2, kinds=(kind,))
    for transport in (first, second):
        for connection in transport._connections.values():
            monkeypatch.setattr(connection, "_socket", FullQueue(connection._socket))
    sent = [noise(n, i) for i, n in enumerate((3, LONG, *[7] * (3 * SLOTS), SLOT_BYTES))]
    got = [poisoned(len(data)) for data in sent]

    back = poisoned(5)
    together(
        lambda: exchange(first, [(1, data) for data in sent], [(1, back)]),
        lambda: exchange(second, [(0, noise(5, 9))], [(0, data) for data in got]),
    )
    assert all(torch.equal(a, b) for a, b in zip(got, sent, strict=True))
    assert torch.equal(back, noise(5, 9))


@both
def test_many_exchanges_between_three(kind: str) -> None:
    """Random lengths and partners; one side may run ahead of another by what the ring holds."""
    plan = random.Random(5)
    rounds = [
        {
            (a, b): plan.choice([0, 3, INLINE_BYTES, SLOT_BYTES + 7])
            for a in range(3)
            for b in range(3)
            if a != b and plan.random() < 0.6
        }
        for _ in range(120)
    ]

    def play(transport: ConnectionTransport) -> None:
        me = transport.rank
        for number, lengths in enumerate(rounds):
            sends = [(b, noise(n, number)) for (a, b), n in lengths.items() if a == me]
            recvs = [(a, poisoned(n)) for (a, b), n in lengths.items() if b == me]
            exchange(transport, sends, recvs)
            for _, got in recvs:
                assert torch.equal(got, noise(len(got), number))

    together(*(lambda t=t: play(t) for t in connect(3, kinds=(kind,))))


@both
def test_one_direction_alone(kind: str) -> None:
    """Nothing is sent back but slots, and the sender is done before the last are read."""
    first, second = connect(2, kinds=(kind,))
    count = 10 * SLOTS
    for n in range(SLOTS):
        exchange(first, [(1, noise(5, n))], [])
    got = [poisoned(5) for _ in range(count)]

    def send() -> None:
        for n in range(SLOTS, count):
            exchange(first, [(1, noise(5, n))], [])

    def receive() -> None:
        for tensor in got:
            exchange(second, [], [(0, tensor)])

    together(send, receive)
    assert all(torch.equal(tensor, noise(5, n)) for n, tensor in enumerate(got))


@both
def test_every_layout_of_a_tensor_travels(kind: str) -> None:
    first, second = connect(2, kinds=(kind,))
    for tensor in (
        torch.tensor(2.5),
        torch.randn(3, 5, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.randn(4, dtype=torch.complex64, requires_grad=True),
        torch.arange(10)[3:7],
    ):
        got = torch.zeros_like(tensor, requires_grad=False)
        together(
            lambda tensor=tensor: exchange(first, [(1, tensor)], []),
            lambda got=got: exchange(second, [], [(0, got)]),
        )
        assert torch.equal(got, tensor)


@both
@pytest.mark.parametrize("offset", [1, 4, 15, 64])
def test_every_place_in_a_page(kind: str, offset: int) -> None:
    """Pieces of odd lengths begin anywhere; a few bytes behind a page's start are copied apart."""
    first, second = connect(2, kinds=(kind,))
    for ours, theirs in ((0, offset), (offset, 0)):
        sent = torch.cat([poisoned(ours), noise(2 * SLOT_BYTES, offset)])[ours:]
        whole = poisoned(theirs + 2 * SLOT_BYTES + 1)
        got = whole[theirs:-1]
        together(
            lambda sent=sent: exchange(first, [(1, sent)], []),
            lambda got=got: exchange(second, [], [(0, got)]),
        )
        assert torch.equal(got, sent)
        assert torch.equal(whole[:theirs], poisoned(theirs)) and whole[-1] == 0xA5


@both
def test_tensors_of_inference_mode_travel(kind: str) -> None:
    first, second = connect(2, kinds=(kind,))
    for length in (5, SLOT_BYTES):
        with torch.inference_mode():
            sent, got = noise(length, 1), poisoned(length)
        together(
            lambda sent=sent: exchange(first, [(1, sent)], []),
            lambda got=got: exchange(second, [], [(0, got)]),
        )
        assert torch.equal(got, sent)


@both
def test_a_message_of_another_length_is_an_error(kind: str) -> None:
    first, second = connect(2, kinds=(kind,))
    exchange(first, [(1, noise(4, 0))], [])
    with pytest.raises(TransportError, match=r"rank 0 sent (a message of )?4 bytes where"):
        exchange(second, [], [(0, poisoned(5))])
    with pytest.raises(TransportError, match=r"cannot be used in a step: rank 0 sent .*4 bytes"):
        exchange(second, [], [(0, poisoned(4))])


def test_devices_are_those_of_the_other_transport() -> None:
    first, _ = connect(2, kinds=("tcp",))
    with pytest.raises(ValueError, match=r"meta; the threads transport carries"):
        first.check_device(torch.device("meta"))
    first.check_device(torch.device("cpu"))


@both
def test_a_limit_of_months(kind: str) -> None:
    """More milliseconds than poll(2) takes."""
    first, second = connect(2, kinds=(kind,))
    got = poisoned(5)

    def late() -> None:
        time.sleep(0.05)
        exchange(first, [(1, noise(5, 0))], [])

    together(late, lambda: exchange(second, [], [(0, got)], timeout=1e9))
    assert torch.equal(got, noise(5, 0))


def test_ranks_without_a_connection_are_reached_by_the_other_transport() -> None:
    """Ranks 0 and 1 share memory; messages to and from rank 2 go between threads."""
    transports = connect(3, unwilling=(2,))
    assert [each.connected_peers for each in transports] == [{1}, {0}, set()]

    def swap(transport: ConnectionTransport) -> None:
        peers = [peer for peer in range(3) if peer != transport.rank]
        recvs = [Message(peer, poisoned(LONG)) for peer in peers]
        sends = [Message(peer, noise(LONG, transport.rank)) for peer in peers]
        transport.exchange(sends, recvs, "a step", TIMEOUT)
        for peer, got in recvs:
            assert torch.equal(got, noise(LONG, peer))

    together(*(lambda each=each: swap(each) for each in transports))
    transports[2].close()
    with pytest.raises(CollectiveTimeoutError, match="rank 2"):
        transports[0].exchange([], [Message(2, poisoned(1))], "a step", TIMEOUT)
    with pytest.raises(CollectiveTimeoutError, match="rank 2"):
        transports[1].exchange([], [Message(0, poisoned(1))], "a step", TIMEOUT)


@pytest.mark.parametrize("end", [lambda each: each.close(), lambda each: each.abort("a fault")])
def test_connections_that_fail_to_end_do_not_keep_the_other_transport_open(
    end: Callable[[ConnectionTransport], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = connect(2)
    ended: list[object] = []

    def fail() -> None:
        raise OSError("no more descriptors")

    monkeypatch.setattr(first._connections[1], "close", fail)
    for name in ("close", "abort"):
        monkeypatch.setattr(first._other, name, lambda *_: ended.append(first._other))
    with pytest.raises(OSError, match="no more descriptors"):
        end(first)
    assert ended == [first._other]


@both
def test_the_last_messages_of_a_rank_that_has_ended_arrive(kind: str) -> None:
    first, second = connect(2, kinds=(kind,))
    for length in (1000, SLOT_BYTES):
        exchange(first, [(1, noise(length, 1))], [])
    first.close()
    for length in (1000, SLOT_BYTES):
        got = poisoned(length)
        exchange(second, [], [(0, got)])
        assert torch.equal(got, noise(length, 1))
