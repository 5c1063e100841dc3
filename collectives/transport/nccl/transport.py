"""Messages of CUDA tensors over NCCL, through cupy or through torch.distributed.

A step's messages form one NCCL group of sends and receives. They travel as bytes, so tensors of
every dtype can be sent. They are put on a communication stream; events order them after the
caller's earlier work and before its later work.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import cuda

from collectives.errors import TransportError
from collectives.transport.base import Messages, Transport, gather_bytes, read_objects
from collectives.transport.nccl.backend import Backend, translate_errors
from collectives.transport.nccl.cupy_backend import DTYPES
from collectives.transport.nccl.node_memory import NodeMemory
from collectives.transport.nccl.watcher import Posted, Watcher
from collectives.transport.symmetric_memory import SymmetricMemory

_Wait = Callable[[], None]


class NcclTransport(Transport):
    """Point-to-point messages of CUDA tensors; messages of CPU tensors go through `host`.

    If the backend is bound to a GPU, making one is a collective of all ranks of `host`, which takes
    at most `timeout` seconds. If a step is late, a peer is gone or NCCL reports an error, a
    `Watcher` notices that, and `check_streams` and the next exchange raise the error. Work in the
    caller's own CUDA graph is not watched: capture the same work on all ranks, after a first run
    outside of a graph (NCCL connects ranks at their first message). docs/groups.md lists the rules
    if torch has communicators of its own on the device.
    """

    def __init__(self, host: Transport, backend: Backend, *, timeout: float) -> None:
        self.rank = host.rank
        self.size = host.size
        self.names = host.names
        self.process_group = host.process_group
        self.device = backend.device
        self.sums_on_gpu = backend.device is not None
        self.node_memories: list[NodeMemory] = []
        self._host = host
        self._backend = backend
        self._others = tuple(rank for rank in range(self.size) if rank != self.rank)
        self._opened: set[torch.device] = set()
        self._closed = False
        self._graphs = Graphs()
        end_launches = partial(_end_launches, self.node_memories, self._graphs)
        self._watcher = Watcher(host, backend, end_launches)
        ends = self._watcher, self._graphs, backend
        # Runs at the latest when the interpreter exits.
        self._end = weakref.finalize(self, _end, os.getpid(), *ends)
        if self.device is not None:
            self._open(self.device, "start-up", timeout)

    @property
    def symmetric_memory(self) -> SymmetricMemory | None:
        return self._host.symmetric_memory

    def __repr__(self) -> str:
        return f"NcclTransport(CPU tensors: {self._host!r})"

    def check_device(self, device: torch.device) -> None:
        if device.type == "cpu":
            self._host.check_device(device)
        elif device.type != "cuda" or self.device not in (None, device):
            raise ValueError(
                f"tensor is on {device}, this rank's NCCL carries tensors on "
                f"{self.device or 'CUDA devices'}: move it there, or call torch.cuda.set_device "
                "before init"
            )

    def exchange(self, sends: Messages, recvs: Messages, step: str, timeout: float) -> None:
        self.post(sends, recvs, step, timeout)()

    def posts_ahead(self, device: torch.device) -> bool:
        """Whether the device is a GPU: the host's messages advance only while the host waits."""
        return device.type == "cuda"

    def post(self, sends: Messages, recvs: Messages, step: str, timeout: float) -> _Wait:
        tensors = [message.tensor for message in (*sends, *recvs)]
        if all(tensor.device.type == "cpu" for tensor in tensors):
            self._host.exchange(sends, recvs, step, timeout)
            return lambda: None
        self._open(tensors[0].device, step, timeout)
        sends = [message for message in sends if message.tensor.numel()]
        recvs = [message for message in recvs if message.tensor.numel()]
        peers = tuple(sorted({message.peer for message in (*sends, *recvs)}))
        if not peers:
            return lambda: None
        put = partial(self._backend.exchange, sends, recvs, timeout)
        return self._start(put, tensors, Posted(peers, step, timeout))

    def all_reduce(self, flat: torch.Tensor, among: Any, step: str, timeout: float) -> None:
        by_torch = not (among is None or isinstance(among, tuple))
        if by_torch is self.sums_on_gpu:
            self._host.all_reduce(flat, among, step, timeout)
            return
        self._open(flat.device, step, timeout)
        values = torch.view_as_real(flat) if flat.is_complex() else flat
        if values.dtype not in DTYPES:
            raise TypeError(f"NCCL cannot add {flat.dtype}: use another algorithm, or convert")
        self.check_device(flat.device)
        ranks = self._others if among is None else () if by_torch else among
        peers = tuple(rank for rank in ranks if rank != self.rank)
        put = partial(self._backend.all_reduce, values, among, timeout)
        self._start(put, [flat], Posted(peers, step, timeout))()

    def shares_gpu_memory(self, device: torch.device) -> bool:
        return device.type == "cuda" and self.process_group is not None

    def add_node_memory(
        self,
        nbytes: int,
        device: torch.device | None,
        node: tuple[int, ...],
        process_group: dist.ProcessGroup | None,
        timeout: float,
    ) -> NodeMemory:
        assert process_group is not None
        assert device is not None

        def gather(value: Any) -> list[Any]:
            step = "the making of symmetric memory"
            said = gather_bytes(json.dumps(value).encode(), self._host, step, timeout)
            return read_objects(said, self._host)

        names = tuple(map(self.name, node))
        memory = NodeMemory(nbytes, process_group, device, timeout, gather, node, names)
        self.node_memories.append(memory)
        return memory

    def launch(
        self,
        number: int,
        work: _Wait,
        tensors: Sequence[torch.Tensor],
        step: str,
        timeout: float,
    ) -> None:
        memory = self.node_memories[number]
        memory.check()
        self._start(work, tensors, Posted(memory.peers, step, timeout, held=work))()

    def captures(self, device: torch.device) -> bool:
        """Whether the device is a GPU: we own its communicators, so graphs can be ended first."""
        return device.type == "cuda"

    def capture(self, work: Callable[[], Any]) -> Callable[[str, float], None]:
        ours = self._backend.stream(cuda.current_stream().device)
        with ours.turn:
            graph = self._graphs.capture(work, ours.stream)
        others = self._others
        return lambda step, timeout: self._start(graph, [], Posted(others, step, timeout))()

    def check_streams(self) -> None:
        self._watcher.raise_error()
        for memory in self.node_memories:
            memory.check()
        self._host.check_streams()

    def gone(self, peers: Collection[int] | None = None) -> int | None:
        return self._host.gone(peers)

    def why_gone(self, peer: int) -> str:
        return self._host.why_gone(peer)

    def split(self, ranks: Sequence[int], timeout: float) -> NcclTransport:
        host = self._host.split(ranks, timeout)
        try:
            return NcclTransport(host, self._backend.split(host), timeout=timeout)
        except BaseException:
            host.close()
            raise

    def interrupt(self, reason: str) -> None:
        self._host.interrupt(reason)
        self._abort(reason)

    def abort(self, reason: str) -> None:
        try:
            self._host.abort(reason)
        finally:
            self._abort(reason)

    def close(self) -> None:
        """Wait for the steps under way, raise their error unless raised before, and close."""
        if self._closed:
            return
        self._closed = True
        with ExitStack() as stack:
            stack.callback(self._host.close)
            stack.callback(self._end)
            if not self._watcher.raised:
                self._watcher.settle()

    def _abort(self, reason: str) -> None:
        # If CUDA itself has failed, raise the error that led to the abort instead of CUDA's.
        with suppress(RuntimeError):
            self._watcher.fail(TransportError(reason))
            self._watcher.raised = True

    def _start(
        self, put: Callable[[], None], tensors: Sequence[torch.Tensor], posted: Posted
    ) -> _Wait:
        """Put one step on the communication stream, after the caller's work so far.

        Returns a function that makes the caller's stream wait for it.
        """
        caller = cuda.current_stream(tensors[0].device if tensors else None)
        ours = self._backend.stream(caller.device)
        # One stream for all steps keeps them in the same order on all ranks.
        with ours.turn, cuda.stream(ours.stream):
            ours.stream.wait_event(caller.record_event())
            capturing = cuda.is_current_stream_capturing()
            # Keep the allocator from reusing their memory too early. In a graph the order of the
            # streams is enough.
            for tensor in () if capturing else tensors:
                tensor.record_stream(ours.stream)
            self._bounded(put, posted)
            posted.event = ours.stream.record_event()
        if not capturing:
            self._watcher.add(posted)
        return partial(caller.wait_event, posted.event)

    def _open(self, device: torch.device, step: str, timeout: float) -> None:
        """Make the communicators at the first use of a GPU; a collective."""
        if device not in self._opened and not cuda.is_current_stream_capturing():
            join = partial(self._backend.open, self._host, device, timeout)
            self._bounded(join, Posted(self._others, step, timeout))
            self._opened.add(device)

    def _bounded(self, job: Callable[[], Any], posted: Posted) -> None:
        """Run a job; a failure aborts the communicators."""
        if self._closed:
            raise TransportError(f"{posted.step}: this NCCL transport was closed")
        self._watcher.raise_error(posted.step)
        try:
            with translate_errors(posted.step):
                job()
            return
        except TimeoutError as error:
            self._watcher.late(posted, error.args)
        except TransportError as error:
            self._watcher.fail(error)
        # Raise the first error found: the error caught here may be a consequence of its abort.
        self._watcher.raise_error()


def _end_launches(memories: Sequence[NodeMemory], graphs: Graphs) -> None:
    # First, since graphs and communicators may wait for work behind the launches.
    for memory in memories:
        memory.node.give_up()
    graphs.reset()


def _end(process: int, watcher: Watcher, graphs: Graphs, backend: Backend) -> None:
    # Not a method: a finalizer that refers to its object would keep it alive.
    # CUDA cannot be used in a forked child, and the thread that holds a lock may not exist there.
    if os.getpid() == process:
        watcher.stop()
        graphs.reset()
        backend.close()


class Graphs:
    """The CUDA graphs of one transport, which share memory since they never run concurrently.

    NCCL keeps a communicator alive for each graph that was captured with it: destroying or aborting
    the communicator waits until the last of these graphs is gone.
    """

    def __init__(self) -> None:
        self._graphs: weakref.WeakSet[cuda.CUDAGraph] = weakref.WeakSet()
        # Reentrant: any allocation may make Python collect the transport, which calls `reset`.
        self._lock = threading.RLock()
        self._ended = False

    def capture(self, work: Callable[[], Any], stream: cuda.Stream) -> Callable[[], None]:
        """Capture the work that `work` puts on `stream` and on the current, non-default stream.

        Returns a function that puts the graph on the current stream. RuntimeError if the work
        cannot be captured. TransportError if CUDA has ended the capture; the function raises it,
        too, after `reset`.
        """
        graph, current = cuda.CUDAGraph(), cuda.current_stream()
        with self._lock:
            pool = None if self._ended else next((each.pool() for each in self._graphs), None)
        # Let other threads, such as backward's, make calls that a capture forbids.
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            stream.wait_stream(current)
            work()
        finally:
            # After an error, too: until the capture ends, torch keeps the memory of all streams.
            _end_capture(graph, current, stream)
        with self._lock:
            if self._ended:
                graph.reset()
            self._graphs.add(graph)

        def launch() -> None:
            with self._lock:
                if self._ended:
                    raise TransportError("the CUDA graph was destroyed, with its communicators")
                graph.replay()

        return launch

    def reset(self) -> None:
        """Destroy all graphs; CUDA frees those under way when they end."""
        with self._lock:
            self._ended = True
            for graph in self._graphs:
                graph.reset()


def _end_capture(graph: cuda.CUDAGraph, current: cuda.Stream, stream: cuda.Stream) -> None:
    try:
        current.wait_stream(stream)
        graph.capture_end()
    except RuntimeError as error:
        raise TransportError(
            "CUDA ended the capture of a request in a graph, as it does if another thread calls "
            "torch.cuda.synchronize() meanwhile: do not, or set ADASUM_CUDA_GRAPHS=0"
        ) from error
