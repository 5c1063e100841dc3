"""Requests that are kept from one step to the next: the optimizer's, DDP's and FSDP's."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor

from adasum.observer import ObservedGram
from adasum.reducer import AdasumReducer
from collectives import Request, Work

# More than any model has buckets: there are so many only where models were dropped.
_MAX_REQUESTS = 1024


class RequestPool:
    """Keeps requests that are not in flight, to be started again.

    What makes them must not negotiate with the other ranks, which may have joined, or see the
    buffer for the first time.
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
        """Start the request of a holder and a key, which is made unless it is here.

        The request ends with its holder: its buffer or, where that changes, its group. A `buffer`
        is reduced this time alone: afterwards the request holds none, so that the pool keeps no
        memory alive that DDP or FSDP has replaced or freed. Without one it keeps the buffer that it
        was made for.
        """
        free = self._free.setdefault(holder, {})
        # Taken out while it is in flight: a second start of the same kind gets one of its own.
        request = free.pop(key, None) or make()
        work = request.start(buffer)

        def wait() -> ObservedGram | None:
            # What fails here is not given back: its state is unknown.
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
    """A request in flight: its Work, for callbacks and for whoever else waits, and `wait`.

    That blocks until the buffer holds the result, and gives the request back; raises what failed.
    Returns the Gram matrices of an observed Adasum that has made some.
    """

    work: Work[Any]
    wait: Callable[[], ObservedGram | None]
