"""CUDA graphs of a transport's messages and of what is between them.

NCCL keeps a communicator alive for each graph that was captured with it: to destroy or to abort one
waits until the last of these graphs is gone.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch import cuda

from collectives.errors import TransportError


class Graphs:
    """The graphs of one transport, which are launched one after the other on one stream.

    So they share memory: nothing in it is of use behind the end of a launch.
    """

    def __init__(self) -> None:
        self._graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self._process = os.getpid()
        # Reentrant: Python may collect the transport, whose end resets, at any allocation.
        self._lock = threading.RLock()
        self._ended = False

    def capture(self, work: Callable[[], Any], stream: cuda.Stream) -> Graph:
        """Return a graph of what `work` puts on the current stream, which is not the default one.

        stream: Another stream on which it puts work. RuntimeError where that cannot be captured,
        TransportError where CUDA has ended the capture, or `reset` was called.
        """
        with self._lock:
            pool = next((pool for each in self._graphs if (pool := each.pool())), None)
        graph = Graph(work, stream, pool)
        with self._lock:
            if self._ended:
                graph.reset()
            self._graphs.add(graph)
        return graph

    def reset(self) -> None:
        """Destroy all graphs, also of those under way: CUDA frees these at their end."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._ended = True
            graphs = [*self._graphs]
        for graph in graphs:
            graph.reset()


class Graph:
    """A graph; arguments as for `Graphs.capture`. Any thread may reset it at any time.

    pool: The memory of another graph, to be shared.
    """

    def __init__(self, work: Callable[[], Any], stream: cuda.Stream, pool: Any) -> None:
        graph = cuda.CUDAGraph()
        # One `try` for all of it: an interrupt may come at any line.
        try:
            # Of calls that are not allowed meanwhile, such as to ask for memory, this thread's
            # alone: others, backward's for one, go on.
            graph.capture_begin(pool, capture_error_mode="thread_local")
            work()
            _end(graph, stream)
        except BaseException:
            if cuda.is_current_stream_capturing():
                _end(graph, stream)
            raise
        self._graph: Any = graph
        self._lock = threading.Lock()

    def pool(self) -> Any:
        """Return what names its memory; None after `reset`."""
        with self._lock:
            return None if self._graph is None else self._graph.pool()

    def launch(self) -> None:
        """Put it on the current stream; TransportError after `reset`."""
        with self._lock:
            if self._graph is None:
                raise TransportError("the CUDA graph was destroyed, with its communicators")
            self._graph.replay()

    def reset(self) -> None:
        """Destroy it, as soon as it is not under way."""
        with self._lock:
            graph, self._graph = self._graph, None
        if graph is not None:
            graph.reset()


def _end(graph: cuda.CUDAGraph, stream: cuda.Stream) -> None:
    """End a capture, also one whose work has failed: till then torch keeps memory of all streams.

    TransportError where CUDA has ended it, and torch does not know.
    """
    try:
        with cuda.stream(stream):
            behind = stream.record_event() if cuda.is_current_stream_capturing() else None
        if behind is not None:
            # What a failure has left unjoined: all streams have to.
            cuda.current_stream().wait_event(behind)
        graph.capture_end()
    except RuntimeError as error:
        raise TransportError(
            "CUDA ended the capture of a request in a graph, as it does where another thread calls "
            "torch.cuda.synchronize() meanwhile: do not, or set ADASUM_CUDA_GRAPHS=0"
        ) from error
