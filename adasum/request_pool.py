"""Requests for buffers that are reduced at every step, but may have another address each time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from collectives import Group, Reducer, Request, Work

_Key: TypeAlias = tuple[str, tuple[int, ...], torch.dtype, torch.device, int, str | None]

# More than any model has buckets: there are so many only where models were dropped.
_MAX_REQUESTS = 1024


class RequestPool:
    """Keeps requests from one step to the next, to be started again with another buffer.

    It holds those that are not in flight, by their arguments. Between two reductions a request
    holds no buffer, so the pool keeps no memory alive that DDP or FSDP has replaced or freed.
    Making a request is not negotiated with the other ranks, which may have joined, or see the
    buffer for the first time.
    """

    def __init__(self) -> None:
        self._free: WeakKeyDictionary[Group, dict[_Key, Request]] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[type[RequestPool], tuple[()]]:
        # Requests belong to this process: a copy or a pickle of the pool is an empty one.
        return RequestPool, ()

    def start(
        self,
        group: Group,
        buffer: Tensor,
        op: Reducer,
        algorithm: str | None,
        name: str,
        segments: Sequence[int],
    ) -> PooledReduction:
        """Start an all-reduce of the buffer, in place; arguments as `Group.all_reduce`."""
        free = self._free.setdefault(group, {})
        # A request keeps its operator alive, whose id is therefore no other's.
        key = (name, tuple(segments), buffer.dtype, buffer.device, id(op), algorithm)
        request = free.pop(key, None)
        if request is None:
            request = group.all_reduce_init(
                buffer, op, algorithm=algorithm, name=name, segments=segments, negotiate=False
            )
        work = request.start(buffer)

        def wait() -> None:
            request.wait()
            request.release()
            if len(free) >= _MAX_REQUESTS:
                free.clear()
            free[key] = request

        return PooledReduction(work, wait)


class PooledReduction(NamedTuple):
    """A started all-reduce.

    Attributes:
        work: Its Work, for callbacks and for whoever else waits.
        wait: Blocks until the buffer holds the result, and gives the request back; raises what
            failed, and then does not give it back.
    """

    work: Work
    wait: Callable[[], None]
