"""NCCL on the pretended GPU of streams.py, and ranks over it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

import torch

from collectives import Group
from collectives.schedules.topology import Topology
from collectives.transport import ThreadWorld, Transport
from collectives.transport.base import Messages
from collectives.transport.nccl.backend import Backend, CommunicationStream
from collectives.transport.nccl.transport import NcclTransport
from tests.collectives.transport import streams
from tests.collectives.transport.streams import DEVICE, Stream, machine
from tests.fakes.fake_cuda import Lines


class StreamsBackend(Backend):
    """Bytes go through queues, at once; the communication stream notes what they read and write."""

    device = DEVICE

    def __init__(self, lines: Lines, stream: CommunicationStream, name: object = "") -> None:
        self._lines, self._stream, self._name = lines, stream, name
        self._splits = itertools.count()

    def open(self, host: Transport, device: torch.device, timeout: float) -> None:
        self._rank, self._size = host.rank, host.size

    def stream(self, device: torch.device) -> CommunicationStream:
        return self._stream

    def exchange(self, sends: Messages, recvs: Messages, timeout: float) -> None:
        reads, writes = ([streams.plain(each.tensor) for each in way] for way in (sends, recvs))
        machine.access("a group of NCCL's", self._current(), reads, writes)
        for (peer, _), tensor in zip(sends, reads, strict=True):
            self._lines[self._name, self._rank, peer].put(tensor.clone())
        for (peer, _), tensor in zip(recvs, writes, strict=True):
            tensor.copy_(self._lines[self._name, peer, self._rank].get(timeout=20))

    def all_reduce(self, values: torch.Tensor, among: Sequence[int] | None, timeout: float) -> None:
        ranks, mine = among or range(self._size), streams.plain(values)
        machine.access("a sum of NCCL's", self._current(), [mine], [mine])
        sent = mine.clone()
        others = [peer for peer in ranks if peer != self._rank]
        for peer in others:
            self._lines["sum", self._name, self._rank, peer].put(sent)
        for peer in others:
            mine.add_(self._lines["sum", self._name, peer, self._rank].get(timeout=20))

    def _current(self) -> Stream:
        assert machine.current() is self._stream.stream
        return machine.current()

    def abort(self) -> str:
        return "NCCL was aborted"

    def split(self, host: Transport) -> StreamsBackend:
        return StreamsBackend(self._lines, self._stream, (self._name, next(self._splits)))


def on_ranks(size: int, work: Callable[[Group], Any], local_size: int | None = None) -> list[Any]:
    """What `work` returns on every rank, a thread each, on one node unless given."""
    world, lines = ThreadWorld(size), Lines()

    def rank_main(rank: int) -> Any:
        backend = StreamsBackend(lines, CommunicationStream(DEVICE))
        transport = NcclTransport(world.transport(rank), backend, timeout=20.0)
        topology = Topology(size, local_size or size)
        group = Group(transport, timeout=20.0, local_rank=rank, local_size=size, topology=topology)
        try:
            return work(group)
        finally:
            group.close()

    with futures.ThreadPoolExecutor(size, "caller") as pool:
        return list(pool.map(rank_main, range(size)))
