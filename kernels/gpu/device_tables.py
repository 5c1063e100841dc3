"""Memory on a device that kernels read or write beside tensors: tables and scratch.

A table is looked up by its whole content, so that none is uploaded twice. What is kept is bounded:
when a device has its limit of tables, the device is synchronized and the half that was not used for
longest is dropped, except what a CUDA graph may read at each replay. Too much of that is an error.
An event would not do in the place of the synchronization: plans run on streams of which nothing is
known here.
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
# Bytes up to which the driver copies pageable memory without waiting for earlier work.
_COPIED_AT_ONCE = 1 << 16


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def upload(
    values: np.ndarray, device: torch.device, pinned: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Copy int64 `values` to `device`; return (device tensor, host tensor), both to be kept.

    Outside graph capture the copy goes through a stream of its own and is complete on return: every
    stream may read it, and no earlier work is waited for. Inside, the copy becomes part of the
    graph: each replay reads the pinned host tensor again and fills the device tensor, which lies in
    the graph's own memory. Once that tensor is let go, later work of the graph may use its memory.

    Args:
        values: What to copy.
        device: Where to.
        pinned: The host tensor of equal values that another graph reads, to be read by this one.
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
        limit: How many a device may have that no graph reads.
        graph_limit: How many tables of different content a device may have that graphs read.
            Nothing tells when a graph is gone, so these stay: tables that were there before the
            capture, and of those made in it the host tensor, which all graphs that make the same
            table share.
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
        """Return the table of `key`, made by `make` where there is none.

        Args:
            key: All that its content follows from.
            device: Where it lies.
            make: Returns what starts with the two tensors of `upload`, called with `pinned`.

        Raises:
            RuntimeError: Too many have been seen by graphs.
        """
        with self._lock:
            tables = self._tables[device]
            table = tables.get(key)
            if not _is_capturing(device):
                if table is None:
                    self._make_room(device)
                    table = make(None)
                else:
                    del tables[key]
                # The last one is the one used last.
                tables[key] = table
                return table
            seen, pinned = self._seen[device], self._pinned[device]
            counted = key in (pinned if table is None else seen)
            if not counted and len(seen) + len(pinned) >= self._graph_limit:
                raise RuntimeError(
                    f"CUDA graphs have captured calls on {self._graph_limit} lists of tensors "
                    "or segments, whose tables stay: make a plan before the capture, and keep "
                    "it as long as the graph"
                )
            if table is None:
                # No other graph may use it, which only this one fills.
                table = make(pinned.get(key))
                pinned[key] = table[1]
            else:
                seen[key] = table
            return table

    def _make_room(self, device: torch.device) -> None:
        """Drop tables of a device where there is no room for one more."""
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
        planned: Whether a plan keeps it. Its first addresses are looked up among all tables, and
            whatever stream the plan then runs on may read them; those that it is rebound to are
            written to memory of its own. The addresses of a direct call never are in a table that
            stays: most lists of tensors are seen once.
    """

    def __init__(self, planned: bool = True) -> None:
        self._planned = planned
        self._table: Tensor | None = None
        self._own = False

    def write(self, addresses: array[int], device: torch.device) -> Tensor:
        """Return the table of these addresses, written in the order of the current stream.

        Raises:
            RuntimeError: A graph is being captured, which would write them at each replay.
        """
        new = self._table is None or len(addresses) != len(self._table)
        capturing = _is_capturing(device)
        if new and (self._planned or capturing):
            key = ("addresses", addresses.tobytes())

            def make(pinned: Tensor | None) -> tuple[Tensor, Tensor]:
                return upload(np.array(addresses, dtype=np.int64), device, pinned)

            self._table, self._own = TABLES.fetch(key, device, make)[0], False
            return self._table
        if capturing:
            raise RuntimeError("a plan cannot be bound to other tensors while a graph is captured")
        host = torch.frombuffer(addresses, dtype=torch.int64)
        # Of up to 64 KiB CUDA has taken its own copy on return. torch keeps pinned memory that is
        # copied from until the copy is done.
        on_gpu = device.type == "cuda"
        if on_gpu and 8 * len(addresses) > _COPIED_AT_ONCE:
            host = host.pin_memory()
        if self._table is None or new or not self._own:
            self._table, self._own = host.to(device, non_blocking=True), on_gpu
        else:
            self._table.copy_(host, non_blocking=True)
        return self._table


class Scratch:
    """Memory that a launch needs while it runs: one pair of tensors for each stream.

    Launches on one stream follow each other and may share it. A CUDA graph has its own.
    """

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        # Beside their lengths, which torch tells in half a microsecond each.
        self._kept: dict[Hashable, tuple[int, int, tuple[Tensor, Tensor]]] = {}

    def fetch(
        self, use: Hashable, device: torch.device, floats: int, counters: int, stream: int
    ) -> tuple[Tensor, Tensor]:
        """Return float64 and int64 memory, the latter zero before its first use.

        Args:
            use: Tells kernels apart that leave the counters in different states.
            device: Where it lies.
            floats: How many float64 there are at least.
            counters: How many int64 there are at least.
            stream: The current one.
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
