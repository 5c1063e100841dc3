"""What an all-reduce by one launch costs the host's thread, on one of 8 ranks: no GPU needed.

    python -m bench.collectives.host_cost

The group, its queue and the NCCL transport run as they are. Stubbed are CUDA's streams and events,
Triton's compiled kernel, and the other ranks, which always come at once. Figures are minima in
microseconds of the calling thread's processor time, to which what else runs on the machine adds
least. bench.kernels.host_cost has the kernels' own calls.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import adasum
import collectives
from bench.kernels.host_cost import stubbed_launches
from collectives import Group, calls, negotiation
from collectives import work as queue
from collectives.transport import ThreadWorld
from collectives.transport.nccl import transport as nccl
from collectives.transport.nccl.backend import Backend
from collectives.transport.nccl.node_memory import NodeMemory
from collectives.transport.nccl.transport import NcclTransport
from kernels.gpu import launcher, node_kernels

SIZE = 8
NUMEL, SEGMENTS = 1000, [0, *range(100, 1001, 100)]
REPEATS = 2000


class Gpu:
    """A stream, an event and the context of a stream; none costs anything."""

    device = torch.device("cpu")

    def record_event(self) -> Gpu:
        """Return the event."""
        return self

    def wait_event(self, event: Gpu) -> None:
        """Wait for nothing."""

    def query(self) -> bool:
        """Say that it has come."""
        return True

    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


GPU: Any = Gpu()


class Nccl(Backend):
    """No communicator."""

    device = None

    def open(self, *args: Any) -> None:
        """Open nothing."""

    def stream(self, device: torch.device) -> Any:
        """Return the stream of communication."""
        return SimpleNamespace(stream=GPU, turn=nullcontext())


class First(NcclTransport):
    """One rank, whose others always come at once; it negotiates, too.

    Attributes:
        launched: The thread's processor time at the last launch, in seconds.
        shares_gpu: Whether CPU tensors pass for a GPU's.
    """

    launched = 0.0
    shares_gpu = False

    def add_node_memory(self, nbytes: int, *args: Any) -> Any:
        """Make memory in which all ranks have the same place."""
        memory = NodeMemory.__new__(NodeMemory)
        memory.tensor = torch.zeros(nbytes, dtype=torch.uint8)
        memory.node_ranks, memory._names = range(SIZE), range(SIZE)
        memory.peers = tuple(range(1, SIZE))
        places = [memory.tensor.data_ptr()] * SIZE
        memory.node = node_kernels.Node(0, places, places, torch.device("cpu"))
        self.node_memories.append(memory)
        return memory

    def shares_gpu_memory(self, device: torch.device) -> bool:
        """Say that all ranks are on one node."""
        return True

    def signal(self, call: Any) -> None:
        """Say that this rank has come to a call."""
        assert call.code

    def wait(self, call: Any) -> Any:
        """Return that all ranks make the same call."""
        return negotiation._SAME_CALL


@contextmanager
def first_rank() -> Iterator[Group]:
    """Make a group whose transport is a `First`."""
    cuda: Any = SimpleNamespace(
        Stream=lambda *args: GPU,
        current_stream=lambda *args: GPU,
        stream=lambda stream: GPU,
        is_current_stream_capturing=lambda: False,
    )
    made: Any = First(ThreadWorld(SIZE).transport(0), Nccl(), timeout=60.0)
    call = launcher.Launch.__call__

    def launch(self: launcher.Launch, *leading: int) -> None:
        made.launched = time.thread_time()
        call(self, *leading)

    with ExitStack() as stack:
        for owner, name, stub in (
            (calls, "plan_host_all_reduce", lambda runner, call: None),
            (nccl, "cuda", cuda),
            *((torch.cuda, each, getattr(cuda, each)) for each in ("Stream", "current_stream")),
            (torch.cuda, "stream", cuda.stream),
            (Tensor, "record_stream", lambda tensor, stream: None),
            (queue, "on_cuda", lambda values: list(values) if made.shares_gpu else []),
            (launcher.Launch, "__call__", launch),
        ):
            stack.enter_context(mock.patch.object(owner, name, stub))
        stack.enter_context(mock.patch.dict(os.environ, ADASUM_NODE_MEMORY="1"))
        stack.enter_context(stubbed_launches())
        topology = collectives.Topology(SIZE, SIZE)
        group = Group(made, timeout=60.0, local_rank=0, local_size=SIZE, topology=topology)
        group._calls._negotiation = made
        stack.callback(group.close)
        yield group


def least(
    group: Group, start: Callable[[], Any], wait: Callable[[], Any], at_launch: bool
) -> float:
    """Return the least time of a start in microseconds, to its launch or to its end."""
    transport: Any = group.transport
    taken = 1.0
    for _ in range(REPEATS):
        transport.shares_gpu = True
        begin = time.thread_time()
        start()
        end = transport.launched if at_launch else time.thread_time()
        taken = min(taken, end - begin)
        transport.shares_gpu = False
        wait()
    return taken * 1e6


def hook_of_a_bucket() -> float:
    """Return the time from DDP's hook until it returns, without CUDA's own calls."""
    with first_rank() as group:
        state = adasum.HookState(adasum.Adasum, process_group=group)
        buffer, works = torch.zeros(NUMEL), []

        def start() -> None:
            works.append(state.start(buffer, "DDP bucket 0", list(SEGMENTS)))

        # Autograd is off during backward, as in its threads.
        with torch.no_grad():
            return least(group, start, lambda: works.pop().wait(), at_launch=False)


def start_of_a_request() -> float:
    """Return the time from a request's start in symmetric memory to Triton's launcher."""
    with first_rank() as group:
        buffer = group.symmetric_empty(NUMEL)
        request = group.all_reduce_init(buffer, adasum.Adasum, segments=SEGMENTS)
        return least(group, request.start, request.wait, at_launch=True)


if __name__ == "__main__":
    for measure in (hook_of_a_bucket, start_of_a_request):
        print(f"{measure.__name__.replace('_', ' '):20} {measure():8.1f} us")
