"""Requests of the optimizer, DDP and FSDP that are kept from step to step."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor

from adasum.observer import ObservedGram
from adasum.reducer import AdasumReducer
from collectives import Request, Work

# More than any model's buckets: a pool reaches it only after models were dropped.
_MAX_REQUESTS = 1024


class RequestPool:
    """Keeps requests that are not in flight, to be started again.

    A function that makes a request must not negotiate: other ranks may have joined, or may already
    have a request for their buffer.
    """

    def __init__(self) -> None:
        self._free: WeakKeyDictionary[Any, dict[Hashable, Request[Any]]] = WeakKeyDictionary()

    def start(
        self,
        holder: Any,
        key: Hashable,
        make: Callable[[], Request[Any]],
        buffer: Tensor | None = None,
    ) -> StartedRequest:
        """Start the request of a holder and a key; make it if the pool does not have it.

        A request is dropped with its holder: its buffer or, if buffers change, its group. A
        `buffer` is reduced this time only, and released afterwards, so that the pool keeps no
        memory alive that DDP or FSDP has replaced or freed. Without one the request keeps the
        buffer that it was made for.
        """
        free = self._free.setdefault(holder, {})
        # Out of the pool while in flight: a second start of the same kind makes another request.
        request = free.pop(key, None) or make()
        work = request.start(buffer)

        def wait() -> ObservedGram | None:
            # A request that fails here is not given back: its state is unknown.
            request.wait()
            gram = request.op.take_gram() if isinstance(request.op, AdasumReducer) else None
            if buffer is not None:
                request.release()
            if len(free) >= _MAX_REQUESTS:
                free.clear()
            free[key] = request
            return gram

        return StartedRequest(work, wait)


class StartedRequest(NamedTuple):
    """A request in flight: its Work, for callbacks and other waiters, and `wait`.

    `wait` blocks until the buffer holds the result, and gives the request back to the pool, or
    raises the reduction's error. It returns the Gram matrices of an observed Adasum, or None.
    """

    work: Work[Any]
    wait: Callable[[], ObservedGram | None]
