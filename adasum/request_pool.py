"""Requests for buffers that are reduced at every step, and may lie elsewhere each time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from collectives import Group, Reducer, Request, Work

_Key: TypeAlias = tuple[str, tuple[int, ...], torch.dtype, torch.device, int, str | None]

# More than any model has buckets: only of models that were dropped can there be so many.
_MAX_REQUESTS = 1024


class RequestPool:
    """Keeps the requests that are not started, by all that makes an all-reduce what it is.

    Between two reductions a request holds no buffer, so the pool keeps no memory alive that DDP or
    FSDP has replaced or freed. Requests are not negotiated with the other ranks, which may have
    joined, or see the buffer for the first time.
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
        *,
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
        return PooledReduction(free, key, request, buffer)


class PooledReduction:
    """A started all-reduce.

    Attributes:
        work: Its Work, for callbacks and for whoever else waits.
    """

    def __init__(
        self, free: dict[_Key, Request], key: _Key, request: Request, buffer: Tensor
    ) -> None:
        self._free = free
        self._key = key
        self._request = request
        self.work: Work = request.start(buffer)

    def wait(self) -> None:
        """Block until the buffer holds the result, and give the request back; raise what failed.

        A request that failed is not given back.
        """
        self._request.wait()
        self._request.release()
        if len(self._free) >= _MAX_REQUESTS:
            self._free.clear()
        self._free[self._key] = self._request
