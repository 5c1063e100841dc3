"""A stand-in for torch.distributed's NCCL, on streams that run late: no GPU needed."""

from __future__ import annotations

import queue
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch

from tests.fakes.fake_cuda import FakeCuda, FakeEvent, FakeStream
from tests.fakes.lines import Lines


class FakeTorch:
    """`torch.distributed`'s batched messages: on a stream of torch's own, in order.

    A stream that waits for a rank waits until it comes or the communicator is aborted.
    """

    irecv, isend = "irecv", "isend"

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.refuse = ""
        self.aborted: set[int] = set()
        self.connected: list[int] = []
        self.lines = Lines()
        self._streams: dict[int, FakeStream] = defaultdict(FakeStream)

    def P2POp(self, op: str, tensor: torch.Tensor, *, group: FakeGroup, group_peer: int) -> Any:
        # As torch 2.11 does where a message is put on a stream.
        if tensor.dtype in (torch.int16, torch.uint16, torch.uint32, torch.uint64):
            raise TypeError(f"data type is not supported for NCCL process group: {tensor.dtype}")
        return SimpleNamespace(op=op, tensor=tensor, rank=group.rank, peer=group_peer)

    def batch_isend_irecv(self, ops: list[Any]) -> list[Any]:
        if self.refuse:
            raise RuntimeError(self.refuse)
        rank = ops[0].rank
        assert rank in self.connected, "torch would wait here for ranks that have no messages"
        stream, before = self._streams[rank], FakeEvent()
        before.record(self.cuda.current_stream())
        stream.wait_event(before)
        # As in a group of NCCL's, none waits for another.
        for op in sorted(ops, key=lambda op: op.op == self.irecv):
            stream.put(self._move(op))
        after = FakeEvent()
        after.record(stream)
        return [FakeWork(self, rank, after)]

    def all_reduce(self, tensor: torch.Tensor, *, group: FakeGroup, async_op: bool) -> FakeWork:
        """As of a sum that a rank never joins, until it is aborted."""
        assert async_op
        stream, after = self._streams[group.rank], FakeEvent()

        def wait() -> None:
            while group.rank not in self.aborted:
                time.sleep(0.01)

        stream.put(wait)
        after.record(stream)
        return FakeWork(self, group.rank, after)

    def _move(self, op: Any) -> Callable[[], None]:
        plain = op.tensor.as_subclass(torch.Tensor)

        def send() -> None:
            self.lines[op.rank, op.peer].put(plain.clone())

        def receive() -> None:
            while op.rank not in self.aborted:
                try:
                    plain.copy_(self.lines[op.peer, op.rank].get(timeout=0.01))
                    return
                except queue.Empty:
                    continue

        return send if op.op == self.isend else receive


class FakeWork:
    def __init__(self, torch_: FakeTorch, rank: int, after: FakeEvent) -> None:
        self._torch, self._rank, self._after = torch_, rank, after

    def wait(self, timeout: timedelta | None = None) -> bool:
        assert timeout is None, "torch's watchdog ends the process after such a wait has failed"
        self._torch.cuda.current_stream().wait_event(self._after)
        return True


class FakeGroup:
    """A process group, and the NCCL in it."""

    _device_types = (torch.device("cpu"), torch.device("cuda"))

    def __init__(self, torch_: FakeTorch, rank: int) -> None:
        self.torch, self.rank = torch_, rank
        self.options = SimpleNamespace(_timeout=timedelta(seconds=30))

    def allreduce(self, tensors: list[torch.Tensor]) -> FakeWork:
        assert not self.torch.cuda.is_current_stream_capturing()
        self.torch.connected.append(self.rank)
        done = FakeEvent()
        done.record(self.torch.cuda.current_stream())
        return FakeWork(self.torch, self.rank, done)

    def _get_backend(self, device: torch.device) -> FakeGroup:
        return self

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.options._timeout = timeout

    def abort(self) -> None:
        self.torch.aborted.add(self.rank)
