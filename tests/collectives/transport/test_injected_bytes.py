"""Bytes that no rank has sent, in every stream between ranks: an error with a text, and no memory.

What a length says that came from outside is compared with what is expected, or nothing is
allocated before so much has come.
"""

from __future__ import annotations

import json
import mmap
import random
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from collectives import Group, TransportError
from collectives.consistency import negotiation
from collectives.transport import Message, ThreadTransport, ThreadWorld
from collectives.transport.byte_gathering import gather_bytes, gather_objects
from collectives.transport.connections import shm
from collectives.transport.connections import tcp as tcp_module
from collectives.transport.connections.connection import Connection, PeerGone
from collectives.transport.connections.shm import RING_BYTES, ShmConnection
from collectives.transport.connections.tcp import LINE_BYTES, TcpConnection
from tests.collectives.consistency.ranks import WithoutSharedMemory
from tests.collectives.transport.thread_ranks import TIMEOUT, together

SEEDS = range(60)
NO_MESSAGE = "no message of a rank"


class Counted:
    """numpy, of which `empty` says how much it gave."""

    def __init__(self) -> None:
        self.largest = 0

    def empty(self, size: int, dtype: Any) -> Any:
        self.largest = max(self.largest, size)
        return np.empty(size, dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    counted = Counted()
    monkeypatch.setattr(tcp_module, "np", counted)
    return counted


def tcp() -> tuple[TcpConnection, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        theirs = socket.create_connection(listening.getsockname())
        mine, _ = listening.accept()
    return TcpConnection(1, mine), theirs


def memory() -> tuple[ShmConnection, socket.socket]:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    rings = mmap.mmap(-1, 2 * RING_BYTES)
    return ShmConnection(1, mine, rings, outgoing=0), theirs


OPEN: dict[str, Callable[[], tuple[Connection, socket.socket]]] = {"tcp": tcp, "shm": memory}


def drain(connection: Connection, *, rounds: int = 200) -> Exception | None:
    """Advance until something is raised, or nothing more comes."""
    for _ in range(rounds):
        try:
            if not connection.advance():
                return None
        except (TransportError, PeerGone) as error:
            return error
    raise AssertionError("it goes on without an end")


def random_bytes(seed: int) -> bytes:
    chosen = random.Random(seed)
    return chosen.randbytes(chosen.choice([1, 7, 24, 63, 64, 65, 128, 1000, 5000]))


def random_fields(seed: int) -> bytes:
    """Headers of the right form whose numbers are any."""
    chosen = random.Random(seed)
    numbers = [
        chosen.choice([0, 1, 8, 5000, 1 << 40, 1 << 62, (1 << 64) - 1, chosen.getrandbits(64)])
    ]
    return tcp_module._HEADER.pack(tcp_module._FRAME, *numbers) + chosen.randbytes(256)


def random_records(seed: int) -> bytes:
    chosen = random.Random(seed)
    fields = [chosen.choice([0, 1, 5, 1 << 20, 1 << 62, chosen.getrandbits(64)]) for _ in range(2)]
    return shm._HEADER.pack(*fields) + chosen.randbytes(chosen.choice([0, 1, 8, 100]))


STREAMS: dict[str, tuple[str, Callable[[int], bytes]]] = {
    "bytes into a socket": ("tcp", random_bytes),
    "headers into a socket": ("tcp", random_fields),
    "bytes into memory's socket": ("shm", random_bytes),
    "records into memory's socket": ("shm", random_records),
}


@pytest.mark.parametrize("expecting", [True, False])
@pytest.mark.parametrize("stream", STREAMS)
def test_random_bytes_are_an_error_with_a_text_and_take_no_memory(
    stream: str, expecting: bool, counted: Counted
) -> None:
    kind, make = STREAMS[stream]
    for seed in SEEDS:
        connection, theirs = OPEN[kind]()
        target = np.full(9, 0xA5, np.uint8)
        if expecting:
            connection.receive(target)
        theirs.sendall(make(seed))
        theirs.close()
        error = drain(connection)
        if expecting:
            assert error is not None, seed
        assert error is None or str(error)
        assert counted.largest <= 1 << 20
        connection.close()


@pytest.mark.parametrize("kind", OPEN)
def test_bytes_of_something_else_are_named_as_such(kind: str) -> None:
    connection, theirs = OPEN[kind]()
    connection.receive(np.empty(8, np.uint8))
    theirs.sendall(b"GET / HTTP/1.1\r\nHost: rank0\r\nAccept: text/html,*/*;q=0.8\r\n\r\n" * 4)
    error = drain(connection)
    assert isinstance(error, TransportError) and NO_MESSAGE in str(error)
    # And whoever comes later is told so, too.
    connection.receive(np.empty(8, np.uint8))
    again = drain(connection)
    assert kind == "shm" or (isinstance(again, TransportError) and NO_MESSAGE in str(again))
    theirs.close()


def test_bytes_within_a_stream_of_messages_are_named_as_such() -> None:
    connection, theirs = tcp()
    sender = TcpConnection(0, theirs)
    right = np.arange(100, dtype=np.uint8)
    target = np.zeros(100, np.uint8)
    for _ in range(2):
        sender.send(right)
        while sender.busy:
            sender.advance()
    theirs.sendall(bytes(1))
    sender.send(right)
    while sender.busy:
        sender.advance()
    for _ in range(2):
        connection.receive(target)
        assert drain(connection) is None and (target == right).all()
    connection.receive(target)
    error = drain(connection)
    assert isinstance(error, TransportError) and NO_MESSAGE in str(error)


class Lying(WithoutSharedMemory):
    """Changes what it sends in some steps."""

    lie: Callable[[torch.Tensor], torch.Tensor] = staticmethod(lambda tensor: tensor)
    lies_in: Callable[[str], bool] = staticmethod(lambda step: True)

    def exchange(self, sends: Any, recvs: Any, step: str, timeout: float) -> None:
        if self.lies_in(step):
            sends = [Message(peer, self.lie(tensor)) for peer, tensor in sends]
        super().exchange(sends, recvs, step, timeout)


def lying(
    lie: Callable[[torch.Tensor], torch.Tensor],
    job: Callable[[ThreadTransport], Any],
    lies_in: Callable[[str], bool] = lambda step: True,
) -> list[Any]:
    """What both ranks get, of which the second one lies."""
    world = ThreadWorld(2)
    ranks = [WithoutSharedMemory(world, 0), Lying(world, 1)]
    ranks[1].lie, ranks[1].lies_in = lie, lies_in  # type: ignore[attr-defined]

    def main(transport: ThreadTransport) -> Any:
        try:
            return job(transport)
        except Exception as error:  # noqa: BLE001 - looked at below
            return error
        finally:
            transport.close()

    return together(*(lambda each=each: main(each) for each in ranks))


@pytest.mark.parametrize("length", [-1, 1 << 40, (1 << 63) - 1])
def test_length_of_what_ranks_tell_each_other_is_compared_before_memory_is_taken(
    length: int,
) -> None:
    def job(transport: ThreadTransport) -> Any:
        return gather_bytes(b"told", transport, "a step", TIMEOUT)

    def lie(tensor: torch.Tensor) -> torch.Tensor:
        return torch.full_like(tensor, length) if tensor.dtype == torch.int64 else tensor

    error, _ = lying(lie, job)
    assert isinstance(error, TransportError)
    assert f"rank 1 says that it sends {length} bytes" in str(error)


@pytest.mark.parametrize("seed", range(20))
def test_start_up_that_is_told_random_bytes_names_the_rank(seed: int) -> None:
    def lie(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.int64:
            return tensor
        noise = random.Random(seed).randbytes(tensor.numel())
        return torch.frombuffer(bytearray(noise), dtype=torch.uint8)

    error, _ = lying(lie, lambda transport: gather_objects(["x" * 50], transport, TIMEOUT))
    assert isinstance(error, TransportError) and "what rank 1 sent" in str(error)


TOLD: tuple[Any, ...] = (None, 1, "x", [], {}, [1], ["{"], ["[1, 2]"], ["", 3], [None, []], [["a"]])


@pytest.mark.parametrize("told", TOLD, ids=str)
def test_negotiation_that_is_told_no_call_is_an_error_with_a_text(
    told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = json.dumps([json.dumps(["barrier", None, {}, [], None, []])]).encode()
    monkeypatch.setattr(negotiation, "gather_bytes", lambda *_: [right, json.dumps(told).encode()])

    def job(transport: ThreadTransport) -> Any:
        group = Group(transport, timeout=TIMEOUT, local_rank=transport.rank, local_size=2)
        # Of other shapes, so that the ranks ask each other.
        group.all_reduce(torch.ones(2 + transport.rank))

    for error in lying(lambda tensor: tensor, job):
        assert isinstance(error, TransportError | negotiation.CollectiveMismatchError)
        assert len(str(error)) > 20


@pytest.mark.parametrize(
    "call",
    [
        lambda group: group.all_gather(torch.ones(2, 3)),
        lambda group: group.all_gather_bytes(b"bytes"),
        lambda group: group.all_to_all(torch.ones(2, 3)),
    ],
)
def test_counts_that_no_rank_can_have_are_an_error_with_a_text(
    call: Callable[[Group], Any],
) -> None:
    def lie(tensor: torch.Tensor) -> torch.Tensor:
        return torch.full_like(tensor, -5) if tensor.dtype == torch.int64 else tensor

    def job(transport: ThreadTransport) -> Any:
        group = Group(transport, timeout=1.0, local_rank=transport.rank, local_size=2)
        return call(group)

    error, _ = lying(lie, job, lambda step: "negotiation" not in step and "start-up" not in step)
    assert isinstance(error, TransportError) and "rows" in str(error), error


def test_frames_are_whole_lines() -> None:
    assert tcp_module._HEADER.size == LINE_BYTES
