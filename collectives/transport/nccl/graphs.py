"""CUDA graphs of a transport's messages and of what is between them.

NCCL keeps a communicator alive for each graph that was captured with it: to destroy or to abort one
waits until the last of these graphs is gone.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
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

    def capture(self, work: Callable[[], Any]) -> Graph:
        """Return a graph of what `work` puts on the current stream, which is not the default one.

        Raises:
            RuntimeError: What it does cannot be captured.
        """
        pool = next((pool for each in self._graphs if (pool := each.pool())), None)
        graph = Graph(work, pool)
        self._graphs.add(graph)
        return graph

    def reset(self) -> None:
        """Destroy all graphs, also of those under way: CUDA frees these at their end."""
        if os.getpid() == self._process:
            for graph in [*self._graphs]:
                graph.reset()


class Graph:
    """A graph. Any thread may reset it at any time.

    Args:
        work: What is captured.
        pool: The memory of another graph, to be shared.
    """

    def __init__(self, work: Callable[[], Any], pool: Any) -> None:
        graph = cuda.CUDAGraph()
        # Of calls that are not allowed meanwhile, such as to ask for memory, this thread's alone:
        # others, backward's for one, go on.
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            # The error that ended the work, not what it leaves the capture in.
            with suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
        self._graph: Any = graph
        self._lock = threading.Lock()

    def pool(self) -> Any:
        """Return what names its memory; None after `reset`."""
        with self._lock:
            return None if self._graph is None else self._graph.pool()

    def launch(self) -> None:
        """Put it on the current stream.

        Raises:
            TransportError: After `reset`.
        """
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
