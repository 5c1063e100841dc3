"""Device memory of kernels in addition to their tensors: tables and scratch memory.

A table is looked up by its whole content, so that none is uploaded twice. When a device has its
limit of tables, the device is synchronized and the least recently used half is dropped, except
tables that a CUDA graph may read at each replay. Too many of those are an error. An event could not
replace the synchronization, since plans run on streams that are not known here.
"""

from __future__ import annotations

import threading
from array import array
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import torch
from torch import Tensor

_streams: dict[torch.device, torch.cuda.Stream] = {}
# The driver copies pageable memory of up to so many bytes without waiting for earlier work.
_COPIED_AT_ONCE = 1 << 16
_HOST = torch.device("cpu")


def _is_capturing(device: torch.device) -> bool:
    # Not by `device.type`, which takes a microsecond.
    return device != _HOST and torch.cuda.is_current_stream_capturing()


def upload(
    values: np.ndarray, device: torch.device, pinned: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Copy int64 `values` to `device`; return (device tensor, host tensor), which must be kept.

    Outside graph capture the copy goes through a stream of its own and is complete on return: every
    stream may read it, and it waits for no earlier work. During capture the copy becomes part of
    the graph: each replay reads the pinned host tensor again and fills the device tensor, which
    lies in the graph's own memory. Once that tensor is freed, later work of the graph may use its
    memory.

    Args:
        values: The values to copy.
        device: The device to copy to.
        pinned: A host tensor of equal values that another graph reads, to share with this one.
    """
    host = torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))
    if device.type != "cuda":
        return host, host
    host = host.pin_memory() if pinned is None else pinned
    if _is_capturing(device):
        return host.to(device, non_blocking=True), host
    stream = _streams.get(device)
    if stream is None:
        stream = _streams[device] = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        table = host.to(device, non_blocking=True)
    stream.synchronize()
    return table, host


class DeviceTables:
    """Tables by their content.

    Args:
        limit: Maximum number of tables per device that no graph reads.
        graph_limit: Maximum number of tables of different content per device that graphs read. The
            end of a graph is not known here, so these are kept for ever: tables from before the
            capture and, of tables made during it, the host tensors, which graphs with equal tables
            share.
    """

    def __init__(self, limit: int = 512, graph_limit: int = 4096) -> None:
        self._limit, self._graph_limit = limit, graph_limit
        self._tables: defaultdict[torch.device, dict[Hashable, Any]] = defaultdict(dict)
        self._pinned: defaultdict[torch.device, dict[Hashable, Tensor]] = defaultdict(dict)
        self._seen: defaultdict[torch.device, dict[Hashable, Any]] = defaultdict(dict)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(map(len, (*self._tables.values(), *self._pinned.values())))

    def fetch(
        self, key: Hashable, device: torch.device, make: Callable[[Tensor | None], Any]
    ) -> Any:
        """Return the table of `key`; `make` makes it if it does not exist.

        Args:
            key: All values that the content depends on.
            device: The table's device.
            make: Returns a tuple that begins with `upload`'s two tensors, called with `pinned`.

        Raises:
            RuntimeError: Graphs have read too many tables.
        """
        with self._lock:
            tables = self._tables[device]
            if not _is_capturing(device):
                # Move the table to the end: the dict is in order of last use.
                table = tables.pop(key, None)
                if table is None:
                    self._make_room(device)
                    table = make(None)
                tables[key] = table
                return table
            table = tables.get(key)
            seen, pinned = self._seen[device], self._pinned[device]
            counted = key in (pinned if table is None else seen)
            if not counted and len(seen) + len(pinned) >= self._graph_limit:
                raise RuntimeError(
                    f"CUDA graphs have captured calls on {self._graph_limit} lists of tensors "
                    "or segments, whose tables stay: make a plan before the capture, and keep "
                    "it as long as the graph"
                )
            if table is None:
                # Only this graph fills the device tensor, so no other graph may use it.
                table = make(pinned.get(key))
                pinned[key] = table[1]
            else:
                seen[key] = table
            return table

    def _make_room(self, device: torch.device) -> None:
        """Drop tables of a device if there is no room for one more."""
        tables, seen = self._tables[device], self._seen[device]
        if len(tables) - len(seen) >= self._limit:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            droppable = [key for key in tables if key not in seen]
            for key in droppable[: -(-len(droppable) // 2)]:
                del tables[key]


TABLES = DeviceTables()


class AddressTable:
    """int64 addresses in device memory.

    Args:
        planned: Whether a plan keeps it. A plan's first addresses are looked up among all tables,
            and any stream that the plan runs on may read them. Addresses of a rebound plan are
            written to memory of its own. The addresses of direct calls are not kept, since most
            lists of tensors occur once.
    """

    def __init__(self, planned: bool = True) -> None:
        self._planned = planned
        self._table: Tensor | None = None
        self._own = False

    def write(self, addresses: array[int], device: torch.device) -> Tensor:
        """Return the table of these addresses, written in the order of the current stream.

        Raises:
            RuntimeError: A graph is being captured, and would write the addresses at each replay.
        """
        capturing, known = _is_capturing(device), self._table
        rebound = known is not None and len(addresses) == len(known)
        if rebound and capturing:
            raise RuntimeError("a plan cannot be bound to other tensors while a graph is captured")
        if capturing or (self._planned and not rebound):
            key = ("addresses", addresses.tobytes())

            def make(pinned: Tensor | None) -> tuple[Tensor, Tensor]:
                return upload(np.array(addresses, dtype=np.int64), device, pinned)

            found: Tensor = TABLES.fetch(key, device, make)[0]
            if self._planned:
                self._table, self._own = found, False
            return found
        host = torch.frombuffer(addresses, dtype=torch.int64)
        # Up to 64 KiB, CUDA copies pageable memory before the call returns. Larger tables use
        # pinned memory, which torch keeps alive until the copy is done.
        if 8 * len(addresses) > _COPIED_AT_ONCE and device != _HOST:
            host = host.pin_memory()
        if known is not None and self._own:
            return known.copy_(host, non_blocking=True)
        table = host.to(device, non_blocking=True)
        if rebound:
            self._table, self._own = table, device != _HOST
        return table


class Scratch:
    """Memory that a launch needs while it runs: one pair of tensors for each stream.

    Launches on one stream run one after the other and may share it. A CUDA graph has its own.
    """

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        # With their lengths, since asking torch for each takes half a microsecond.
        self._kept: dict[Hashable, tuple[int, int, tuple[Tensor, Tensor]]] = {}

    def fetch(
        self, use: Hashable, device: torch.device, floats: int, counters: int, stream: int
    ) -> tuple[Tensor, Tensor]:
        """Return float64 and int64 memory, the latter zero before its first use.

        Args:
            use: A key that differs for kernels that leave the counters in different states.
            device: The memory's device.
            floats: Minimum number of float64.
            counters: Minimum number of int64.
            stream: The current stream.
        """
        # The default stream, 0, cannot be captured.
        if stream and _is_capturing(device):
            return _scratch(device, floats, counters)
        key = (use, device, stream)
        found = self._kept.get(key)
        if found is None or found[0] < floats or found[1] < counters:
            if found is None and len(self._kept) >= self._limit:
                if device.type == "cuda":
                    for other in {kept[2][0].device for kept in self._kept.values()}:
                        torch.cuda.synchronize(other)
                self._kept.clear()
            if found is not None:
                floats, counters = max(floats, found[0]), max(counters, found[1])
            found = self._kept[key] = floats, counters, _scratch(device, floats, counters)
        return found[2]


def _scratch(device: torch.device, floats: int, counters: int) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(floats, dtype=torch.float64, device=device),
        torch.zeros(counters, dtype=torch.int64, device=device),
    )
