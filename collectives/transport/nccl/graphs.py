"""CUDA graphs of a transport's steps.

NCCL keeps a communicator alive for each graph that was captured with it: to destroy or abort the
communicator waits until the last of its graphs is gone.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch import cuda

from collectives.errors import TransportError


class Graphs:
    """The graphs of one transport. One runs after the other, so they share their memory."""

    def __init__(self) -> None:
        self._graphs: weakref.WeakSet[cuda.CUDAGraph] = weakref.WeakSet()
        # Reentrant: Python may collect the transport, which resets, at any allocation.
        self._lock = threading.RLock()
        self._ended = False

    def capture(self, work: Callable[[], Any], stream: cuda.Stream) -> Callable[[], None]:
        """Capture what `work` puts on `stream` and on the current one, which is not the default.

        Returns a function that puts the graph on the current stream. RuntimeError if the work
        cannot be captured, TransportError if CUDA has ended the capture, or after `reset`.
        """
        graph, current = cuda.CUDAGraph(), cuda.current_stream()
        with self._lock:
            pool = None if self._ended else next((each.pool() for each in self._graphs), None)
        # Other threads, such as backward's, may go on with calls that a capture forbids.
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            stream.wait_stream(current)
            work()
        finally:
            # Also after an error: until then torch keeps the memory of all streams.
            _end(graph, current, stream)
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


def _end(graph: cuda.CUDAGraph, current: cuda.Stream, stream: cuda.Stream) -> None:
    try:
        current.wait_stream(stream)
        graph.capture_end()
    except RuntimeError as error:
        raise TransportError(
            "CUDA ended the capture of a request in a graph, as it does if another thread calls "
            "torch.cuda.synchronize() meanwhile: do not, or set ADASUM_CUDA_GRAPHS=0"
        ) from error
