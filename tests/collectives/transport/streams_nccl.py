"""A stand-in for `cupy.cuda.nccl` over the pretended GPU of streams.py."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any

import pytest
import torch

from collectives import Group
from collectives.schedules.topology import Topology
from collectives.transport import ThreadWorld
from collectives.transport.nccl import cupy_backend
from collectives.transport.nccl.transport import NcclTransport
from tests.collectives.transport import streams
from tests.collectives.transport.streams import Stream, machine
from tests.fakes.fake_cuda import Lines


class Nccl:
    """The module `cupy.cuda.nccl`: bytes go through queues, at once; the stream notes them."""

    NCCL_UINT8, NCCL_FLOAT32, NCCL_BFLOAT16, NCCL_SUM = 1, 7, 9, 0

    class NcclError(RuntimeError): ...

    def __init__(self) -> None:
        self._ids = itertools.count()
        self._thread = threading.local()
        self._lines = Lines()

    def get_unique_id(self) -> bytes:
        return next(self._ids).to_bytes(4, "little") * 32

    def NcclCommunicator(self, size: int, unique_id: bytes, rank: int) -> _Communicator:
        return _Communicator(self, unique_id, size, rank)

    def groupStart(self) -> None:
        self._thread.sends, self._thread.recvs = [], []

    def groupEnd(self) -> None:
        sends, recvs = self._thread.sends, self._thread.recvs
        if not sends and not recvs:
            return
        stream = Stream.by_handle[(sends or recvs)[0][2]]
        reads = [memory(address, count) for address, count, _, _ in sends]
        writes = [memory(address, count) for address, count, _, _ in recvs]
        machine.access("a group of NCCL's", stream, reads, writes)
        for data, (*_, line) in zip(reads, sends, strict=True):
            self._lines[line].put(data.numpy().tobytes())
        for target, (*_, line) in zip(writes, recvs, strict=True):
            target.copy_(
                torch.frombuffer(bytearray(self._lines[line].get(timeout=20)), dtype=torch.uint8)
            )


class _Communicator:
    def __init__(self, nccl: Nccl, name: bytes, size: int, rank: int) -> None:
        self._nccl, self._name, self._size, self._rank = nccl, name, size, rank
        self._splits = 0

    def commSplit(self, color: int, key: int) -> _Communicator:
        """Join the ranks of one colour, in the order of their keys; every rank calls it."""
        self._splits += 1
        lines, name = self._nccl._lines, self._name + f"split {self._splits}".encode()
        for peer in range(self._size):
            lines[name, self._rank, peer].put(bytes((color, key)))
        told = [lines[name, peer, self._rank].get(timeout=20) for peer in range(self._size)]
        keys = sorted(its_key for its_color, its_key in told if its_color == color)
        return _Communicator(self._nccl, name + bytes((color,)), len(keys), keys.index(key))

    def send(self, address: int, count: int, kind: int, peer: int, stream: int) -> None:
        line = (self._name, self._rank, peer)
        self._nccl._thread.sends.append((address, count, stream, line))

    def recv(self, address: int, count: int, kind: int, peer: int, stream: int) -> None:
        line = (self._name, peer, self._rank)
        self._nccl._thread.recvs.append((address, count, stream, line))

    def allReduce(
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int
    ) -> None:
        dtype = {7: torch.float32, 9: torch.bfloat16}[datatype]
        values = memory(recvbuf, count * dtype.itemsize)
        machine.access("a sum of NCCL's", Stream.by_handle[stream], [values], [values])
        others = [peer for peer in range(self._size) if peer != self._rank]
        lines, mine = self._nccl._lines, values.numpy().tobytes()
        for peer in others:
            lines["sum", self._name, self._rank, peer].put(mine)
        for peer in others:
            data = lines["sum", self._name, peer, self._rank].get(timeout=20)
            values.view(dtype).add_(torch.frombuffer(bytearray(data), dtype=dtype))

    def check_async_error(self) -> None: ...
    def destroy(self) -> None: ...
    def abort(self) -> None: ...


def on_ranks(size: int, work: Callable[[Group], Any], local_size: int | None = None) -> list[Any]:
    """What `work` returns on every rank, a thread each, on one node unless given."""
    world = ThreadWorld(size)

    def rank_main(rank: int) -> Any:
        backend = cupy_backend.CupyBackend(torch.device("cuda", 0))
        transport = NcclTransport(world.transport(rank), backend, timeout=20.0)
        topology = Topology(size, local_size or size)
        group = Group(transport, timeout=20.0, local_rank=rank, local_size=size, topology=topology)
        try:
            return work(group)
        finally:
            group.close()

    with futures.ThreadPoolExecutor(size, "caller") as pool:
        return list(pool.map(rank_main, range(size)))


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the stand-ins in the place of torch.cuda, NCCL and the kernels."""
    streams.install(monkeypatch)
    fake = Nccl()
    monkeypatch.setattr(cupy_backend, "load_nccl", lambda: fake)


def memory(address: int, count: int) -> torch.Tensor:
    """The part of a block at an address, as bytes."""
    for block in list(machine._blocks.values()):
        start = block.storage.data_ptr()
        if start <= address and address + count <= start + block.storage.nbytes():
            whole = torch.empty(0, dtype=torch.uint8).set_(block.storage)
            return whole[address - start : address - start + count]
    raise AssertionError("no memory of the GPU's")
